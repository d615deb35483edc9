"""Rows that a person looks at: what is said of them, and that nothing changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trainers.ps.tables.budget import Budgets
from trainers.ps.tables.looking import look
from trainers.ps.tables.rules import SGD, Adam, AnyRule, RowWiseAdagrad
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import Bound, Entry, EntryKind, RowOptions, RowType, TableKind, TableSpec

pytestmark = pytest.mark.slow

ROWS = 64


def table_of(rule: AnyRule, budgets: Budgets | None = None, **options: object) -> SparseTable:
    rows = RowOptions(**options)  # type: ignore[arg-type]
    return SparseTable(TableSpec(kind=TableKind.SPARSE, name="t", size=2, rule=rule, rows=rows), budgets)


def states(table: SparseTable, *keys: int) -> list[str]:
    return [each["state"] for each in look(table, np.array(keys))]


def test_values_optimizer_state_and_statistics() -> None:
    table = table_of(Adam(), statistics=True)
    keys = torch.tensor([7, -9])
    table.apply(keys, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0.1, torch.tensor([[5.0, 1.0], [2.0, 0.0]]))
    first, none, second = look(table, np.array([-9, 8, 7]))
    assert none == {"state": "no row"}
    assert (first["shows"], first["clicks"], first["unseen_days"]) == (2, 0, 0)
    assert second["values"] == table.pull(keys)[0].tolist()
    assert [len(each) for each in second["optimizer"]] == [2, 2]
    assert second["optimizer"][0] == pytest.approx([0.1, 0.2])
    row_wise = table_of(RowWiseAdagrad(), dtype=RowType.BFLOAT16)
    row_wise.apply(keys, torch.ones(2, 2), 1.0)
    (row,) = look(row_wise, np.array([7]))
    assert row["values"] == row_wise.pull(keys)[0].tolist()
    assert row["optimizer"] == [[1.0]]


def test_a_candidate_stays_one() -> None:
    table = table_of(SGD(), entry=Entry(EntryKind.COUNT, 3.0))
    table.pull(torch.tensor([1, 2]))
    table.pull(torch.tensor([2]))
    for _ in range(5):
        one, two = look(table, np.array([1, 2]))
    assert (one, two) == ({"state": "candidate", "pulls": 1.0}, {"state": "candidate", "pulls": 2.0})
    table.pull(torch.tensor([2]))
    assert states(table, 1, 2) == ["candidate", "row"]


def test_looking_at_a_row_does_not_keep_it_from_being_evicted() -> None:
    seen, unseen = (table_of(SGD(), bound=Bound(rows=ROWS)) for _ in range(2))
    for start in range(0, 10 * ROWS, 4):
        for table in (seen, unseen):
            table.apply(torch.arange(start, start + 4), torch.ones(4, 2), 0.1)
        look(seen, np.arange(10 * ROWS))
    assert states(seen, *range(10 * ROWS)) == states(unseen, *range(10 * ROWS))
    assert np.array_equal(seen.counts.row, unseen.counts.row)
    assert "no row" in states(seen, *range(10 * ROWS))
    alive = [key for key, state in enumerate(states(seen, *range(10 * ROWS))) if state == "row"]
    with seen.cut() as cut:
        assert sorted(cut.read(0, cut.rows).keys.tolist()) == alive


def test_a_row_on_disk_stays_there(tmp_path: Path) -> None:
    table = table_of(SGD(), Budgets(tmp_path), bound=Bound(rows=ROWS))
    for start in range(0, 10 * ROWS, 4):
        table.apply(torch.arange(start, start + 4), torch.full((4, 2), float(start)), 1.0)
    away = table.on_disk
    assert away > 0
    found = look(table, np.arange(10 * ROWS))
    assert table.on_disk == away == sum(each["state"] == "row on disk" for each in found)
    values = table.pull(torch.arange(10 * ROWS), insert=False).tolist()
    assert [each["values"] for each in found] == values
