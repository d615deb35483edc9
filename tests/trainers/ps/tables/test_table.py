import pytest
import torch

from trainers.ps.tables.index import KeyIndex
from trainers.ps.tables.rules import SGD, Adam, Fixed, SparseAdam
from trainers.ps.tables.spec import SpecError, TableKind, TableSpec
from trainers.ps.tables.table import KeysError, ShapeError, TableError, make_table


def keys(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_any_int64_is_a_key_and_keeps_its_row() -> None:
    index = KeyIndex()
    assert index.insert(keys(5, 9)).tolist() == [0, 1]
    assert index.insert(keys(-(2**63), 5, 2**63 - 1)).tolist() == [2, 0, 3]
    assert index.lookup(keys(2**63 - 1, 0, 9, -(2**63))).tolist() == [3, -1, 1, 2]
    assert len(index) == 4


def test_lookups_in_an_empty_index_find_nothing() -> None:
    assert KeyIndex().lookup(keys(1, 2)).tolist() == [-1, -1]
    assert KeyIndex().insert(keys()).tolist() == []


def test_rows_survive_growth() -> None:
    table = make_table(TableSpec(kind=TableKind.SPARSE, name="t", size=2, rule=SparseAdam()))
    generator = torch.Generator().manual_seed(0)
    wanted = {}
    for start in range(0, 300, 30):
        some = torch.arange(start, start + 30) * 7 % 1009
        some = some.sort().values
        rows = torch.randn(30, 2, generator=generator)
        table.assign(some, rows)
        wanted |= dict(zip(some.tolist(), rows, strict=True))
    every = torch.tensor(sorted(wanted))
    assert torch.equal(table.pull(every), torch.stack([wanted[key] for key in every.tolist()]))


@pytest.mark.parametrize(
    ("ids", "grad", "error"),
    [
        (keys(3, 1), torch.ones(2, 2), KeysError),  # not ascending
        (keys(1, 1), torch.ones(2, 2), KeysError),  # twice
        (keys(1, 8), torch.ones(2, 2), KeysError),  # unknown
        (keys(1), torch.ones(1, 3), ShapeError),
        (keys(1), torch.ones(2, 2), ShapeError),
        (None, torch.ones(2), KeysError),
    ],
)
def test_a_sparse_table_refuses_what_does_not_fit(
    ids: torch.Tensor | None, grad: torch.Tensor, error: type[TableError]
) -> None:
    table = make_table(TableSpec(kind=TableKind.SPARSE, name="t", size=2, rule=SGD()))
    table.assign(keys(1, 3), torch.ones(2, 2))
    with pytest.raises(error, match="'t'"):
        table.check(ids, grad)


def test_a_dense_block_refuses_what_does_not_fit() -> None:
    table = make_table(TableSpec(kind=TableKind.DENSE, name="d", size=4, rule=SGD()))
    with pytest.raises(ShapeError, match="4 elements"):
        table.check(None, torch.ones(5))
    with pytest.raises(KeysError, match="no keys"):
        table.check(keys(1), torch.ones(4))
    with pytest.raises(KeysError):
        table.pull(keys(1))


def test_a_table_that_is_not_trained_takes_no_gradient() -> None:
    table = make_table(TableSpec(kind=TableKind.DENSE, name="frozen", size=1, rule=Fixed()))
    with pytest.raises(TableError, match="'frozen' is not trained"):
        table.check(None, torch.ones(1))


def test_a_pulled_block_does_not_change_with_the_table() -> None:
    table = make_table(TableSpec(kind=TableKind.DENSE, name="d", size=2, rule=SGD()))
    before = table.pull(None)
    table.apply(None, torch.ones(2), 1.0)
    assert before.tolist() == [0, 0]
    assert table.pull(None).tolist() == [-1, -1]


@pytest.mark.parametrize(
    "spec",
    [
        TableSpec(kind=TableKind.DENSE, name="层.weight[0:8]", size=8, rule=Adam(eps=1e-4)),
        TableSpec(kind=TableKind.SPARSE, name="", size=512, rule=SGD()),
        TableSpec(kind=TableKind.DENSE, name="x", size=1, rule=Fixed()),
    ],
)
def test_a_spec_comes_back_as_it_was(spec: TableSpec) -> None:
    assert TableSpec.decode(spec.encode()) == spec


def test_bytes_that_are_no_spec_are_refused() -> None:
    good = TableSpec(kind=TableKind.DENSE, name="x", size=8, rule=Adam()).encode()
    broken = [
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
