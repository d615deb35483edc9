"""Rows that were on servers, in torch's own operations: against the tables themselves."""

from typing import Any

import pytest
import torch

from trainers.ps import Normal, Uniform
from trainers.ps.saves.read import SparseValues
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import Bound, Initializer, RowOptions, RowType, TableKind, TableSpec
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.trainer.stand_ins import SavedRows, _stand_in, initial_rows, outside_of
from trainers.serving.lookup import TABLES

LAST, FIRST = 2**63 - 1, -(2**63)


def table(rows: RowOptions, dim: int) -> SparseTable:
    return SparseTable(TableSpec(kind=TableKind.SPARSE, name="t", size=dim, rule=SGD(), rows=rows))


@pytest.mark.parametrize("dtype", RowType)
@pytest.mark.parametrize("dim", [1, 4, 7])
@pytest.mark.parametrize(
    "init",
    [
        *(Uniform(), Uniform(-3.0, 5.5, seed=2**64 - 1), Normal(0.0, 0.1, seed=3), Normal(1.5, 2.0)),
        *(Uniform(-9e4, 9e4), Normal(0.0, 5e4), Uniform(3.39e38, 3.4e38)),
    ],
)
def test_an_unknown_id_reads_as_the_servers_would_begin_it(
    init: Initializer, dim: int, dtype: RowType
) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.randint(FIRST, LAST, (500,), generator=generator), torch.arange(-9, 9)])
    ids = torch.cat([ids, torch.tensor([FIRST, LAST])])
    rows = RowOptions(init=init, dtype=dtype)
    assert torch.equal(initial_rows(rows, ids, dim), table(rows, dim).pull(ids, insert=False))


@pytest.mark.parametrize("keys", [[], [-5, 3, 8], [FIRST, 0, LAST]])
def test_ids_find_their_rows_and_no_other(keys: list[int]) -> None:
    init = RowOptions(init=Normal(0.0, 1.0, seed=1))
    served = table(init, 2)
    some = torch.tensor(keys, dtype=torch.int64)
    served.assign(some, torch.arange(2.0 * len(keys)).view(-1, 2))
    rows = SavedRows(some, served.pull(some), init, None)
    asked = torch.tensor([[-6, -5, 3, 4], [8, 9, LAST, FIRST], [0, LAST - 1, 1, 2]])
    wanted = served.pull(asked.reshape(-1), insert=False).view(3, 4, 2)
    assert torch.equal(rows(asked), wanted)
    assert torch.equal(rows(asked.int()[:1]), wanted[:1])
    padded = SavedRows(some, served.pull(some), init, 3)
    assert torch.equal(padded(asked), wanted * (asked != 3)[..., None])
    assert not padded.rows[:-1][some == 3].any(), "no file has values that the model never reads"


class Elsewhere:
    """A table whose rows are all ones."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(ids), 4)


@pytest.mark.parametrize(
    ("leaves", "read"), [({"bound": Bound(rows=2)}, 0.0), ({"statistics": True}, 0.0), ({}, 1.0)]
)
@pytest.mark.parametrize("removed", [True, False])
def test_padding_is_zeros_in_a_table_of_known_size_if_its_row_may_have_left(
    monkeypatch: pytest.MonkeyPatch, leaves: dict[str, Any], read: float, removed: bool
) -> None:
    options = RowOptions(init=Normal(0.0, 1.0, seed=1), **leaves)
    keys = torch.tensor([1, 3] if removed and leaves else [1, 2, 3])
    module = torch.nn.Embedding(5, 4, padding_idx=2, sparse=True)
    spec = TableSpec(kind=TableKind.SPARSE, name="t.weight", size=4, rule=SGD(), rows=options)
    served = SparseParameter(
        name="t.weight", module=module, group=None, own_lr=0.1, table=0, spec=spec, rule=SGD()
    )
    found = _stand_in(served, SparseValues(keys, torch.ones(len(keys), 4)), int8=False)
    rows = found(torch.arange(5))
    assert torch.equal(rows[[1, 3]], torch.ones(2, 4))
    assert torch.equal(rows[[0, 4]], initial_rows(options, torch.tensor([0, 4]), 4))
    assert torch.equal(rows[2], torch.full((4,), read))
    elsewhere = Elsewhere()
    monkeypatch.setitem(TABLES, 0, elsewhere)
    followed = outside_of([served])[module](torch.arange(5))
    assert torch.equal(followed[1:4:2], torch.ones(2, 4))
    assert torch.equal(followed[2], torch.full((4,), read))
