"""The optimizer that `fleet.distributed_optimizer` returns. Knows `minimize` and delegation; leaves where
the update happens to its `step`: here in this process, in `trainers.ps` on the servers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trainers import progress


class WrappingOptimizer(torch.optim.Optimizer):
    """An optimizer around another one. Both share groups and state, so that learning rate schedulers may be
    given either of the two.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)  # the same group dicts: a change shows in both
        self.inner = inner
        self.state = inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if "inner" in self.__dict__ and all(param_group is not group for group in self.inner.param_groups):
            self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def _share(self, loaded: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


class DistributedOptimizer(WrappingOptimizer):
    """A torch optimizer, wrapped for the fleet API."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        below: Any = inner
        while isinstance(below, torch.optim.Optimizer):  # each may be loaded, which gives it other groups
            below.register_load_state_dict_post_hook(self._share)
            below = getattr(below, "inner", None)
        self._counter = progress.Counter()
        self.register_step_post_hook(_count)

    @property
    def merges(self) -> bool:
        """Whether the next `step()` updates nothing yet, and only adds up gradients (`gradient_merge`): do
        not clip them then.
        """
        return False

    def unscaled(self) -> AbstractContextManager[None]:
        """Around a step by a scaler, whose gradients are unscaled."""
        return nullcontext()

    def minimize(self, loss: torch.Tensor) -> None:
        """One whole training step: backward, update, gradients cleared.

        Gradients that are already there are used as they are, and `loss.backward()` is not called again:
        Paddle's scripts write `loss.backward(); optimizer.minimize(loss); model.clear_gradients()`.
        """
        if not self.has_gradients():
            loss.backward()  # type: ignore[no-untyped-call]  # torch's annotation
        progress.meter.has_loss(loss)
        self.step()
        self.zero_grad()

    def has_gradients(self) -> bool:
        """Whether a backward pass has left gradients that no step has used."""
        with torch._C.DisableTorchFunctionSubclass():  # asking a weight that is served takes much longer
            return any(param.grad is not None for group in self.param_groups for param in group["params"])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        return self.inner.step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """A step is done, from whichever call; merging gradients is one too."""
    if isinstance(optimizer, DistributedOptimizer) and not torch.compiler.is_compiling():
        optimizer._counter.tick()
