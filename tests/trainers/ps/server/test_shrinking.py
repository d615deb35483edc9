"""A shrink of many rows: other requests are answered between its slices, as if it had been made at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.trainers.ps.server.test_service import Bench
from tests.trainers.ps.server.test_state_saver import Kept
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import Entry, EntryKind, RowOptions, ShrinkPolicy, TableKind, TableSpec
from trainers.ps.wire import Code, Field, Kind, Message, Part, bytes_part

pytestmark = pytest.mark.slow

ROWS = 40_000
KEYS = torch.arange(ROWS)
SPECS = {
    0: TableSpec(kind=TableKind.SPARSE, name="s", size=1, rule=SGD(), rows=RowOptions(statistics=True)),
    1: TableSpec(
        kind=TableKind.SPARSE,
        name="c",
        size=1,
        rule=SGD(),
        rows=RowOptions(entry=Entry(EntryKind.COUNT, 2.0)),
    ),
}
POLICIES = ShrinkPolicy(delete_threshold=0.5), ShrinkPolicy(delete_after_unseen_days=0)
DAY = tuple(
    Part(table, Field.VALUES, torch.from_numpy(policy.numbers())) for table, policy in enumerate(POLICIES)
)
GONE = ROWS - ROWS // 4


def pushed(bench: Bench, keys: torch.Tensor, shows: torch.Tensor) -> Message:
    stats = torch.stack([shows, torch.zeros(len(keys))], 1)
    rows = Part(0, Field.ROWS, torch.ones(len(keys), 1), lr=1.0)
    return bench.ask(Kind.PUSH, parts=(Part(0, Field.KEYS, keys), rows, Part(0, Field.STATS, stats)))


def trained(bench: Bench) -> Bench:
    """A row in four has been shown often enough to stay; and no candidate will."""
    bench.specs = SPECS
    bench.opened(())
    pushed(bench, KEYS, torch.where(KEYS % 4 == 0, 9.0, 1.0))
    bench.ask(Kind.PULL, parts=(Part(1, Field.KEYS, KEYS),))
    return bench


def values(bench: Bench, keys: torch.Tensor) -> list[float]:
    answer = bench.ask(Kind.PULL, parts=(Part(0, Field.PEEK, keys),))
    assert answer.kind is Kind.DATA
    return answer.parts[0].data[:, 0].tolist()


def finish(bench: Bench) -> int:
    """The rest of the slices; how many there were."""
    slices = 0
    while bench.service.shrinking:
        slices += 1
        for _, reply in bench.service.shrink_some(bench.reachable):
            bench.late[reply.sequence] = reply
    return slices


def content(bench: Bench) -> list[object]:
    found: list[object] = []
    for table in bench.store.tables.values():
        assert isinstance(table, SparseTable)
        with table.cut() as cut:
            rows = cut.read(0, cut.rows)
        columns = [rows.keys, rows.values] + ([] if rows.statistics is None else [rows.statistics])
        waiting = table.candidates().columns
        found += [column[rows.keys.argsort()].tolist() for column in columns]
        found += [column[waiting[0].argsort()].tolist() for column in waiting]
    return found


def test_requests_between_the_slices_see_tables_that_are_shrunk() -> None:
    bench = Bench(sync=False)
    trained(bench)
    shrink = bench.ask(Kind.SHRINK, parts=DAY)
    assert shrink.kind is Kind.WAIT
    last = torch.arange(ROWS - 4, ROWS)
    assert values(bench, last) == [-1, 0, 0, 0]
    assert pushed(bench, last, torch.full((4,), 9.0)).kind is Kind.DONE
    assert values(bench, last) == [-2, -1, -1, -1]
    bench.ask(Kind.PULL, parts=(Part(1, Field.KEYS, last),))
    assert finish(bench) > 5
    assert bench.late[shrink.sequence].number == GONE
    assert bench.send(bench.recorded[-3]).number == GONE, "a late copy"
    rows, candidates = bench.store.tables.values()
    assert isinstance(candidates, SparseTable)
    assert len(rows) == ROWS - GONE + 3
    assert candidates.candidates().counts.tolist() == [1] * 4, "they were counted anew"
    assert values(bench, last) == [-2, -1, -1, -1]


def test_saves_and_other_shrinks_wait_for_the_last_slice(tmp_path: Path) -> None:
    bench = Bench(sync=False)
    trained(bench)
    first = bench.ask(Kind.SHRINK, parts=DAY)
    second = bench.ask(Kind.SHRINK, rank=1, parts=DAY)
    assert "shrunk" in second.text
    finish(bench)
    numbers = [bench.late[each.sequence].number for each in (first, second)]
    assert numbers == [GONE, 0]
    pushed(bench, KEYS, torch.zeros(ROWS))
    third = bench.ask(Kind.SHRINK, parts=DAY)
    order = {"where": str(tmp_path), "id": "save-1", "mode": 0, "after": []}
    save = bench.ask(Kind.SAVE, parts=(bytes_part(Field.TEXT, json.dumps(order).encode()),))
    assert (third.kind, save.kind) == (Kind.WAIT, Kind.WAIT)
    assert not bench.service._saving.busy
    finish(bench)
    assert bench.late[third.sequence].number == GONE
    task = bench.service._saving._task
    assert task is not None
    task.wait()
    for _, reply in bench.service.retry_pending(bench.reachable):
        bench.late[reply.sequence] = reply
    assert bench.late[save.sequence].kind is Kind.DONE
    bench.service._saving.abandon()


def test_a_server_that_is_killed_between_two_slices_comes_back_with_all_of_them(tmp_path: Path) -> None:
    kept = Kept(tmp_path, 2)
    trained(kept)
    assert kept.ask(Kind.SHRINK, parts=DAY).kind is Kind.WAIT
    for start in range(0, ROWS, 3000):
        some = torch.arange(start, start + 50)
        pushed(kept, some, torch.full((50,), 2.0))
        kept.ask(Kind.PULL, parts=(Part(1, Field.KEYS, some),))
        if start < 12_000:
            kept.service.shrink_some(kept.reachable)
    assert kept.service.shrinking
    kept.kill()
    back = Kept(tmp_path, 2)
    finish(kept)
    assert content(back) == content(kept)
    back.kill()


def test_a_shrink_names_each_table_once() -> None:
    bench = Bench(sync=False)
    trained(bench)
    assert bench.ask(Kind.SHRINK, parts=(DAY[0], DAY[0])).code is Code.BAD_MESSAGE
    assert not bench.service.shrinking
