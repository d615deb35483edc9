"""Replace a script's optimizer by LARS or LAMB, as Paddle's meta optimizers do.

The module implements LAMB. The library pytorch_optimizer implements LARS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from fleetrun.aliases import Document, Strings
from trainers.collective.configs import LambConfigs, LarsConfigs
from trainers.errors import NotSupportedError, UsageError

Names = Mapping[torch.Tensor, str]
"""The known names of parameters in their model."""


def lars(given: Optimizer, configs: LarsConfigs, names: Names) -> Optimizer:
    """Return LARS with the rates and momentum of the given SGD.

    It takes over the groups, so a scheduler of either optimizer works. Raises UsageError for another
    optimizer, and NotSupportedError without the library.
    """
    if type(given) is not torch.optim.SGD or not all(group["momentum"] for group in given.param_groups):
        raise UsageError(
            f"strategy.lars replaces torch.optim.SGD with momentum, but was given {_described(given)}. Pass "
            "torch.optim.SGD(..., momentum=0.9), or remove strategy.lars."
        )
    _take_over(given, "lars", configs.lars_weight_decay, configs.exclude_from_weight_decay, names)
    defaults = {"trust_coefficient": configs.lars_coeff, "maximize": given.defaults["maximize"]}
    try:
        from pytorch_optimizer import LARS
    except ImportError as error:
        raise NotSupportedError(
            "NotSupported: strategy.lars needs pytorch_optimizer, which is not installed. Install "
            "fleetrun[optimizers]."
        ) from error
    return _made(LARS, given, defaults)


def lamb(given: Optimizer, configs: LambConfigs, names: Names) -> Optimizer:
    """Return LAMB with the rates and betas of the given Adam or AdamW.

    It takes over the groups, so a scheduler of either optimizer works. Raises UsageError for another
    optimizer, and NotSupportedError for amsgrad.
    """
    if type(given) not in (torch.optim.Adam, torch.optim.AdamW):
        raise UsageError(
            f"strategy.lamb replaces torch.optim.Adam or AdamW, but was given {_described(given)}. Pass "
            "Adam or AdamW, or remove strategy.lamb."
        )
    if any(group["amsgrad"] for group in given.param_groups):
        raise NotSupportedError("NotSupported: strategy.lamb with amsgrad=True. Remove amsgrad.")
    _take_over(given, "lamb", configs.lamb_weight_decay, configs.exclude_from_weight_decay, names)
    return _made(Lamb, given, {})


class Lamb(torch.optim.AdamW):
    """Algorithm 2 of You et al. 2019.

    The update is Adam's step from 0 with rate 1, plus a share of the weight. A weight of norm 0 has the rate
    itself, so that biases are trained.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step. `closure` must be None, as in calls of fleet's optimizer."""
        groups = [
            (
                group,
                group["lr"],
                [(param, param.clone()) for param in group["params"] if param.grad is not None],
            )
            for group in self.param_groups
        ]
        for group, _, params in groups:
            group["lr"] = 1.0
            for param, _ in params:
                param.zero_()
        super().step()
        for group, rate, params in groups:
            group["lr"] = rate
            for param, weight in params:
                update = group["weight_decay"] * weight - param
                norm, change = weight.norm(), update.norm()
                ratio = torch.where((norm > 0) & (change > 0), norm / change, 1.0)
                param.copy_(weight - rate * ratio * update)

    def load_state_dict(self, state_dict: Document) -> None:
        """Load a state, also from pytorch_optimizer's Lamb in earlier versions, which counts steps in
        the group.
        """
        state = dict(state_dict["state"])
        for group in state_dict["param_groups"]:
            for place in state.keys() & set(group["params"]) if "step" in group else ():
                state[place] = {"step": group["step"], **state[place]}
        super().load_state_dict({**state_dict, "state": state})


def _made(make: Any, given: Optimizer, defaults: Document) -> Optimizer:
    for group in given.param_groups:
        for key in ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"):
            group.pop(key, None)
    made = make(given.param_groups, **defaults)
    given.register_step_pre_hook(_refuse)
    return made  # type: ignore[no-any-return]  # the library's classes are optimizers


def _take_over(given: Optimizer, field: str, decay: float, excluded: Strings, names: Names) -> None:
    """Set the weight decay in the given groups. Excluded parameters go into separate groups."""
    if given.state:
        raise UsageError(
            f"strategy.{field} cannot replace an optimizer that has made steps. Pass a new optimizer."
        )
    names = dict(names)
    for group in list(given.param_groups):
        names.update(zip(group["params"], group.pop("param_names", ()), strict=False))
        if group["weight_decay"] not in (0, decay):
            raise UsageError(
                f"strategy.{field} sets weight decay twice: {decay} in {field}_configs, and "
                f"{group['weight_decay']} in the optimizer. Remove one of them."
            )
        group["weight_decay"] = decay
        apart = [param for param in group["params"] if _is_excluded(param, excluded, names, field)]
        if not apart:
            continue
        if "initial_lr" in group:
            raise UsageError(
                f"{field}_configs exclude_from_weight_decay creates new parameter groups, but a scheduler "
                "already uses the old ones. Create the scheduler from the optimizer that "
                "fleet.distributed_optimizer() returns."
            )
        chosen = set(apart)
        group["params"] = [param for param in group["params"] if param not in chosen]
        given.param_groups.append({**group, "params": apart, "weight_decay": 0.0})
    given.param_groups[:] = [group for group in given.param_groups if group["params"]]


def _is_excluded(param: torch.Tensor, excluded: Strings, names: Names, field: str) -> bool:
    if not excluded:
        return False
    if param not in names:
        raise UsageError(
            f"{field}_configs exclude_from_weight_decay needs names, but a parameter of shape "
            f"{tuple(param.shape)} has none. Create the optimizer from model.named_parameters(), or call "
            "fleet.distributed_model(model) before fleet.distributed_optimizer()."
        )
    return any(part in names[param] for part in excluded)


def _described(optimizer: Optimizer) -> str:
    without = "momentum" in optimizer.defaults and not optimizer.defaults["momentum"]
    return f"{type(optimizer).__name__}{' without momentum' if without else ''}"


def _refuse(optimizer: Optimizer, args: object, kwargs: object) -> None:
    raise UsageError(
        f"{type(optimizer).__name__}.step() was called on the optimizer that strategy.lars or strategy.lamb "
        "replaced. Call step() or minimize() of the optimizer that fleet.distributed_optimizer() returned."
    )
