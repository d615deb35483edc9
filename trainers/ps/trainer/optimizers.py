"""From a torch optimizer to the rules of the servers. Knows torch.optim's option names; leaves the formulas
to `rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainers.errors import NotSupportedError
from trainers.ps.tables.rules import SGD, Adagrad, Adam, AnyRule, SparseAdam

_KINDS = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, torch.optim.SparseAdam)
# How torch computes, not what: no effect on the result.
_IRRELEVANT = frozenset({"params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable"})
_UNSUPPORTED = ("maximize", "amsgrad", "differentiable", "decoupled_weight_decay")


def rule_for(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *, sparse: bool, name: str
) -> AnyRule:
    """The rule of one parameter. On sparse tables Adam means torch.optim.SparseAdam (lazy): torch's Adam
    has no meaning for sparse gradients. Raises NotSupportedError naming the optimizer or the option.
    """
    check_supported(optimizer)
    kind = type(optimizer)
    for option in _UNSUPPORTED:
        if group.get(option):
            raise NotSupportedError(
                f"{kind.__name__}({option}=True) cannot run on parameter servers in this version; "
                f"leave {option} out"
            )
    if kind is torch.optim.SGD:
        return _sgd(group, sparse, name)
    if kind is torch.optim.Adagrad:
        _no_sparse(group, sparse, name, "weight_decay")
        return Adagrad(
            lr_decay=float(group["lr_decay"]),
            weight_decay=float(group["weight_decay"]),
            initial_accumulator_value=float(group["initial_accumulator_value"]),
            eps=float(group["eps"]),
        )
    if kind is torch.optim.Adam:
        return _adam(group, sparse, name)
    if kind is torch.optim.SparseAdam:
        if not sparse:
            raise NotSupportedError(
                f"SparseAdam on {name!r}, which is dense; give dense parameters to torch.optim.Adam "
                "(which updates the rows of nn.Embedding(sparse=True) as SparseAdam does)"
            )
        return SparseAdam(*_betas(group), eps=float(group["eps"]))
    raise AssertionError(f"{kind.__name__} was checked, and has no rule")


def check_supported(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has no rule. A subclass has none: it may compute anything."""
    kind = type(optimizer)
    if kind not in _KINDS:
        raise NotSupportedError(
            f"{kind.__module__}.{kind.__name__} cannot run on parameter servers; "
            "use torch.optim.SGD, Adagrad, Adam or SparseAdam"
        )


def options_snapshot(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options that servers keep from the start, for each group, to notice a later change."""
    return [
        {key: value for key, value in group.items() if key not in _IRRELEVANT}
        for group in optimizer.param_groups
    ]


def _sgd(group: Mapping[str, Any], sparse: bool, name: str) -> SGD:
    _no_sparse(group, sparse, name, "weight_decay")
    _no_sparse(group, sparse, name, "momentum")
    return SGD(
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        weight_decay=float(group["weight_decay"]),
        nesterov=float(group["nesterov"]),
    )


def _adam(group: Mapping[str, Any], sparse: bool, name: str) -> Adam | SparseAdam:
    _no_sparse(group, sparse, name, "weight_decay")
    if sparse:
        return SparseAdam(*_betas(group), eps=float(group["eps"]))
    return Adam(*_betas(group), eps=float(group["eps"]), weight_decay=float(group["weight_decay"]))


def _betas(group: Mapping[str, Any]) -> tuple[float, float]:
    beta1, beta2 = group["betas"]
    return float(beta1), float(beta2)


def _no_sparse(group: Mapping[str, Any], sparse: bool, name: str, option: str) -> None:
    if sparse and group[option]:
        raise NotSupportedError(
            f"{option}={group[option]} on the sparse embedding {name!r} would move every row at every step; "
            f"give the embedding a parameter group of its own with {option}=0"
        )
