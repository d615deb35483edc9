"""Model and optimizer of a trainer while the servers hold the values: what torch's own calls on them mean
then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from trainers.errors import NotSupportedError, UsageError
from trainers.optimizer import DistributedOptimizer
from trainers.ps.trainer.optimizers import options_snapshot

_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)
"""Whether torch.export traces a copy of the model: with values of its own, which nobody refreshes."""


class Stepper(Protocol):
    """The trainer behind an optimizer."""

    @property
    def serving(self) -> bool: ...

    def step(self) -> None: ...

    def has_rows(self) -> bool: ...

    def drop_rows(self) -> None: ...


class Source(Protocol):
    """The trainer behind a model."""

    def refresh(self) -> None: ...

    def drop_rows(self) -> None: ...


class ServedOptimizer(DistributedOptimizer):
    """`step` pushes the gradients; the servers do the arithmetic and keep the state (momentum, moments).

    Learning rates may change from step to step: they travel with the push. Other options are those of
    init_worker.
    """

    def __init__(self, inner: torch.optim.Optimizer, stepper: Stepper) -> None:
        super().__init__(inner)
        self._stepper = stepper
        self._local = False
        self._frozen: list[dict[str, Any]] | None = None

    def freeze_options(self) -> None:
        """From now on only the learning rate may change, and steps go through this optimizer."""
        self._frozen = options_snapshot(self.inner)
        self.inner.register_step_pre_hook(self._refuse_direct_step)

    def _refuse_direct_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._local and self._stepper.serving:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called on the optimizer that was given to "
                "fleet.distributed_optimizer(), which trains nothing that is served; call step() or "
                "minimize() of the one that it returned"
            )

    def has_gradients(self) -> bool:
        return super().has_gradients() or self._stepper.has_rows()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._frozen is not None and options_snapshot(self.inner) != self._frozen:
            raise NotSupportedError(
                f"an option of {type(self.inner).__name__} besides lr has changed since fleet.init_worker(); "
                "the servers keep the options they were given (a scheduler with cycle_momentum changes them)"
            )
        self._stepper.step()
        return loss

    def local_step(self) -> None:
        """The arithmetic in this process: for parameters that no server trains."""
        self._local = True
        try:
            self.inner.step()
        finally:
            self._local = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._stepper.drop_rows()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("state"):
            raise NotSupportedError(
                "this optimizer state cannot be loaded: the servers keep the state, and this version of "
                "them does not load any"
            )
        super().load_state_dict(state_dict)


def watch_model(model: torch.nn.Module, source: Source, *, refresh: bool) -> Callable[[], None]:
    """Keep `state_dict()`, evaluation and `zero_grad()` true, and refuse `load_state_dict`, until the
    returned call ends it.

    `refresh`: dense values change between this trainer's own steps (async), so pull them before they are
    looked at.
    """
    handles = [model.register_load_state_dict_pre_hook(_refuse_loading)]  # type: ignore[no-untyped-call]  # torch's
    if refresh:

        def before_forward(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if not (module.training or _exporting()):
                source.refresh()

        def before_state_dict(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
            source.refresh()

        handles.append(model.register_forward_pre_hook(before_forward))
        handles.append(model.register_state_dict_pre_hook(before_state_dict))  # type: ignore[no-untyped-call]  # torch's

    def zero_grad(set_to_none: bool = True) -> None:
        type(model).zero_grad(model, set_to_none)
        source.drop_rows()

    model.__dict__["zero_grad"] = zero_grad

    def end() -> None:
        for handle in handles:
            handle.remove()
        for name in ("zero_grad", "clear_gradients"):  # closures would keep the model from being copied
            model.__dict__.pop(name, None)

    return end


def _refuse_loading(module: torch.nn.Module, state_dict: Mapping[str, Any], *rest: Any) -> None:
    raise UsageError(
        "load_state_dict() was called after fleet.init_worker(), and the servers hold the values; "
        "load before fleet.init_worker()"
    )
