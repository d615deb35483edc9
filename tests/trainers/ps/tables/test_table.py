from dataclasses import replace

import pytest
import torch

from trainers.ps.tables.dense import DenseRun, DenseTable
from trainers.ps.tables.rules import FTRL, SGD, Adam, Fixed
from trainers.ps.tables.sparse import make_table
from trainers.ps.tables.spec import (
    Bound,
    EvictionPolicy,
    KeysError,
    NotFiniteError,
    RowOptions,
    ShapeError,
    SpecError,
    TableError,
    TableKind,
    TableSpec,
)


def keys(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_a_dense_block_refuses_what_does_not_fit() -> None:
    table = make_table(TableSpec(kind=TableKind.DENSE, name="d", size=4, rule=SGD()))
    with pytest.raises(ShapeError, match="4 elements"):
        table.check(torch.ones(5))
    with pytest.raises(KeysError, match="no keys"):
        table.check_assign(keys(1), torch.ones(4))
    with pytest.raises(NotFiniteError, match="NaN or infinity"):
        table.check(torch.tensor([1.0, 2.0, float("inf"), 4.0]))


def test_a_table_that_is_not_trained_takes_no_gradient() -> None:
    table = make_table(TableSpec(kind=TableKind.DENSE, name="frozen", size=1, rule=Fixed()))
    with pytest.raises(TableError, match="'frozen' is not trained"):
        table.check(torch.ones(1))


def test_a_pulled_block_does_not_change_with_the_table() -> None:
    table = make_table(TableSpec(kind=TableKind.DENSE, name="d", size=2, rule=SGD()))
    run = DenseRun([table])
    before = run.values()
    table.apply(torch.ones(2), 1.0)
    assert before.tolist() == [0, 0]
    assert run.values().tolist() == [-1, -1]


def test_a_loaded_block_goes_on_as_the_saved_one() -> None:
    spec = TableSpec(kind=TableKind.DENSE, name="d", size=5, rule=Adam())
    table, other = DenseTable(spec), DenseTable(spec)
    table.apply(torch.randn(5), 0.1)
    cut = table.cut()
    table.apply(torch.ones(5), 0.1)
    other.load(cut.rows)
    other.step = cut.step
    other.apply(torch.ones(5), 0.1)
    assert torch.equal(table.values, other.values)
    with pytest.raises(ShapeError, match="2 states"):
        table.load(DenseTable(replace(spec, rule=SGD())).cut().rows)


@pytest.mark.parametrize(
    "spec",
    [
        TableSpec(kind=TableKind.DENSE, name="层.weight[0:8]", size=8, rule=Adam(eps=1e-4)),
        TableSpec(kind=TableKind.SPARSE, name="", size=512, rule=FTRL(l1=0.5)),
        TableSpec(kind=TableKind.DENSE, name="x", size=1, rule=Fixed()),
        TableSpec(
            kind=TableKind.SPARSE,
            name="bounded",
            size=4,
            rule=Adam(),
            rows=RowOptions(bound=Bound(bytes=1 << 40, policy=EvictionPolicy.LFU, shared=True)),
        ),
    ],
)
def test_a_spec_comes_back_as_it_was(spec: TableSpec) -> None:
    assert TableSpec.decode(spec.encode()) == spec


def test_bytes_that_are_no_spec_are_refused() -> None:
    good = TableSpec(kind=TableKind.DENSE, name="x", size=8, rule=Adam()).encode()
    bounded = TableSpec(
        kind=TableKind.SPARSE, name="", size=8, rule=SGD(), rows=RowOptions(bound=Bound(rows=5))
    ).encode()
    broken = [
        bounded[:-1],
        bounded[:-32] + b"\x09" + bounded[-31:],  # policy
        bounded[:-24] + bytes(24),  # a bound of nothing
        b"",
        good[:11],
        b"\x09" + good[1:],  # kind
        good[:1] + b"\x63" + good[2:],  # rule
        good[:2] + b"\x01" + good[3:],  # number of options
        good[:4] + b"\xff" * 8 + good[12:],  # size
        good[:12] + b"\xff" * 8 + good[20:],  # an option that is NaN
        good + b"\xff",  # a name that is no UTF-8
    ]
    for content in broken:
        with pytest.raises(SpecError):
            TableSpec.decode(content)
