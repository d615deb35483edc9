"""Define the optimizer for strategies that change a step.

Such strategies merge gradients, scale losses, or average models. With the scaler, all ranks skip a step if
one of them found gradients that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from fleetrun.aliases import Callback, Document, Numbers
from trainers import progress
from trainers.collective.configs import AmpConfigs
from trainers.collective.data_parallel import Cadence
from trainers.errors import NotSupportedError, UsageError
from trainers.optimizer import DistributedOptimizer, parameters_of

# ---- Loss scaling for float16 among ranks


class DistributedScaler(GradScaler):
    """A GradScaler on which all ranks agree. If one finds gradients that are not finite, all skip the update.

    All ranks then lower their scale. It has the state of the given scaler. While an optimizer of
    `fleet.distributed_optimizer` merges gradients, `unscale_`, `step` and `update` wait for the step that
    updates.
    """

    def __init__(self, scaler: GradScaler, configs: AmpConfigs | None = None) -> None:
        self.__dict__ = scaler.__dict__
        self._configs = configs
        self._bad = 0  # consecutive steps that found such gradients
        self._waits = False

    def unscale_(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, DistributedOptimizer) and optimizer.merges:
            return
        super().unscale_(optimizer)
        if self.is_enabled() and dist.is_initialized() and dist.get_world_size() > 1:
            for found in self._found_inf_per_device(optimizer).values():
                dist.all_reduce(found, op=dist.ReduceOp.MAX)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not isinstance(optimizer, DistributedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if optimizer.merges:
            self._waits = True
            optimizer.step()
            return None
        with optimizer.unscaled():
            return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self._waits:
            self._waits = False
        elif self._configs is None or new_scale is not None or not self.is_enabled():
            super().update(new_scale)
        else:
            self._update(self._configs)

    def minimize(self, optimizer: DistributedOptimizer, loss: Tensor) -> None:
        """Step, update and clear gradients after `scale(loss).backward()`, under Paddle's name.

        Raises UsageError without that call.
        """
        if not optimizer.has_gradients_of(loss):
            raise UsageError(
                "scaler.minimize(optimizer, loss) was called before scaler.scale(loss).backward()"
            )
        self.step(optimizer)
        self.update()
        optimizer.zero_grad()

    def state_dict(self) -> Document:
        state = super().state_dict()
        return state | {"_bad_steps": self._bad} if state else state

    def load_state_dict(self, state_dict: Document) -> None:
        super().load_state_dict(state_dict)
        self._bad = int(state_dict.get("_bad_steps", 0))

    def _update(self, configs: AmpConfigs) -> None:
        scale = self.get_scale()
        found = any(
            bool(found.item())
            for state in self._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        )
        self._bad = self._bad + 1 if found else 0
        if not configs.use_dynamic_loss_scaling:
            super().update(scale)
        elif found and self._bad < configs.decr_every_n_nan_or_inf:
            super().update(scale)
            self.load_state_dict(self.state_dict() | {"_growth_tracker": 0})  # good steps are counted from 0
        else:
            super().update()
            self._bad = 0


def scaler_of(configs: AmpConfigs, device: str) -> DistributedScaler:
    """Return the scaler for amp_configs, for parameters on this type of device."""
    scaler = GradScaler(
        device,
        init_scale=configs.init_loss_scaling,
        growth_factor=configs.incr_ratio,
        backoff_factor=configs.decr_ratio,
        growth_interval=configs.incr_every_n_steps,
    )
    return DistributedScaler(scaler, configs)


# ---- The optimizer


class SteppingOptimizer(DistributedOptimizer):
    """An optimizer that updates when the cadence requires it, and only with unscaled gradients.

    `scaler` belongs to amp in float16. A script may also use a scaler from fleet.distributed_scaler.
    `average` averages the models of all ranks. `own_backward` is True if the script scales its loss itself.
    """

    def __init__(
        self,
        inner: Optimizer,
        cadence: Cadence,
        average: Callback,
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
        self._kept: dict[Tensor, tuple[Tensor, int]] = {}
        inner.register_step_pre_hook(self._refuse_direct_step)
        cadence.followed = True

    @property
    def merges(self) -> bool:
        return self.cadence.merges

    def minimize(self, loss: Tensor) -> None:
        found = self.has_gradients_of(loss)
        if self.has_gradients():
            self._check_scaled("loss.backward()")
        if self._own_backward and not found:
            raise UsageError(
                'gradient_scale_configs scale_strategy is "customized", but minimize(loss) was called '
                'without gradients. Scale the loss and call backward() first, or use "avg" or "sum".'
            )
        if not found:
            self._backward(loss if self.scaler is None else self.scaler.scale(loss))
        progress.meter.has_loss(loss)
        if self.scaler is None:
            self.step()
            self.zero_grad()
        else:
            self.scaler.minimize(self, loss)

    def has_gradients(self) -> bool:
        """Return True if there has been a backward pass since the last step."""
        return any(param.grad is not None and not self._is_kept(param) for param in parameters_of(self))

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if closure is not None:
            raise NotSupportedError(
                "NotSupported: step(closure) with strategy.gradient_merge, localsgd, amp in float16 or "
                "gradient_scale_configs. Call backward() and step() instead."
            )
        for param, (grad, _) in self._kept.items():
            # A sparse gradient is replaced when another one is added to it.
            if param.grad is not grad and not (param.grad is not None and grad.is_sparse):
                raise UsageError(
                    f"Gradients that strategy.gradient_merge merged over {self.cadence.merged} steps are "
                    "missing, because the script cleared or replaced them. Call zero_grad() or "
                    "clear_gradients() only on the model and the optimizer that fleet returned."
                )
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
            self._average()
            self.cadence.apart = 0
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, except while they are merged."""
        if not self.cadence.merged:
            super().zero_grad(set_to_none)

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Wrap a scaler's step. Gradients are unscaled. If the scaler skips the step, they were not
        finite.
        """
        before = self.cadence.updates
        self._unscaled = True
        try:
            yield
        finally:
            self._unscaled = False
        if self.cadence.updates == before:
            self.cadence.drop()
            self._kept.clear()

    def extra_state(self) -> dict[str, float]:
        """Return extra state for a checkpoint: the number of all updates and of separate ones, and the
        scaler's state.

        Gradients that have been merged and not used are left out.
        """
        scaler = {} if self.scaler is None else self.scaler.state_dict()
        counts = {"updates": self.cadence.updates, "apart": self.cadence.apart}
        return counts | {f"scaler.{key}": value for key, value in scaler.items()}

    def load_extra_state(self, state: Numbers) -> None:
        """Continue from `extra_state`."""
        self.cadence.resume(int(state["updates"]), int(state.get("apart", 0)))
        self._kept.clear()
        scaler = {
            key.removeprefix("scaler."): value for key, value in state.items() if key.startswith("scaler.")
        }
        if self.scaler is not None and scaler:
            self.scaler.load_state_dict(scaler)

    def _keep(self) -> None:
        """Remember gradients by object and by number of changes."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._kept[param] = (param.grad, _changes(param.grad))

    def _is_kept(self, param: Tensor) -> bool:
        """Return True if the remembered gradient has not changed in a backward pass."""
        kept = self._kept.get(param)
        return kept is not None and param.grad is kept[0] and _changes(param.grad) == kept[1]

    def _check_scaled(self, call: str) -> None:
        if self.scaler is not None and not self._unscaled:
            raise not_scaled(call)

    def _refuse_direct_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._stepping:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called on the optimizer that was passed to "
                "fleet.distributed_optimizer(), which ignores the strategy. Call step() or minimize() of "
                "the optimizer that fleet.distributed_optimizer() returned."
            )


def _changes(grad: Tensor) -> int:
    """Return how often this gradient, or the local part of a shard, was written to."""
    local = getattr(grad, "_local_tensor", grad)
    return int(local._version)


def not_scaled(call: str) -> UsageError:
    return UsageError(
        f'strategy.amp_configs dtype is "float16", which needs scaled losses, but {call} was called without '
        "scaling. Call minimize(loss) instead of backward and step, or use scaler = "
        'fleet.distributed_scaler(torch.amp.GradScaler("cuda")), or use dtype "bfloat16".'
    )
