"""Tables with a bound: which rows leave, and that this depends on the uses of rows and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from trainers.ps.kernels.eviction import REMOVAL, TOTAL
from trainers.ps.tables.budget import Budgets
from trainers.ps.tables.rules import Adagrad, RowWiseAdagrad
from trainers.ps.tables.run import NOT_IN, Lines, SparseRun
from trainers.ps.tables.sparse import SparseTable, make_tables
from trainers.ps.tables.spec import (
    Bound,
    Entry,
    EntryKind,
    EvictionPolicy,
    Initializer,
    InitKind,
    RowOptions,
    RowType,
    ShrinkPolicy,
    TableError,
    TableKind,
    TableSpec,
)
from trainers.ps.tables.storage import Cut, SparseRows

pytestmark = pytest.mark.slow

LRU, LFU, SCORE = EvictionPolicy
ROWS, DIM = 640, 2
INIT = Initializer(InitKind.UNIFORM, -1, 1, seed=3)


def spec_of(bound: Bound, *, lean: bool = False, **options: object) -> TableSpec:
    """`lean`: values in 16 bits, and row-wise state."""
    if lean:
        options["dtype"] = RowType.BFLOAT16
    rows = RowOptions(init=INIT, bound=bound, **options)  # type: ignore[arg-type]
    rule = RowWiseAdagrad() if lean else Adagrad()
    return TableSpec(kind=TableKind.SPARSE, name="ids", size=DIM, rule=rule, rows=rows)


def push(table: SparseTable, keys: torch.Tensor, stats: torch.Tensor | None = None) -> None:
    table.apply(keys, torch.ones(len(keys), DIM), 0.1, stats)


def rows_of(cut: Cut, step: int = 37) -> list[SparseRows]:
    return [cut.read(start, min(start + step, cut.rows)) for start in range(0, cut.rows, step)]


def as_dict(chunks: list[SparseRows]) -> dict[int, list[float]]:
    """All of a row by its key, stamps included."""
    found = {}
    for chunk in chunks:
        assert chunk.statistics is not None
        columns = torch.cat([chunk.values, *chunk.state, chunk.statistics], 1)
        found |= dict(zip(chunk.keys.tolist(), columns.tolist(), strict=True))
    return found


def content(table: SparseTable) -> dict[int, list[float]]:
    with table.cut() as cut:
        return as_dict(rows_of(cut))


def drifting(step: int, seed: int = 0) -> torch.Tensor:
    """50 of 100 popular ids, and 60 of 600 that are other ones 100 steps later."""
    random = np.random.default_rng([seed, step])
    drift = random.integers(6 * step, 6 * step + 600, 60) + 1000
    return torch.from_numpy(np.unique(np.concatenate([random.integers(0, 100, 50), drift])))


@pytest.mark.parametrize("policy", [LRU, LFU])
def test_a_table_never_has_more_rows_and_keeps_those_in_use(policy: EvictionPolicy) -> None:
    table = SparseTable(spec_of(Bound(rows=ROWS, policy=policy)))
    for step in range(200):
        push(table, drifting(step))
        assert len(table) <= ROWS
    kept = content(table)
    assert len(kept) > ROWS * 0.9
    assert set(range(100)) <= kept.keys(), "these are in every other request"
    assert min(key for key in kept if key >= 1000) > 1000 + 6 * 60, "these are out of use"


def test_lru_evicts_the_least_recently_used_and_lfu_the_least_frequently_used() -> None:
    often, late = torch.arange(100), torch.arange(1000, 1000 + ROWS - 150)
    for policy, kept in ((LRU, late), (LFU, often)):
        table = SparseTable(spec_of(Bound(rows=ROWS, policy=policy)))
        for _ in range(40):
            push(table, often)
        push(table, late)
        push(table, torch.arange(2000, 2100))
        assert set(kept.tolist()) <= content(table).keys()


def test_score_evicts_rows_without_clicks() -> None:
    table = SparseTable(spec_of(Bound(rows=ROWS, policy=SCORE), statistics=True))
    keys = torch.arange(ROWS - 40)
    for _ in range(3):
        push(table, keys, torch.stack([torch.ones(len(keys)), (keys < 100).float()], 1))
    push(table, torch.arange(2000, 2400), torch.tensor([[1.0, 0.0]]).expand(400, 2))
    assert set(range(100)) <= content(table).keys()
    assert len(table) < 1000


def test_a_row_that_comes_back_is_a_new_one() -> None:
    table = SparseTable(spec_of(Bound(rows=ROWS)))
    first = torch.tensor([5])
    fresh = table.pull(first)
    push(table, first)
    once = table.pull(first)
    push(table, torch.arange(1000, 1000 + 2 * ROWS))
    assert torch.equal(table.pull(first), fresh)
    push(table, first)
    assert torch.equal(table.pull(first), once), "with the optimizer state of a new row"


def test_reading_makes_no_rows() -> None:
    table = SparseTable(spec_of(Bound(rows=ROWS)))
    table.pull(torch.arange(10 * ROWS))
    assert not len(table)


def test_a_bound_in_bytes_counts_records() -> None:
    table = SparseTable(spec_of(Bound(bytes=64 * 1024)))
    for step in range(300):
        push(table, drifting(step))
    bytes_a_row = 8 + 4 * (2 * DIM + 1) + 16
    assert 0.9 * 64 * 1024 < len(table) * bytes_a_row <= 64 * 1024


def replayed(spec: TableSpec, steps: int, disturb: Callable[[SparseTable, int], SparseTable]) -> list[object]:
    """The content after so many steps with a day in between, and something else before each."""
    table = SparseTable(spec)
    for step in range(steps):
        table = disturb(table, step)
        keys = drifting(step)
        stats = torch.stack([torch.ones(len(keys)), (keys % 7 == 0).float()], 1)
        push(table, keys, stats if spec.rows.statistics else None)
        if step == steps // 2 and spec.ages:
            table.begin_shrink(ShrinkPolicy(delete_threshold=0.3))
        if table._shrinking:
            table.shrink_some(40)
        if step == steps // 2 + 30:
            table.release()
        if step % 10 == 0 and table.budget is not None:
            table.budget.tick(60.0 * step)
    while table._shrinking:
        table.shrink_some(40)
    assert table.budget is not None
    return [content(table), table.clocks()[0][:9], table.budget.uses.clock[TOTAL]]


def quiet(table: SparseTable, step: int) -> SparseTable:
    return table


def busy(table: SparseTable, step: int) -> SparseTable:
    """Other requests, and the rest of a day."""
    table.pull(drifting(step // 2, seed=1))
    table.pull(drifting(step // 3), insert=False)
    if table._shrinking:
        table.shrink_some(300)
    return table


def recovered(table: SparseTable, step: int) -> SparseTable:
    """As after a snapshot and a restart, at every 37th step."""
    if step % 37 or table._shrinking:
        return table
    back = SparseTable(table.spec)
    back.restore_clocks(*([clock] for clock in table.clocks()))
    with table.cut() as cut:
        for chunk in rows_of(cut, 100):
            back.load(chunk)
    back.step = table.step
    return back


@pytest.mark.parametrize(
    ("bound", "statistics"),
    [
        (Bound(rows=ROWS), False),
        (Bound(rows=ROWS, policy=LFU), True),
        (Bound(rows=ROWS, policy=SCORE), True),
        (Bound(rows=ROWS, ttl_s=4000.0), False),
        (Bound(ttl_s=3000.0), False),
    ],
)
def test_the_same_uses_leave_the_same_rows(bound: Bound, statistics: bool) -> None:
    spec = spec_of(bound, lean=bound.policy is LFU, statistics=statistics)
    expected = replayed(spec, 150, quiet)
    assert replayed(spec, 150, busy) == expected
    assert replayed(spec, 150, recovered) == expected


def test_rows_live_for_their_time() -> None:
    table = SparseTable(spec_of(Bound(ttl_s=100.0)))
    assert table.budget is not None
    for second in range(400):
        table.budget.tick(1e9 + second)
        push(table, torch.tensor([7, 1000 + second]))
    ages = [1399 - key for key in content(table) if key != 7]
    assert 95 <= max(ages) <= 101
    assert len(ages) + 1 == len(content(table))


def test_a_counted_id_is_counted_again_after_its_row_has_left() -> None:
    table = SparseTable(spec_of(Bound(rows=ROWS), entry=Entry(EntryKind.COUNT, 2.0)))
    keys = torch.arange(3 * ROWS)
    for some in keys.split(100):
        table.pull(some)
        table.pull(some)
        push(table, some)
    assert len(table) <= ROWS
    push(table, keys[:100])
    assert not content(table).keys() & set(range(100)), "a push makes no row of a counted id"
    table.pull(keys[:100])
    table.pull(keys[:100])
    push(table, keys[:100])
    assert set(range(100)) <= content(table).keys()


@pytest.mark.parametrize("bound", [Bound(rows=ROWS), Bound(bytes=4 * 36 * ROWS, shared=True)])
def test_ids_that_are_counted_have_a_bound_too(bound: Bound) -> None:
    """And a flood of them moves no row, nor an id that is pulled again and again."""
    spec = spec_of(bound, entry=Entry(EntryKind.COUNT, 50.0))
    made = make_tables({0: spec, 1: spec})
    table, other = (each for each in made.values() if isinstance(each, SparseTable))
    kept, often = torch.arange(100), torch.arange(100, 120)
    table.assign(kept, torch.ones(100, DIM))
    for step in range(100):
        table.pull(torch.cat([often, torch.arange(100) + 1000 + 100 * step]))
        other.pull(torch.arange(10) + 1000 + 10 * step)
        counted = len(table.candidates().keys) + (len(other.candidates().keys) if bound.shared else 0)
        assert counted <= ROWS
    assert content(table).keys() == set(torch.cat([kept, often]).tolist())
    assert counted > 0.9 * ROWS
    assert set(table.candidates().keys.tolist()) <= set(range(1000 + 90 * 100, 1000 + 100 * 100))


@pytest.mark.parametrize("lean", [False, True])
def test_a_cut_and_its_deltas_are_the_table_while_rows_leave_it(lean: bool) -> None:
    table = SparseTable(spec_of(Bound(rows=ROWS), lean=lean))
    replica: dict[int, list[float]] = {}
    for step in range(120):
        push(table, drifting(step))
        if step % 6:
            continue
        expected, saved = content(table), step % 5 != 0
        cut = table.cut(changed_only=step > 0, mark=True)
        gone, chunks, done = [cut.removed], [], 0
        while done < cut.rows:
            push(table, drifting(step + 200 + done, seed=2))  # many new rows, in the places of evicted ones
            stop = min(done + 100, cut.rows)
            chunks.append(cut.read(done, stop))
            done = stop
        cut.close(saved=saved)
        if saved:
            for chunk in chunks:
                gone += [] if chunk.removed is None else [chunk.removed]
            for key in torch.cat(gone).tolist():
                replica.pop(key, None)
            replica |= as_dict(chunks)
            assert replica == expected


def test_too_many_removed_rows_end_the_deltas() -> None:
    table = SparseTable(spec_of(Bound(rows=ROWS)))
    table.cut(mark=True).close()
    for start in range(0, 100_000, 2000):
        push(table, torch.arange(start, start + 2000))
    with pytest.raises(TableError, match="mode 0"):
        table.cut(changed_only=True)
    with table.cut(mark=True) as cut:
        rows_of(cut)
    table.cut(changed_only=True).close()


def test_tables_of_a_shared_bound_give_room_to_each_other() -> None:
    bound = Bound(rows=ROWS, shared=True)
    made = make_tables({0: spec_of(bound), 1: spec_of(bound), 2: spec_of(Bound(rows=10))})
    one, other, apart = (table for table in made.values() if isinstance(table, SparseTable))
    run = Lines({0: one, 1: other}).run(0, 2)
    pull_and_push(run, torch.arange(ROWS - 40), torch.arange(5))
    assert (len(one), len(other)) == (ROWS - 40, 5)
    for start in range(0, 4 * ROWS, 20):
        pull_and_push(run, None, torch.arange(start, start + 20))
        push(apart, torch.arange(8))
        assert len(one) + len(other) <= ROWS
    assert len(content(one)) == 0
    assert len(content(other)) > 0.9 * ROWS
    assert len(apart) == 8


def test_narrow_rows_make_room_for_wide_ones_in_time() -> None:
    """A hundred of them leave for one that comes."""
    narrow = spec_of(Bound(bytes=1 << 24, shared=True))
    wide = replace(narrow, size=512)
    tables = [table for table in make_tables({0: narrow, 1: wide}).values() if isinstance(table, SparseTable)]
    for start in range(0, 400_000, 2000):
        push(tables[0], torch.arange(start, start + 2000))
    for start in range(0, 4000, 25):
        tables[1].apply(torch.arange(start, start + 25), torch.ones(25, 512), 0.1)
        assert sum(each.bounded.row_cost * len(each) for each in tables if each.bounded) <= 1 << 24


class Empty:
    """A table without rows: is told how much of a sweep is left to do."""

    row_cost = 1

    def __init__(self) -> None:
        self.left: list[int] = []

    def __len__(self) -> int:
        return 0

    def begin_sweep(self) -> int:
        return 0

    def sweep(self, work: int) -> int:
        self.left.append(work)
        return 0


def watched(bound: Bound) -> tuple[SparseTable, Empty, Empty]:
    """A table between two others of its budget."""
    budgets, before, after = Budgets(), Empty(), Empty()
    budgets.of_rows(bound).add(before)
    table = SparseTable(spec_of(bound), budgets)
    budgets.of_rows(bound).add(after)
    return table, before, after


def test_rows_that_expire_together_are_removed_bit_by_bit() -> None:
    table, before, _ = watched(Bound(ttl_s=100.0, shared=True))
    push(table, torch.arange(100_000))
    assert table.budget is not None
    for second in (1e9, 1e9 + 50, 1e9 + 200):
        table.budget.tick(second)
    assert not content(table)
    push(table, torch.arange(10))
    assert before.left[-1] < 10_000
    assert len(table) > 50_000


def test_records_are_removed_evenly() -> None:
    rows, new = 64_000, 100
    table, before, after = watched(Bound(rows=rows, shared=True))
    for start in range(0, 3 * rows, new):
        push(table, torch.arange(start, start + new))
    swept = [work - left for work, left in zip(before.left, after.left, strict=True)]
    last = swept[-10 * rows // 32 // new :]  # ten times a 32nd was made and left
    assert max(last) < 1.3 * sum(last) / len(last)
    assert sum(last) < 1.1 * 10 * (rows + REMOVAL * rows / 32)


def pull_and_push(run: SparseRun, *keys: torch.Tensor | None) -> None:
    """None: the table is not in the push."""
    together = torch.cat([each for each in keys if each is not None])
    run.pull(np.array([0 if each is None else len(each) for each in keys]), together, insert=True)
    spans = np.array([NOT_IN if each is None else len(each) for each in keys])
    run.apply(spans, together, torch.ones(len(together), DIM), 0.1)


def test_a_run_is_each_of_its_tables() -> None:
    spec = spec_of(Bound(rows=ROWS, policy=LFU), lean=True)
    alone, together = [SparseTable(spec), SparseTable(spec)], [SparseTable(spec), SparseTable(spec)]
    run = Lines(dict(enumerate(together))).run(0, 2)
    for step in range(100):
        keys = [drifting(step), drifting(step, seed=1)]
        pull_and_push(run, *keys)
        for table, some in zip(alone, keys, strict=True):
            push(table, some)
    assert [content(table) for table in together] == [content(table) for table in alone]
