"""Activations that are computed again in the backward pass instead of kept. Knows torch.utils.checkpoint;
leaves which modules to the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from trainers.collective.names import matching, outermost
from trainers.collective.shardingconfigs import RecomputeConfigs
from trainers.errors import NotSupportedError, UsageError


def recompute(model: torch.nn.Module, configs: RecomputeConfigs, *, compiled: bool = False) -> None:
    """From now on only the inputs of the named modules are kept for the backward pass. Gradients, buffers
    and random numbers are those of training without; names stay. A module inside another named one is
    computed again with that.

    Raises UsageError for a name that is no module's, and when none is named; NotSupportedError for what a
    `compiled` model cannot do.
    """
    if not configs.checkpoints:
        children = ", ".join(name for name, _ in model.named_children())
        raise UsageError(
            "strategy.recompute is True and recompute_configs names no checkpoints; give names of modules, "
            f'as {{"checkpoints": ["blocks.*"]}}; this model has {children or "none"}'
        )
    names = outermost(matching(model, configs.checkpoints, "recompute_configs checkpoints"))
    if compiled:
        _check_buffers(model, names)
    for name in names:
        module = model.get_submodule(name)
        # On the object: hooks, FSDP2's among them, stay around it, and names have no prefix.
        module.forward = _Again(module, module.forward)


def _check_buffers(model: torch.nn.Module, names: Iterable[str]) -> None:
    for name in names:
        if any(True for _ in model.get_submodule(name).buffers()):
            raise NotSupportedError(
                f"NotSupported: strategy.compile with strategy.recompute of {name!r}, which has buffers: "
                "compiled, what the forward pass writes there would be written twice; leave it out of "
                "recompute_configs, or set strategy.compile = False"
            )


class _Again:
    """A module's forward that keeps its inputs only."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # there the contexts below have no meaning
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(
            self._forward,
            *args,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), _buffers_kept(self._module)),
            **kwargs,
        )


@contextmanager
def _buffers_kept(module: torch.nn.Module) -> Iterator[None]:
    """On copies of the buffers: a batch norm's running statistics would count every batch twice."""
    places = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    for owner, name, buffer in places:
        owner._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for owner, name, buffer in places:
            owner._buffers[name] = buffer
