"""A server with bounded tables that comes back has the rows that it had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainers.ps.server.test_state_saver import Kept
from trainers.ps.tables.rules import Adagrad
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import (
    Bound,
    Entry,
    EntryKind,
    EvictionPolicy,
    Initializer,
    InitKind,
    RowOptions,
    ShrinkPolicy,
    TableKind,
    TableSpec,
)
from trainers.ps.wire import Field, Kind, Part

pytestmark = pytest.mark.slow

INIT = Initializer(InitKind.UNIFORM, -1, 1, seed=3)
SHARED = Bound(bytes=40_000, policy=EvictionPolicy.LFU, shared=True)
ROWS = {
    0: RowOptions(init=INIT, bound=Bound(rows=300)),
    1: RowOptions(init=INIT, bound=SHARED),
    2: RowOptions(init=INIT, bound=SHARED, statistics=True),
    3: RowOptions(init=INIT, bound=Bound(rows=400, ttl_s=50.0)),
    4: RowOptions(init=INIT, bound=Bound(rows=200, ttl_s=40.0), entry=Entry(EntryKind.COUNT, 2.0)),
}
SPECS = {
    number: TableSpec(kind=TableKind.SPARSE, name=f"t{number}", size=2, rule=Adagrad(), rows=rows)
    for number, rows in ROWS.items()
}
SET_AT = 70
"""The step before which the machine's clock is set forward."""
POLICY = torch.from_numpy(ShrinkPolicy(delete_threshold=0.15).numbers())


class Bounded(Kept):
    """Trains tables of each kind of bound. A killed server comes back from its folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 1)
        self.specs = SPECS

    def train(self, step: int) -> None:
        since_set = 7200 * (step >= SET_AT)  # so that no row is older or younger because of it
        self.at(1e9 + step + since_set, 7200.0 * (step == SET_AT))
        parts: list[Part] = []
        for number, spec in SPECS.items():
            keys = torch.unique(torch.randint(3 * step, 3 * step + 200, (60,)))
            stats = Part(number, Field.STATS, torch.ones(len(keys), 2))
            rows = Part(number, Field.ROWS, torch.ones(len(keys), 2), lr=0.1)
            parts += [Part(number, Field.KEYS, keys), rows, *([stats] if spec.rows.statistics else [])]
        pulled = torch.unique(torch.randint(3 * step, 3 * step + 400, (60,)))
        pulls = Part(0, Field.KEYS, torch.arange(step * 7, step * 7 + 90)), Part(4, Field.KEYS, pulled)
        self.ask(Kind.PULL, parts=pulls)
        answer = self.ask(Kind.PUSH, number=step, parts=tuple(parts))
        assert answer.kind is Kind.DONE, answer.text

    def at(self, time: float, set_by: float = 0.0) -> None:
        self.recording(lambda: self.service.pass_time(time, set_by))

    def recording(self, act: Callable[[], object]) -> None:
        """For what is recorded without a request."""
        before = len(self.recorded)
        act()
        for record in self.recorded[before:]:
            self.saver.record(record)

    def slice(self) -> None:
        self.recording(lambda: self.service.shrink_some(self.reachable))

    def snapshot(self) -> None:
        self.saver._due = None
        super().snapshot()

    def day(self) -> None:
        self.ask(Kind.SHRINK, parts=(Part(2, Field.VALUES, POLICY), Part(4, Field.VALUES, POLICY)))

    def content(self) -> list[object]:
        found: list[object] = []
        for table in self.store.tables.values():
            assert isinstance(table, SparseTable)
            with table.cut() as cut:
                rows = cut.read(0, cut.rows)
            assert rows.statistics is not None
            columns = torch.cat([rows.values, *rows.state, rows.statistics], 1)
            found += [dict(zip(rows.keys.tolist(), columns.tolist(), strict=True)), table.clocks()]
        counted = self.store.tables[4]
        assert isinstance(counted, SparseTable)
        keys, *columns = (column.tolist() for column in counted.candidates().columns)
        return [*found, dict(zip(keys, zip(*columns, strict=True), strict=True))]


def test_a_server_that_comes_back_has_the_same_rows(tmp_path: Path) -> None:
    def trained(name: str, kills: set[int]) -> list[object]:
        torch.manual_seed(0)
        bench = Bounded(tmp_path / name)
        bench.opened(())
        for step in range(150):
            if step in kills:
                before = None if bench.service.shrinking else bench.content()
                bench.kill()
                sequence, bench = bench.sequence, Bounded(tmp_path / name)
                bench.sequence = sequence  # its trainer continues
                assert before is None or bench.content() == before
            if step == 80:
                bench.day()
            if step == 84:
                bench.slice()
                assert not bench.service.shrinking
            if step in (40, 100):
                bench.snapshot()
            bench.train(step)
        bench.kill()
        return bench.content()

    expected = trained("quiet", set())
    sizes = [len(rows) for rows in expected[::2]]  # type: ignore[arg-type]
    assert 250 < sizes[0] <= 300
    assert sizes[4] > 100, "many are pulled twice"
    assert 100 < sizes[5] <= 200, "all that were pulled once would be more"
    assert trained("killed", {20, 60, 82, 90, 101, 120}) == expected


def test_the_time_while_no_server_runs_counts_by_the_machines_clock(tmp_path: Path) -> None:
    """Where that clock is behind what the rows have seen, no time has passed, and they leave all the same."""

    def alive(bench: Bounded) -> list[str]:
        return [row["state"] for row in bench.store.look("t3", np.array([1, 2]))["rows"]]

    def trained(name: str) -> None:
        bench = Bounded(tmp_path / name)
        bench.opened(())
        for time, key in ((0, 1), (20, 2)):
            bench.at(1e9 + time)
            rows = Part(3, Field.ROWS, torch.ones(1, 2), lr=0.1)
            bench.ask(Kind.PUSH, number=time, parts=(Part(3, Field.KEYS, torch.tensor([key])), rows))
            bench.at(1e9 + time + 1)
        bench.snapshot()
        bench.kill()

    trained("ahead")
    back = Bounded(tmp_path / "ahead")
    assert alive(back) == ["row", "row"]
    back.at(1e9 + 60)
    assert alive(back)[0] != "row", "it is 60 s old, and may be 50"
    assert alive(back)[1] == "row"
    back.kill()

    trained("behind")
    back = Bounded(tmp_path / "behind")
    for seconds, states in ((0, "row row"), (20, "row row"), (32, "gone row"), (52, "gone gone")):
        back.at(5e8 + seconds)
        found = alive(back)
        assert [state == "row" for state in found] == [each == "row" for each in states.split()], seconds
        back.kill()
        back = Bounded(tmp_path / "behind")
        assert alive(back) == found
    back.kill()
