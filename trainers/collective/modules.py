"""Change the modules of a model before it is wrapped.

The changes are torch.compile, recomputed activations, and batch norms over all ranks. Recomputed activations
use torch.utils.checkpoint. Batch norm over the batches of all ranks also works on CPUs, where torch's own
refuses. Modules are found by name and pattern.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from trainers.checks import nearest
from trainers.collective.configs import CompileConfigs, RecomputeConfigs
from trainers.errors import NotSupportedError, UsageError

# ---- torch.compile


def compile_in_place(model: Module, configs: CompileConfigs) -> None:
    """Compile the module's calls from the first one on. The module keeps its type and names.

    A DDP around it still makes torch cut the program at its buckets, so gradients travel during the backward
    pass. Raises NotSupportedError if inductor lacks a C++ compiler, because the first step would fail.
    """
    check_compiler(configs.backend, "strategy.compile")

    # This does the work of `model.compile()` without its frame. Otherwise torch skips frames of its own
    # modules, so a Sequential, for example, would silently stay uncompiled.
    def call(*args: object, **kwargs: object) -> object:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's

    model._compiled_call_impl = torch.compile(
        call,
        backend=configs.backend,
        mode=configs.mode,
        dynamic=configs.dynamic,
        fullgraph=configs.fullgraph,
    )


def check_compiler(backend: str, asked: str) -> None:
    """Raise NotSupportedError if a backend of torch.compile lacks the program that it calls.

    `asked` names what requested it.
    """
    # As torch._inductor chooses it.
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if backend == "inductor" and shutil.which(compiler) is None:
        raise NotSupportedError(
            f"NotSupported: {asked} needs a C++ compiler, but {compiler!r} is missing. Install g++, set the "
            'environment variable CXX, or use the backend "aot_eager".'
        )


# ---- Modules by name and pattern


def matching_modules(model: Module, patterns: Iterable[str], what: str) -> list[str]:
    """Return the names of the modules that match the patterns, in the model's order.

    A star matches one step of a name or a part of it. `blocks.*` is each of the blocks, without the modules
    in them. Raises UsageError, with `what`, for a pattern without a match.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: set[str] = set()
    for pattern in patterns:
        steps = pattern.split(".")
        alike = [name for name in names if name.count(".") == len(steps) - 1]
        matched = {name for name in alike if all(map(fnmatchcase, name.split("."), steps))}
        if not matched:
            raise UsageError(
                f"{what} names {pattern!r}, but the model has no such module{nearest(pattern, names)}"
            )
        found |= matched
    return [name for name in names if name in found]


def outermost_modules(names: Iterable[str]) -> list[str]:
    """Return the names without modules that are inside another one of them."""
    kept: list[str] = []
    for name in sorted(names, key=lambda each: each.count(".")):
        if not any(name.startswith(f"{outer}.") for outer in kept):
            kept.append(name)
    return kept


# ---- Activations that are recomputed in the backward pass instead of kept


def recompute(model: Module, configs: RecomputeConfigs, *, compiled: bool = False) -> None:
    """Keep only the inputs of the named modules for the backward pass, from now on.

    Gradients, buffers and random numbers are as in training without recomputation, and names stay. A module
    inside another named one is recomputed with it. Raises UsageError for unknown names and for an empty list,
    and NotSupportedError for combinations that a `compiled` model does not support.
    """
    if not configs.checkpoints:
        children = ", ".join(name for name, _ in model.named_children())
        raise UsageError(
            "strategy.recompute is True, but recompute_configs names no checkpoints. Add names of modules, "
            f'such as {{"checkpoints": ["blocks.*"]}}. This model has {children or "none"}.'
        )
    names = outermost_modules(matching_modules(model, configs.checkpoints, "recompute_configs checkpoints"))
    if compiled:
        for name in names:
            if any(True for _ in model.get_submodule(name).buffers()):
                raise NotSupportedError(
                    f"NotSupported: strategy.compile with strategy.recompute of {name!r}, which has buffers. "
                    f"The compiled forward pass would update the buffers twice. Remove {name!r} from "
                    "recompute_configs, or set strategy.compile = False."
                )
    for name in names:
        module = model.get_submodule(name)
        # On the object, so that hooks (also FSDP2's) stay around it, and names stay free of a prefix.
        module.forward = _Recomputed(module, module.forward)


class _Recomputed:
    """A module's forward that keeps only its inputs.

    As a context, which may be entered again, it replaces the buffers by copies. Otherwise a batch norm's
    running statistics would count every batch twice.
    """

    def __init__(self, module: Module, forward: Callable[..., object]) -> None:
        self._module, self._forward = module, forward

    def __call__(self, *args: object, **kwargs: Any) -> object:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the contexts below are ignored there
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(
            self._forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), self), **kwargs
        )

    def __enter__(self) -> None:
        self._places = [
            (owner, name, buffer)
            for owner in self._module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]
        for owner, name, buffer in self._places:
            owner._buffers[name] = buffer.clone()

    def __exit__(self, *error: object) -> None:
        for owner, name, buffer in self._places:
            owner._buffers[name] = buffer


# ---- Batch norm over the batches of all ranks, also on CPUs, which torch's own does not support


def with_synchronized_batch_norm(model: Module) -> Module:
    """Make the model's batch norms use the batches of all ranks. Return the model with the same parameters.

    On GPUs it uses torch's SyncBatchNorm. That does not work on CPUs, and DDP refuses it there, so CPUs use
    `CpuSyncBatchNorm`.
    """
    if next(model.parameters()).device.type != "cpu":
        converted: Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch's
        return converted
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = CpuSyncBatchNorm
    return model


class CpuSyncBatchNorm(_BatchNorm):
    """A batch norm that, in training, uses the batches of all ranks together.

    Inputs and outputs are (batch, channels, ...) floats. A rank may have an empty batch. The source is Ioffe
    and Szegedy 2015, https://arxiv.org/abs/1502.03167.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [dim for dim in range(values.dim()) if dim != 1]
        shape = [1, -1, *[1] * (values.dim() - 2)]
        count = _SumOfAll.apply(torch.tensor(values.numel() // values.shape[1]))  # type: ignore[no-untyped-call]
        if count < 2:
            raise ValueError(f"batch norm in training needs more than 1 value per channel, got {count:d}")
        mean = _SumOfAll.apply(values.sum(dims)) / count  # type: ignore[no-untyped-call]  # torch's
        apart = values - mean.view(shape)  # a sum of squares of the values themselves would lose digits
        variance = _SumOfAll.apply(apart.square().sum(dims)) / count  # type: ignore[no-untyped-call]
        if self.num_batches_tracked is not None:
            self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        out = apart * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        normed: Tensor = out.to(input.dtype)
        return normed

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions."""

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(new.to(running.dtype), share)


class _SumOfAll(torch.autograd.Function):
    """The sum over all ranks. Its gradient is the sum of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _SumOfAll.forward(ctx, grad)
