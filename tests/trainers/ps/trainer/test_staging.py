"""Embeddings and dense parameters on a device: what is computed, and how many copies a step makes. With the
CPU in its place, and on a GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from trainers.ps.client import Client, Request
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.trainer.embedding import ServedEmbedding, embed
from trainers.ps.trainer.exchange import DenseParameters
from trainers.ps.trainer.group import TableGroup, begin_fetch
from trainers.ps.trainer.layout import Block, DenseParameter, SparseParameter
from trainers.ps.trainer.modules import SparseEmbedding
from trainers.ps.trainer.staging import Arriving, Staging, staging_of
from trainers.ps.wire import Field, Kind, Message, Part

CPU = torch.device("cpu")
DEVICES = [CPU, *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
SERVERS = 3


class Counted(Staging):
    """`copies`: to the device and from it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copies = [0, 0]

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.copies[0] += 1
        return super().to_device(tensors)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> Arriving:
        self.copies[1] += 1
        return super().to_host(tensors)

    def since(self) -> list[int]:
        found, self.copies = self.copies, [0, 0]
        return found


class Answers:
    """Servers with rows that tell their table, key and column."""

    def send(self, requests: Sequence[Request]) -> Sequence[Request]:
        return requests

    def wait(self, requests: Sequence[Request]) -> list[Message]:
        return [Message(kind=Kind.DATA, parts=self._rows(request.parts)) for request in requests]

    def _rows(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        (spans, keys) = parts
        tables = torch.arange(spans.table, spans.table + len(spans.data)).repeat_interleave(spans.data)
        columns = torch.arange(2 if spans.table < 3 else 5)
        rows = torch.sin(keys.data[:, None] * 7.0 + tables[:, None] * 3.0 + columns)
        return (Part(keys.table, Field.ROWS, rows),)


def group_of(first: int, dim: int, staging: Staging | None) -> TableGroup:
    """Three tables, one of them with padding."""
    device = CPU if staging is None else staging.device
    made: list[Any] = []
    for number in range(3):
        spec = TableSpec(kind=TableKind.SPARSE, name=f"t{number}", size=dim, rule=SGD())
        made.append(
            SparseParameter(
                name=spec.name,
                module=SparseEmbedding(dim, padding_idx=4 if number == 1 else None).to(device),
                group={"lr": 1.0},
                own_lr=None,
                table=first + number,
                spec=spec,
                rule=SGD(),
            )
        )
    return TableGroup(made, SERVERS, cast(Client, Answers()), staging_for=lambda device: staging)


def step_of(groups: Sequence[TableGroup]) -> torch.Tensor:
    """Two batches of all groups, and of the second a call without a gradient; some ids more than once."""
    device = groups[0].tables[0].sparse.module.weight.device
    total = torch.zeros((), device=device)
    outputs = []
    generator = torch.Generator().manual_seed(0)
    for batch in range(2):
        drawn = torch.randint(0, 9, (4, 3, 5), generator=generator) * 2**40
        drawn[1, 0] = 4  # padding, in a call of its table
        drawn = drawn.to(device)
        for group in groups:
            ids = {0: [drawn[0]], 1: [drawn[1], drawn[1, :0]], 2: [drawn[2], drawn[3, 0]]}
            group.send(group.prepare(ids))
            for table, some in ids.items():
                for number, each in enumerate(some):
                    call = group.call(table, each)
                    rows = embed(call.batch, call, group.tables[table].sparse.module.weight)
                    outputs.append(rows.detach().cpu())
                    if batch == 0 or number == 0:
                        total = total + (rows.transpose(0, 1) * len(outputs)).cos().sum()
    total.backward()  # type: ignore[no-untyped-call]
    return torch.cat([each.reshape(-1) for each in outputs])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_and_gradients_are_those_of_the_cpu_in_few_copies(device: torch.device) -> None:
    counted = Counted(device)
    here = [group_of(0, 2, None), group_of(3, 5, None)]
    there = [group_of(0, 2, counted), group_of(3, 5, counted)]
    assert torch.equal(step_of(here), step_of(there))
    assert counted.since() == [4, 4], "of each batch of a group: its ids, and its rows"
    begin_fetch(there)
    assert counted.since() == [0, 1], "the gradients of all groups"
    for one, other in zip(here, there, strict=True):
        wanted, found = one.take_gradients(), other.take_gradients()
        assert wanted is not None
        assert found is not None
        assert torch.equal(torch.from_numpy(wanted.spans), torch.from_numpy(found.spans))
        assert torch.equal(wanted.keys, found.keys)
        assert 4 not in found.keys
        torch.testing.assert_close(found.rows, wanted.rows)
    assert counted.since() == [0, 0]
    for one, other in zip(here, there, strict=True):
        step_of([one])
        step_of([other])
        wanted, found = one.take_gradients(), other.take_gradients()
        assert wanted is not None
        assert found is not None
        torch.testing.assert_close(found.rows, wanted.rows, msg="both backward passes")


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_on_a_device_are_unscaled_and_dropped_there(device: torch.device) -> None:
    one, other = group_of(0, 2, None), group_of(0, 2, Counted(device))
    for group in (one, other):
        step_of([group])
        assert group.collected.unscale(4.0)
    wanted, found = one.take_gradients(), other.take_gradients()
    assert wanted is not None
    assert found is not None
    torch.testing.assert_close(found.rows, wanted.rows)
    for group in (one, other):
        step_of([group])
        assert not group.collected.unscale(1e-42)
    other.drop_gradients()
    assert other.take_gradients() is None


def test_a_table_on_another_device_than_its_group_is_looked_up_by_itself() -> None:
    group = group_of(0, 2, None)
    group.embeds[1] = False
    ids = torch.arange(3)
    told: list[torch.Tensor] = []
    for table in group.tables[:2]:
        module = table.sparse.module
        ServedEmbedding("", module, table, statistics=False, called=lambda _, ids: told.append(ids))
        module(ids).sum().backward()
        assert (table.call(ids) is None) is (table.place == 1)
    assert len(told) == 2, "of each call once"
    gradient = group.take_gradients()
    assert gradient is not None
    assert (gradient.rows == 1.0).all()
    assert sorted(gradient.keys.tolist()) == [0, 0, 1, 1, 2, 2]
    assert staging_of(CPU) is None


@pytest.mark.parametrize("device", DEVICES)
def test_dense_gradients_and_values_take_one_copy_each(device: torch.device) -> None:
    counted = Counted(device)
    drawn = [torch.randn(2, 3), torch.randn(()), torch.randn(4)]
    layout = [
        DenseParameter(
            name=str(number),
            parameter=torch.nn.Parameter(torch.zeros_like(each, device=device)),
            group={"lr": 0.1, "maximize": number == 2},
            rule=SGD(),
            blocks=(
                Block(
                    table=number,
                    server=0,
                    start=0,
                    stop=each.numel(),
                    spec=TableSpec(kind=TableKind.DENSE, name=str(number), size=each.numel(), rule=SGD()),
                ),
            ),
        )
        for number, each in enumerate(drawn)
    ]
    parameters = DenseParameters(layout, 1, staging_for=lambda device: counted)
    for dense, grad in zip(layout, drawn, strict=True):
        dense.parameter.grad = grad.to(device, copy=True)
    layout[1].parameter.grad = None
    found = parameters.gradients()
    assert found.keys() == {"0", "2"}
    assert torch.equal(found["0"], drawn[0].reshape(-1))
    assert torch.equal(found["2"], -drawn[2])
    assert counted.since() == [0, 1]
    flat = torch.cat([each.reshape(-1) for each in drawn])
    parameters.take([(0, Message(kind=Kind.DATA, parts=(Part(0, Field.VALUES, flat),)))])
    assert all(torch.equal(dense.parameter.cpu(), each) for dense, each in zip(layout, drawn, strict=True))
    assert counted.since() == [1, 0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to_host", [True, False])
def test_many_tensors_go_in_one(to_host: bool, device: torch.device) -> None:
    """Of any type and shape: each where kernels can read it."""
    given = [
        torch.randn(3).half(),
        torch.arange(6).view(2, 3).t(),
        torch.empty(0, 4),
        torch.randn(()),
        torch.arange(5, dtype=torch.int32)[::2],
        torch.randn(1, 3).double(),
        torch.randn(1, 3)[:, 0],
        torch.tensor([1, 2, 3], dtype=torch.uint8),
    ]
    staging = Staging(device)
    there = [each.to(device) for each in given]
    found = staging.to_host(there).wait() if to_host else staging.to_device(given)
    for one, other in zip(given, found, strict=True):
        assert torch.equal(one, other.cpu())
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert other.data_ptr() % other.element_size() == 0
        assert other.data_ptr() != one.data_ptr() or not one.numel()


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_on_a_device_may_be_changed_in_place(device: torch.device, prepared: bool) -> None:
    group = group_of(0, 2, Staging(device))
    ids = [torch.tensor([[1, 2], [2, 3]]), torch.tensor([5, 1])]
    if prepared:
        group.send(group.prepare({0: ids}))
    for each in ids:
        call = group.call(0, each)
        rows = embed(call.batch, call, group.weights[0])
        rows.mul_(2)
        rows.sum().backward()  # type: ignore[no-untyped-call]  # torch's annotation
    gradient = group.take_gradients()
    assert gradient is not None
    found = dict(zip(gradient.keys.tolist(), gradient.rows[:, 0].tolist(), strict=True))
    assert found == {1: 4.0, 2: 4.0, 3: 2.0, 5: 2.0}
