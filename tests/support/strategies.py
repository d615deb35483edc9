"""A small training problem for collective strategies: a model, batches, strategies, and what plain torch
makes of them in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

WORLD = 2
STEPS = 6
EXAMPLES = 16

Make = Callable[[Any], torch.optim.Optimizer]
Values = dict[str, torch.Tensor]


class Net(torch.nn.Module):
    """`norm`: with a batch norm, of which each rank has statistics. `spare`: with a layer of no use."""

    def __init__(self, norm: bool = False, spare: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 8)
        self.norm = torch.nn.BatchNorm1d(8) if norm else torch.nn.Identity()
        self.last = torch.nn.Linear(8, 3)
        self.spare = torch.nn.Linear(2, 2) if spare else torch.nn.Identity()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.norm(self.first(features))))
        return out


def batch(
    step: int, rank: int | None = None, pieces: int = 1, piece: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(features, targets) of one rank's piece of a batch, or the whole one."""
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(EXAMPLES, 5, generator=generator)
    targets = torch.randn(EXAMPLES, 3, generator=generator)
    if rank is None:
        return features, targets
    each = EXAMPLES // WORLD // pieces
    start = (rank * pieces + piece) * each
    return features[start : start + each], targets[start : start + each]


def loss_of(model: torch.nn.Module, features: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(features), targets)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


@dataclass(frozen=True)
class Case:
    """`fields` of the strategy; each batch comes in `pieces`; one process does the same with its loss times
    `factor`, to within `near`.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    make: Make = momentum
    pieces: int = 1
    factor: float = 1.0
    near: float = 1e-6
    kind: dict[str, bool] = field(default_factory=dict)


def merged(k_steps: int, **configs: Any) -> dict[str, Any]:
    return {"gradient_merge": True, "gradient_merge_configs": {"k_steps": k_steps, **configs}}


def sharded(stage: int) -> dict[str, Any]:
    return {"sharding": True, "sharding_configs": {"stage": stage}}


FLOAT16 = {"amp": True, "amp_configs": {"dtype": "float16"}}
RECOMPUTE = {"recompute": True, "recompute_configs": {"checkpoints": ["first"]}}
SUM = {"gradient_scale_configs": {"scale_strategy": "sum"}}

EQUAL = {
    "plain": Case(),
    "merge": Case(merged(4), pieces=4),
    "merge_sum": Case(merged(4, avg=False), pieces=4, factor=4),
    "merge_adam_stage_1": Case(merged(2) | sharded(1), adam, pieces=2),
    "merge_stage_2": Case(merged(2) | sharded(2), adam, pieces=2),
    "sum": Case(SUM, factor=2),
    "sum_merge_stage_3": Case(SUM | merged(2) | sharded(3), pieces=2, factor=2),
    "find_unused_merge": Case(merged(2) | {"find_unused_parameters": True}, pieces=2, kind={"spare": True}),
    "fp16_allreduce": Case({"fp16_allreduce": True}, near=3e-4),
    "bfloat16": Case({"amp": True}, near=2e-2),
    "bfloat16_stage_2": Case({"amp": True} | sharded(2), near=2e-2),
    "float16": Case(FLOAT16, near=3e-3),
    "float16_merge": Case(FLOAT16 | merged(2), pieces=2, near=3e-3),
    "float16_stage_1": Case(FLOAT16 | sharded(1), adam, near=3e-2),
    "float16_stage_2": Case(FLOAT16 | sharded(2), near=3e-3),
    "much": Case(FLOAT16 | merged(2) | sharded(3) | RECOMPUTE, adam, pieces=2, near=3e-2),
    "much_with_norm": Case(
        {"amp": True, "sync_batch_norm": True} | sharded(1) | RECOMPUTE, near=3e-2, kind={"norm": True}
    ),
}
"""Strategies that do what one process does with the batches of all, and how near they come."""


def train_alone(case: Case) -> Values:
    torch.manual_seed(0)
    model = Net(**case.kind)
    optimizer = case.make(model.parameters())
    for step in range(STEPS):
        (loss_of(model, *batch(step)) * case.factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def furthest(left: Values, right: Values) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)
