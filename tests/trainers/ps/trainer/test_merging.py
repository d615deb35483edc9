"""Gradients of several steps in one push."""

from typing import Any, cast

import pytest
import torch

from trainers.ps.client import Client
from trainers.ps.tables.rules import FTRL, SGD, Adagrad, Adam, AnyRule, SparseAdam
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.trainer.exchange import DenseParameters, GradientMerger
from trainers.ps.trainer.group import RemoteTable, TableGroup
from trainers.ps.trainer.layout import Block, DenseParameter, SparseParameter
from trainers.ps.trainer.modules import SparseEmbedding
from trainers.ps.wire import Field, Part


def parameter(rule: SGD | Adam, name: str, table: int) -> DenseParameter:
    spec = TableSpec(kind=TableKind.DENSE, name=name, size=2, rule=rule)
    block = Block(table=table, server=0, start=0, stop=2, spec=spec)
    value = torch.nn.Parameter(torch.zeros(2))
    return DenseParameter(name=name, parameter=value, group={"lr": 0.1}, rule=rule, blocks=(block,))


def pushed(parameters: DenseParameters, *steps: dict[str, torch.Tensor]) -> list[Part]:
    merging = GradientMerger(parameters, [], len(steps))
    for step in steps:
        merging.add(step)
    assert merging.steps == len(steps)
    push: list[list[Part]] = [[]]
    merging.add_push(push)
    assert merging.steps == 0
    return push[0]


def test_plain_sgd_gets_the_sum_and_others_the_mean() -> None:
    parameters = DenseParameters([parameter(SGD(), "plain", 0), parameter(Adam(), "adam", 1)], 1)
    first = {"plain": torch.tensor([1.0, 2.0]), "adam": torch.tensor([1.0, 2.0])}
    second = {"plain": torch.tensor([3.0, 3.0]), "adam": torch.tensor([3.0, 4.0])}
    (part,) = pushed(parameters, first, second)  # one run over both blocks
    assert (part.table, part.field, part.lr) == (0, Field.VALUES, 0.1)
    assert part.data.tolist() == [4, 5, 2, 3]
    assert first["plain"].tolist() == [1, 2]


def test_gradients_that_are_written_again_count_as_they_were() -> None:
    """As with `zero_grad(set_to_none=False)`."""
    parameters = DenseParameters([parameter(SGD(), "plain", 0)], 1)
    gradient = torch.tensor([1.0, 2.0])
    merging = GradientMerger(parameters, [], 2)
    for step in (1, 10):
        merging.add({"plain": gradient.fill_(step)})
    push: list[list[Part]] = [[]]
    merging.add_push(push)
    assert push[0][0].data.tolist() == [11, 11]


def test_one_step_goes_as_it_is_and_a_missing_gradient_cuts_the_run() -> None:
    parameters = DenseParameters([parameter(SGD(), str(number), number) for number in range(3)], 1)
    parts = pushed(parameters, {"0": torch.ones(2), "2": torch.full((2,), 2.0)})
    assert [(part.table, part.data.tolist()) for part in parts] == [(0, [1, 1]), (2, [2, 2])]


def test_a_momentum_is_not_plain() -> None:
    parameters = DenseParameters([parameter(SGD(momentum=0.9), "m", 0)], 1)
    (part,) = pushed(parameters, {"m": torch.ones(2)}, {"m": torch.full((2,), 3.0)})
    assert part.data.tolist() == [2, 2]


def rows_of(rule: AnyRule, row_dtype: torch.dtype = torch.float32) -> RemoteTable:
    spec = TableSpec(kind=TableKind.SPARSE, name="t", size=2, rule=rule)
    sparse: Any = SparseParameter(
        name="t", module=SparseEmbedding(2), group={"lr": 0.1}, own_lr=None, table=0, spec=spec, rule=rule
    )
    return TableGroup([sparse], 1, cast(Client, None), row_dtype=row_dtype).tables[0]


@pytest.mark.parametrize(
    ("rule", "share"), [(SGD(), 1.0), (Adagrad(), 0.5), (SparseAdam(), 0.5), (FTRL(), 0.5)]
)
def test_rows_of_one_key_are_merged_over_steps_and_each_key_goes_once(rule: AnyRule, share: float) -> None:
    table = rows_of(rule)
    merging = GradientMerger(DenseParameters([], 1), [table.group])
    for keys, row, shows in ([7, 9], [1.0, 2.0], 3.0), ([9, -1], [10.0, 20.0], 4.0):
        table.add_stats(torch.tensor(keys), torch.tensor([[shows, 1.0]] * 2))
        table.group.collected.add(table.place, torch.tensor(keys), torch.tensor([row] * 2))
        merging.add({})
        table.group.drop_gradients()
    push: list[list[Part]] = [[]]
    merging.add_push(push)
    keys, rows, stats = push[0]
    assert (rows.field, stats.field) == (Field.ROWS, Field.STATS)
    assert keys.data.tolist() == [7, 9, -1]
    assert (rows.data / share).tolist() == [[1, 2], [11, 22], [10, 20]]
    assert stats.data.tolist() == [[3, 1], [7, 2], [4, 1]], "what was shown is counted, not averaged"


@pytest.mark.parametrize("rates", [(0.1, 0.05), (0.0, 0.1), (0.1, 0.1)])
def test_steps_of_different_rates_are_scaled_for_plain_sgd_only(rates: tuple[float, float]) -> None:
    for rule in (SGD(), SGD(weight_decay=0.1), SGD(momentum=0.9), Adagrad(), FTRL()):
        table = rows_of(rule)
        merging = GradientMerger(DenseParameters([], 1), [table.group], 2)
        for rate in rates:
            group: Any = table.sparse.group
            group["lr"] = rate
            assert merging.fits() is (not merging.steps or rates[0] == rates[1] or rule == SGD())
            table.group.collected.add(table.place, torch.tensor([7]), torch.tensor([[1.0, 2.0]]))
            merging.add({})
            table.group.drop_gradients()
        group["lr"] = 9.0  # a scheduler, before the push leaves
        if rule == SGD():
            push: list[list[Part]] = [[]]
            merging.add_push(push)
            _, rows = push[0]
            torch.testing.assert_close(rows.data * rows.lr, torch.tensor([[1.0, 2.0]]) * sum(rates))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_go_as_short_as_asked_for_and_dense_values_do_not(dtype: torch.dtype) -> None:
    table = rows_of(SGD(), dtype)
    table.group.collected.add(table.place, torch.tensor([1]), torch.tensor([[0.3, -2.0]]))
    merging = GradientMerger(DenseParameters([parameter(SGD(), "plain", 1)], 1), [table.group])
    merging.add({"plain": torch.tensor([0.1, 0.2])})
    push: list[list[Part]] = [[]]
    merging.add_push(push)
    dense, _, rows = push[0]
    assert dense.data.tolist() == torch.tensor([0.1, 0.2]).tolist()
    assert torch.equal(rows.data, torch.tensor([[0.3, -2.0]]).to(dtype))
