"""Gradients of several steps in one push."""

import torch

from trainers.ps.net.wire import Field, Part
from trainers.ps.tables.rules import SGD, Adam
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.trainer.dense import DenseParameters
from trainers.ps.trainer.layout import Block, DenseParameter
from trainers.ps.trainer.merging import Merging


def parameter(rule: SGD | Adam, name: str, table: int) -> DenseParameter:
    spec = TableSpec(kind=TableKind.DENSE, name=name, size=2, rule=rule)
    block = Block(table=table, server=0, start=0, stop=2, spec=spec)
    value = torch.nn.Parameter(torch.zeros(2))
    return DenseParameter(name=name, parameter=value, group={"lr": 0.1}, rule=rule, blocks=(block,))


def pushed(parameters: DenseParameters, *steps: dict[str, torch.Tensor]) -> list[Part]:
    merging = Merging([])
    for step in steps:
        merging.add(step)
    assert merging.steps == len(steps)
    push: list[list[Part]] = [[]]
    merging.add_push(parameters, push)
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


def test_one_step_goes_as_it_is_and_a_missing_gradient_cuts_the_run() -> None:
    parameters = DenseParameters([parameter(SGD(), str(number), number) for number in range(3)], 1)
    parts = pushed(parameters, {"0": torch.ones(2), "2": torch.full((2,), 2.0)})
    assert [(part.table, part.data.tolist()) for part in parts] == [(0, [1, 1]), (2, [2, 2])]


def test_a_momentum_is_not_plain() -> None:
    parameters = DenseParameters([parameter(SGD(momentum=0.9), "m", 0)], 1)
    (part,) = pushed(parameters, {"m": torch.ones(2)}, {"m": torch.full((2,), 3.0)})
    assert part.data.tolist() == [2, 2]
