"""Every rule against the torch optimizer that it stands for."""

from collections.abc import Callable

import pytest
import torch

from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.tables.table import make_table
from trainers.ps.trainer.optimizers import rule_for

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

DENSE: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.01),
    "adagrad_start": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5, eps=1e-6),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam_decay": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.01),
}
SPARSE: dict[str, Make] = {
    "sgd": DENSE["sgd"],
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-4),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_block_follows_torch(name: str) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(64))
    optimizer = DENSE[name]([parameter])
    rule = rule_for(optimizer, optimizer.param_groups[0], sparse=False, name="w")
    table = make_table(TableSpec(kind=TableKind.DENSE, name="w", size=64, rule=rule))
    table.assign(None, parameter.detach())
    for step in range(30):
        parameter.grad = torch.randn(64) * 10.0 ** (step % 3 - 1)
        optimizer.param_groups[0]["lr"] = lr = 0.1 / (1 + step)
        optimizer.step()
        table.apply(None, parameter.grad, lr)
        assert float((table.pull(None) - parameter.detach()).abs().max()) <= 1e-6


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_rows_follow_torch_on_sparse_gradients(name: str) -> None:
    with torch.sparse.check_sparse_tensor_invariants():
        follow_torch(name)


def follow_torch(name: str) -> None:
    torch.manual_seed(0)
    rows, dim = 20, 3
    parameter = torch.nn.Parameter(torch.randn(rows, dim))
    optimizer = SPARSE[name]([parameter])
    rule = rule_for(optimizer, optimizer.param_groups[0], sparse=True, name="w")
    table = make_table(TableSpec(kind=TableKind.SPARSE, name="w", size=dim, rule=rule))
    table.assign(torch.arange(rows), parameter.detach())
    for step in range(30):
        keys = torch.randperm(rows)[: step % 7].sort().values  # no row at all now and then
        values = torch.randn(len(keys), dim)
        parameter.grad = torch.sparse_coo_tensor(keys[None], values, (rows, dim)).coalesce()
        optimizer.step()
        table.apply(keys, values, 0.1)
        assert float((table.pull(torch.arange(rows)) - parameter.detach()).abs().max()) <= 1e-6


def test_adam_on_rows_is_sparse_adam() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    adam, lazy = torch.optim.Adam([parameter]), torch.optim.SparseAdam([parameter])
    assert rule_for(adam, adam.param_groups[0], sparse=True, name="w") == rule_for(
        lazy, lazy.param_groups[0], sparse=True, name="w"
    )
