"""One small training problem for every way to train: model, batches, optimizers, and the single process
to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

STEPS = 50
BATCH = 6


class TwoTables(torch.nn.Module):
    """An embedding, an embedding bag and dense layers, one of them large enough to be sliced over two
    servers.
    """

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(40, 4, padding_idx=0, sparse=sparse)
        self.bags = torch.nn.EmbeddingBag(30, 4, mode="sum", sparse=sparse)
        self.wide = torch.nn.Linear(8, 2100)
        self.out = torch.nn.Linear(2100, 1)
        self.scale = torch.nn.Parameter(torch.rand(1) + 0.5, requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        looked_up = self.words(ids[:, :3]).mean(1) + self.words(ids[:, 3])  # the same table twice in one step
        joined = torch.cat([looked_up, self.bags(ids[:, 4:] % 30)], dim=1)
        result: torch.Tensor = (
            self.out(torch.tanh(self.wide(joined)))[:, 0] * self.scale / 45
        )  # about sqrt(2100)
        return result

    def dense(self) -> list[torch.nn.Parameter]:
        return [*self.wide.parameters(), *self.out.parameters()]

    def tables(self) -> list[torch.nn.Parameter]:
        return [self.words.weight, self.bags.weight]


def batch(step: int, trainers: int, rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, targets) of one trainer, or of all of them together; the same ten batches again and again, so
    that there is something to learn.
    """
    generator = torch.Generator().manual_seed(1000 + step % 10)
    ids = torch.randint(0, 40, (trainers * BATCH, 6), generator=generator)
    targets = torch.randn(trainers * BATCH, generator=generator)
    mine = slice(None) if rank is None else slice(rank * BATCH, (rank + 1) * BATCH)
    return ids[mine], targets[mine]


def loss_of(model: torch.nn.Module, step: int, trainers: int, rank: int | None) -> torch.Tensor:
    ids, targets = batch(step, trainers, rank)
    return torch.nn.functional.mse_loss(model(ids), targets)


class Optimizer(Protocol):
    """What training needs of one."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any: ...

    def zero_grad(self) -> None: ...


Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Optimizers = Callable[[TwoTables], Sequence[Optimizer]]


@dataclass(frozen=True, slots=True)
class Case:
    """`served` is what a script gives to fleet; `alone` what torch itself needs for the same arithmetic."""

    served: Callable[[TwoTables], torch.optim.Optimizer]
    alone: Optimizers
    decay: float = 1.0


def _momentum(model: TwoTables) -> torch.optim.Optimizer:
    groups = [
        {"params": model.dense(), "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True},
        {"params": model.tables()},
    ]
    return torch.optim.SGD(groups, lr=0.01)


def _adagrad(model: TwoTables) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(
        [*model.dense(), *model.tables()], lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1
    )


def step_lazily(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, keys: torch.Tensor) -> None:
    """A step of torch's optimizer, undone in all rows but these, in values and in state."""
    state = optimizer.state[parameter]
    before = {name: kept.clone() for name, kept in state.items() if torch.is_tensor(kept)}
    values = parameter.detach().clone()
    optimizer.step()
    others = torch.ones(len(parameter), dtype=torch.bool).index_fill_(0, keys, False)
    with torch.no_grad():
        parameter[others] = values[others]
    for name, kept in state.items():
        if torch.is_tensor(kept) and kept.dim():
            kept[others] = before[name][others] if name in before else 0.0


class Lazily:
    """An optimizer of torch for one table with sparse gradients, whose other rows do not move."""

    def __init__(self, make: Make, table: torch.nn.Parameter) -> None:
        self._inner = make([table])
        self._table = table
        self.param_groups = self._inner.param_groups
        self.zero_grad = self._inner.zero_grad

    def step(self) -> None:
        if (grad := self._table.grad) is None:
            return
        keys = grad.coalesce().indices()[0] if grad.is_sparse else torch.arange(len(grad))
        self._table.grad = grad.to_dense()
        step_lazily(self._inner, self._table, keys)


def lazily(make: Make) -> Case:
    """The same optimizer for everything; in one process a lazy one for each table."""
    return Case(
        lambda model: make([*model.dense(), *model.tables()]),
        lambda model: [make(model.dense()), *(Lazily(make, table) for table in model.tables())],
        decay=0.97,
    )


def _adam_apart(model: TwoTables) -> Sequence[Optimizer]:
    return [torch.optim.Adam(model.dense(), lr=0.01), torch.optim.SparseAdam(model.tables(), lr=0.01)]


CASES = {
    "sgd": Case(
        lambda model: torch.optim.SGD([*model.dense(), *model.tables()], lr=0.05),
        lambda model: [torch.optim.SGD([*model.dense(), *model.tables()], lr=0.05)],
        decay=0.97,
    ),
    "momentum": Case(_momentum, lambda model: [_momentum(model)]),
    "adagrad": Case(_adagrad, lambda model: [_adagrad(model)]),
    "adam": Case(lambda model: torch.optim.Adam([*model.dense(), *model.tables()], lr=0.01), _adam_apart),
    "adamw": lazily(
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True, betas=(0.9, 0.9))
    ),
    "rmsprop": lazily(lambda p: torch.optim.RMSprop(p, lr=0.003, weight_decay=0.1, momentum=0.5)),
    "heavy": lazily(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True)),
    "uphill": lazily(lambda p: torch.optim.Adam(p, lr=0.001, weight_decay=0.1, maximize=True)),
}
LAZY = ["adamw", "rmsprop", "heavy", "uphill"]


@torch.sparse.check_sparse_tensor_invariants()
def train_alone(case: Case, trainers: int, steps: int = STEPS) -> TwoTables:
    """One process with the batches of all trainers."""
    torch.manual_seed(0)
    model = TwoTables()
    optimizers = case.alone(model)
    for step in range(steps):
        loss_of(model, step, trainers, None).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= case.decay
    return model


def furthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference between two state dicts, which must have the same names and shapes."""
    assert left.keys() == right.keys()
    assert all(bool(torch.isfinite(value).all()) for value in [*left.values(), *right.values()])
    return max(float((left[name] - right[name]).abs().max()) for name in left)
