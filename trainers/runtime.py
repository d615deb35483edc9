"""The base of the runtimes, which refuses the calls that a kind of process does not support. Also the types
and argument checks that the runtimes share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch.nn import Module

from trainers.errors import UsageError
from trainers.roles.identity import Identity
from trainers.strategy import DistributedStrategy

Tensors = Tensor | Sequence[Tensor]
Ids = Tensors | Mapping[Module, Tensors]
"""The tensors with which embeddings will be called, by module. One embedding needs no module."""

StandIns = dict[Module, Module]
"""Ordinary modules with the current values, in place of modules whose values are on servers."""


class Runtime:
    """The calls of `trainers.fleet` in this process. Each kind of process defines those that it supports."""

    is_collective = is_server = False
    refuses: str
    """The reason for a refusal, which completes a sentence that starts with the call."""

    def __init__(self, identity: Identity, strategy: DistributedStrategy) -> None:
        self.identity = identity
        self.strategy = strategy

    def ask(self, call: str) -> Callable[..., object]:
        """Return the method for this call. Raises UsageError if this kind of process does not support it."""
        if not hasattr(self, call):
            raise self.refusal(call)
        return getattr(self, call)  # type: ignore[no-any-return]

    def refusal(self, call: str) -> UsageError:
        """Return the error for a call that this kind of process does not support."""
        return UsageError(f"fleet.{call}() {self.refuses}")


def check_model(call: str, model: object) -> Module:
    """Return `model`. Raises UsageError unless it is a torch module."""
    if not isinstance(model, Module):
        what = "no model" if model is None else f"{model!r} as the model"
        raise UsageError(
            f"fleet.{call}() was given {what}. Pass a torch.nn.Module, or the model that "
            "fleet.distributed_model() returned."
        )
    return model


def ids_by_module(ids: Ids, served: Sequence[Module]) -> Mapping[Module, Sequence[Tensor]]:
    """Return the ids by module, also if the script names no module. Raises UsageError for a module that is
    not served, and for tensors without a module if several modules are served.
    """
    if not isinstance(ids, Mapping):
        if len(served) != 1:
            raise UsageError(
                f"The ids of fleet.prefetch() name no module, but servers have {len(served)} embeddings. "
                "Return {module: ids, ...}."
            )
        ids = {served[0]: ids}
    known = {id(module) for module in served}
    for module in ids:
        if id(module) not in known:
            raise UsageError(
                f"fleet.prefetch() was given ids of {module}, which is on no server. Return ids only of "
                "embeddings on servers."
            )
    return {
        module: each if isinstance(each, Sequence) and not isinstance(each, Tensor) else [each]
        for module, each in ids.items()
    }
