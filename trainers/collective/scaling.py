"""Loss scaling for float16 among ranks. Knows torch's GradScaler; leaves updates to the optimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trainers.collective.configs import AmpConfigs
from trainers.optimizer import DistributedOptimizer


class DistributedScaler(torch.amp.GradScaler):
    """A GradScaler on which all ranks agree: where one finds gradients that are not finite, none updates, and
    all lower their scale. It has the state of the scaler that it is made of.

    While an optimizer of `fleet.distributed_optimizer` merges gradients, `unscale_`, `step` and `update` wait
    for the step that updates.
    """

    def __init__(self, scaler: torch.amp.GradScaler, configs: AmpConfigs | None = None) -> None:
        self.__dict__ = scaler.__dict__
        self._configs = configs
        self._bad = 0  # steps in a row that found something
        self._waits = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if _merges(optimizer):
            return
        super().unscale_(optimizer)
        if self.is_enabled() and dist.is_initialized() and dist.get_world_size() > 1:
            for found in self._found_inf_per_device(optimizer).values():
                dist.all_reduce(found, op=dist.ReduceOp.MAX)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not isinstance(optimizer, DistributedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if optimizer.merges:
            self._waits = True
            optimizer.step()
            return None
        with optimizer.unscaled():
            return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        if self._waits:
            self._waits = False
        elif self._configs is None or new_scale is not None or not self.is_enabled():
            super().update(new_scale)
        else:
            self._update(self._configs)

    def minimize(self, optimizer: DistributedOptimizer, loss: torch.Tensor) -> None:
        """Paddle's name for what follows `scale(loss).backward()`: step, update, gradients cleared."""
        self.step(optimizer)
        self.update()
        optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"_bad_steps": self._bad} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
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
            self.load_state_dict(self.state_dict() | {"_growth_tracker": 0})  # good steps are counted anew
        else:
            super().update()
            self._bad = 0


def scaler_of(configs: AmpConfigs, device: str) -> DistributedScaler:
    """The scaler that the keys of amp_configs describe, for parameters on a device of this type."""
    scaler = torch.amp.GradScaler(
        device,
        init_scale=configs.init_loss_scaling,
        growth_factor=configs.incr_ratio,
        backoff_factor=configs.decr_ratio,
        growth_interval=configs.incr_every_n_steps,
    )
    return DistributedScaler(scaler, configs)


def _merges(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, DistributedOptimizer) and optimizer.merges
