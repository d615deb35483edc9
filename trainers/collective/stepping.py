"""The optimizer of a collective job whose strategy changes what a step is: merged gradients, scaled losses,
models that are averaged. Leaves counting to the cadence and scaling to the scaler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trainers import progress
from trainers.collective.averaging import average_state
from trainers.collective.cadence import Cadence
from trainers.collective.scaling import DistributedScaler
from trainers.errors import NotSupportedError, UsageError
from trainers.optimizer import DistributedOptimizer


class SteppingOptimizer(DistributedOptimizer):
    """`step` updates when the cadence says so, and only with gradients that have been unscaled.

    `scaler`: of amp in float16; a script may scale with one of its own from fleet.distributed_scaler.
    `average`: brings the models of all ranks together. `own_backward`: the script scales its loss itself.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        cadence: Cadence,
        average: Callable[[], None],
        *,
        scaler: DistributedScaler | None = None,
        own_backward: bool = False,
    ) -> None:
        super().__init__(inner)
        self.cadence = cadence
        self.scaler = scaler
        self._average = average
        self._own_backward = own_backward
        self._unscaled = False
        self._stepping = False
        self._kept: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        inner.register_step_pre_hook(self._refuse_direct_step)
        cadence.followed = True

    @property
    def merges(self) -> bool:
        return self.cadence.merges

    def minimize(self, loss: torch.Tensor) -> None:
        if self.has_gradients():
            self._check_scaled("loss.backward()")
        elif self._own_backward:
            raise UsageError(
                'gradient_scale_configs scale_strategy is "customized", and minimize(loss) was called '
                'without gradients: scale the loss and call its backward() before, or use "avg" or "sum"'
            )
        else:
            scaled = loss if self.scaler is None else self.scaler.scale(loss)
            scaled.backward()  # type: ignore[no-untyped-call]  # torch's annotation
        progress.meter.has_loss(loss)
        if self.scaler is None:
            self.step()
            self.zero_grad()
        else:
            self.scaler.minimize(self, loss)

    def has_gradients(self) -> bool:
        """Whether there has been a backward pass since the last step."""
        return any(
            param.grad is not None and not self._is_kept(param)
            for group in self.param_groups
            for param in group["params"]
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if closure is not None:
            raise NotSupportedError(
                "NotSupported: step(closure) with strategy.gradient_merge, localsgd, amp in float16 or "
                "gradient_scale_configs; call backward() and step()"
            )
        self._check_kept()
        if self.cadence.merges:
            self.cadence.merge()
            self._keep()
            return None
        self._check_scaled("step()")
        self._stepping = True
        try:
            self.inner.step()
        finally:
            self._stepping = False
        self._kept.clear()
        if self.cadence.update():
            self._bring_together()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing while gradients are being merged."""
        if not self.cadence.merged:
            super().zero_grad(set_to_none)

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """A scaler's step: gradients are unscaled; when it makes no step, they were not finite."""
        before = self.cadence.updates
        self._unscaled = True
        try:
            yield
        finally:
            self._unscaled = False
        if self.cadence.updates == before:
            self.cadence.drop()
            self._kept.clear()

    def before_checkpoint(self) -> None:
        """All ranks call it: with localsgd their models become one, and the state of their updates, as a
        checkpoint has only one of each.
        """
        if self.cadence.localized:
            self._bring_together()
            average_state(self.inner)

    def extra_state(self) -> dict[str, float]:
        """What a checkpoint keeps besides: how many updates there have been, the scaler's state. Gradients
        that have been merged and not used are not in a checkpoint.
        """
        scaler = {} if self.scaler is None else self.scaler.state_dict()
        return {"updates": self.cadence.updates} | {f"scaler.{key}": value for key, value in scaler.items()}

    def load_extra_state(self, state: Mapping[str, float]) -> None:
        """Go on where `extra_state` was taken."""
        self.cadence.resume(int(state["updates"]))
        self._kept.clear()
        scaler = {
            key.removeprefix("scaler."): value for key, value in state.items() if key.startswith("scaler.")
        }
        if self.scaler is not None and scaler:
            self.scaler.load_state_dict(scaler)

    def _bring_together(self) -> None:
        self._average()
        self.cadence.apart = 0

    def _keep(self) -> None:
        """Remember gradients by object and by how often it has changed."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._kept[param] = (param.grad, _changes(param.grad))

    def _is_kept(self, param: torch.Tensor) -> bool:
        """Whether no backward pass has changed the gradient since it was remembered."""
        kept = self._kept.get(param)
        return kept is not None and param.grad is kept[0] and _changes(param.grad) == kept[1]

    def _check_kept(self) -> None:
        for param, (grad, _) in self._kept.items():
            # A sparse gradient is replaced when another is added to it.
            if param.grad is not grad and not (param.grad is not None and grad.is_sparse):
                raise UsageError(
                    f"gradients that strategy.gradient_merge has merged over {self.cadence.merged} steps are "
                    "gone: something else than the model and the optimizer that fleet returned has cleared "
                    "or replaced them; call zero_grad() or clear_gradients() of these"
                )

    def _check_scaled(self, call: str) -> None:
        if self.scaler is not None and not self._unscaled:
            raise UsageError(
                f'strategy.amp_configs dtype is "float16", whose losses are scaled, and {call} was called '
                "without scaling: leave backward and step to minimize(loss), or use scaler = "
                'fleet.distributed_scaler(torch.amp.GradScaler("cuda")), or dtype "bfloat16"'
            )

    def _refuse_direct_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called on the optimizer that was given to "
                "fleet.distributed_optimizer(), past what the strategy asks for; call step() or minimize() "
                "of the one that it returned"
            )


def _changes(grad: torch.Tensor) -> int:
    """How often this gradient was written to; of a shard, how often its local part was."""
    local = getattr(grad, "_local_tensor", grad)
    return int(local._version)
