"""Define the optimizer that `fleet.distributed_optimizer` returns, with `minimize` and delegation.

Its `step` decides where the update happens, here in this process, or on the servers (`trainers.ps`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from fleetrun.aliases import Document
from trainers import progress
from trainers.errors import UsageError

# ---- Losses that have been backpropagated

_NUMBER = "trainers.backward"
_NEAR = 8
"""Nodes of a backward pass that get its number. Scripts may call it on a loss times a factor."""


class _Backwards:
    """Numbers all backward passes of this process from 1, and marks the nodes of their losses."""

    latest = 0
    own = 0
    """The latest pass that the script called itself."""

    def __init__(self) -> None:
        original: Any = torch.autograd.backward

        @functools.wraps(original)
        def backward(
            tensors: Any,
            grad_tensors: object = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            *args: object,
            **options: object,
        ) -> None:
            for each in DistributedOptimizer._all:
                if each._left and each.is_cleared():  # by the model's zero_grad
                    each._left = 0
            original(tensors, grad_tensors, retain_graph, create_graph, *args, **options)
            # otherwise the pass may have been for other tensors than the parameters
            if not options.get("inputs"):
                kept = create_graph if retain_graph is None else retain_graph
                self._note([tensors] if isinstance(tensors, Tensor) else tensors, kept)

        torch.autograd.backward = backward

    def _note(self, tensors: Iterable[object], kept: bool) -> None:
        self.own = self.latest = self.latest + 1
        nodes = [getattr(each, "grad_fn", None) for each in tensors]
        for node in islice(nodes, _NEAR):
            if node is not None:
                node.metadata[_NUMBER] = self.latest, kept
                nodes += [below for below, _ in node.next_functions]


_backwards = functools.cache(_Backwards)

# ---- The optimizers


def parameters_of(optimizer: Optimizer) -> list[Parameter]:
    """Return the parameters of all groups."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Return the result of a step's closure, or None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class WrappingOptimizer(Optimizer):
    """An optimizer around another one. Both share groups and state, so schedulers accept either of them."""

    def __init__(self, inner: Optimizer) -> None:
        # the same group dicts, so that changes appear in both
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.state = inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: Document) -> None:
        super().add_param_group(param_group)
        if "inner" in self.__dict__ and all(param_group is not group for group in self.inner.param_groups):
            self.inner.add_param_group(param_group)

    def state_dict(self) -> Document:
        return self.inner.state_dict()

    def _share(self, loaded: Optimizer) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


class DistributedOptimizer(WrappingOptimizer):
    """A torch optimizer, wrapped for the fleet API."""

    _all: ClassVar[weakref.WeakSet[DistributedOptimizer]] = weakref.WeakSet()

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self._all.add(self)
        self._backwards = _backwards()
        self._cleared = self._left = 0
        below: object = inner
        while isinstance(below, Optimizer):  # each may be loaded, which gives it other groups
            below.register_load_state_dict_post_hook(self._share)
            below = getattr(below, "inner", None)
        self._counter = progress.Counter()
        self.register_step_post_hook(_count)

    @property
    def merges(self) -> bool:
        """True if the next `step()` only adds up gradients (`gradient_merge`). Do not clip them then."""
        return False

    def unscaled(self) -> AbstractContextManager[None]:
        """Return a context for a scaler's step, whose gradients are unscaled."""
        return nullcontext()

    def minimize(self, loss: Tensor) -> None:
        """Make one whole training step: backward, update, and clearing gradients.

        If the script has backpropagated this loss since the last `zero_grad()`, `loss.backward()` is not
        called again, because Paddle's scripts write `loss.backward(); optimizer.minimize(loss)`. Gradients of
        other losses that the script has backpropagated are added. Gradients left by another optimizer's
        `minimize` are dropped.
        """
        if not self.has_gradients_of(loss):
            self._backward(loss)
        progress.meter.has_loss(loss)
        self.step()
        self.zero_grad()

    def has_gradients_of(self, loss: Tensor) -> bool:
        """Return True if a backward pass went through this loss since the last `zero_grad()`.

        The call drops gradients that another optimizer's `minimize` of another loss has left. Raises
        UsageError if the script has added gradients to them.
        """
        if not self.has_gradients():
            return False
        number, kept = getattr(loss.grad_fn, "metadata", {}).get(_NUMBER, (0, False))
        if number > self._cleared and self._left in (0, number):
            # Gradients of a graph that was not kept belong to it, even zeros, as from an empty batch.
            return not kept or not self.is_cleared()
        if self._left:
            if self._backwards.own > self._left:
                raise UsageError(
                    f"{type(self.inner).__name__} has gradients from before the minimize() of another "
                    "optimizer, and the script has called backward() since. Call zero_grad() before "
                    "backward()."
                )
            self.zero_grad()
        return False

    def _backward(self, loss: Tensor) -> None:
        """Call `loss.backward()`, and note the other optimizers that get gradients from it."""
        others = [each for each in self._all if each is not self and not each.has_gradients()]
        own = self._backwards.own
        loss.backward()  # type: ignore[no-untyped-call]  # torch's annotation
        self._backwards.own = own
        for each in others:
            if each.has_gradients():
                each._left = self._backwards.latest

    def has_gradients(self) -> bool:
        """Return True if a backward pass has left gradients that no step has used."""
        # reading the gradient of a served weight takes much longer
        with torch._C.DisableTorchFunctionSubclass():
            return any(param.grad is not None for param in parameters_of(self))

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._cleared, self._left = self._backwards.latest, 0

    def is_cleared(self) -> bool:
        """Return True if each gradient is None or zero, as after the model's `zero_grad`."""
        every = [param.grad for param in parameters_of(self)]
        return all(grad is None or not grad.norm() for grad in every)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return self.inner.step(closure)

    def load_state_dict(self, state_dict: Document) -> None:
        self.inner.load_state_dict(state_dict)


def _count(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Count a step of any caller. Merging gradients counts as a step too."""
    if isinstance(optimizer, DistributedOptimizer) and not torch.compiler.is_compiling():
        optimizer._counter.tick()
