"""What a server reports of its tables: rows that come and go, rates, and when it is silent."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from trainers.ps.server.store import Store
from trainers.ps.server.table_meter import PERIOD, Numbers, TableMeter
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.spec import Bound, Entry, EntryKind, RowOptions, ShrinkPolicy, TableKind, TableSpec
from trainers.ps.wire import Field, Part

pytestmark = pytest.mark.slow

ROWS = 32


def sparse(name: str, **options: object) -> TableSpec:
    rows = RowOptions(**options)  # type: ignore[arg-type]
    return TableSpec(kind=TableKind.SPARSE, name=name, size=2, rule=SGD(), rows=rows)


SPECS = {
    0: TableSpec(kind=TableKind.DENSE, name="w", size=2, rule=SGD()),
    1: sparse("plain"),
    2: sparse("bounded", bound=Bound(rows=ROWS)),
    3: sparse("filtered", entry=Entry(EntryKind.COUNT, 2.0), statistics=True),
}


class Reported:
    """A store, its meter, and what that told."""

    def __init__(self, specs: Mapping[int, TableSpec] = SPECS) -> None:
        self.store = Store()
        self.store.make(specs)
        self.store.ready = True
        self.now = 100.0
        self.heard: list[Mapping[str, Numbers]] = []
        self.takes = True
        self.meter = TableMeter(self.store, self._take, lambda: {"step": 3})

    def _take(self, server: Numbers, tables: Mapping[str, Numbers]) -> bool:
        self.heard.append(tables)
        return self.takes

    def pull(self, table: int, *keys: int) -> None:
        self.meter.active = True
        self.store.pull([Part(table, Field.KEYS, torch.tensor(keys))])

    def push(self, table: int, *keys: int) -> None:
        self.meter.active = True
        rows = torch.ones(len(keys), 2)
        parts = (Part(table, Field.KEYS, torch.tensor(keys)), Part(table, Field.ROWS, rows, lr=0.1))
        self.store.apply(self.store.check(self.store.sort(parts)[0]))

    def report(self) -> Mapping[str, Numbers]:
        self.now += PERIOD
        self.meter.report(self.now)
        return self.heard[-1]


@pytest.fixture
def reported() -> Reported:
    return Reported()


def test_rows_and_requests_are_counted(reported: Reported) -> None:
    reported.report()
    reported.pull(1, 1, 2, 3)
    reported.pull(1, 3, 4)
    reported.push(1, 4, 5)
    found = reported.report()
    assert list(found) == ["plain", "bounded", "filtered"]
    plain = found["plain"]
    assert (plain["rows"], plain["new"]) == (5, 5)
    assert (plain["pulls"], plain["pulled_keys"], plain["missed_keys"]) == (2, 5, 4)
    assert (plain["pushes"], plain["pushed_keys"]) == (1, 2)
    assert (plain["pulls_s"], plain["pulled_keys_s"], plain["pushes_s"]) == (1.0, 2.5, 0.5)
    assert plain["bytes"] > 5 * 16


def test_what_was_there_before_does_not_count(reported: Reported) -> None:
    """A server loads tables, and applies its log, before it serves."""
    reported.push(1, *range(10))
    assert (reported.report()["plain"]["new"], reported.report()["plain"]["pushes"]) == (0, 0)
    reported.push(1, 9, 10)
    assert reported.report()["plain"]["new"] == 1


def test_reads_of_an_evaluation_do_not_count(reported: Reported) -> None:
    reported.report()
    reported.store.pull([Part(1, Field.PEEK, torch.tensor([1, 2]))])
    reported.store.before(reported.store.sort((
        Part(1, Field.KEYS, torch.tensor([1])), Part(1, Field.ROWS, torch.ones(1, 2))
    ))[0])  # fmt: skip
    reported.meter.active = True
    assert reported.report()["plain"]["pulled_keys"] == 0


def test_rows_that_a_bound_evicts(reported: Reported) -> None:
    reported.report()
    for start in range(0, 20 * ROWS, 8):
        reported.push(2, *range(start, start + 8))
    bounded = reported.report()["bounded"]
    assert bounded["new"] == 20 * ROWS == bounded["evicted"] + bounded["rows"]
    assert bounded["evicted"] >= 18 * ROWS


def test_candidates_and_rows_that_a_shrink_removes(reported: Reported) -> None:
    reported.report()
    reported.pull(3, 1, 2)
    reported.pull(3, 2)
    found = reported.report()["filtered"]
    assert (found["rows"], found["candidates"], found["admitted"], found["refused"]) == (1, 1, 1, 2)
    policy = ShrinkPolicy(delete_threshold=1e9)
    table = reported.store.tables[3]
    table.shrink(policy)  # type: ignore[union-attr]
    reported.meter.active = True
    found = reported.report()["filtered"]
    assert (found["rows"], found["removed"], found["new"]) == (0, 1, 1)


def test_it_is_silent_while_nothing_happens(reported: Reported) -> None:
    reported.report()
    reported.push(1, 1)
    rates = []
    while reported.meter.wait(reported.now) is not None:
        rates.append(reported.report()["plain"]["pushes_s"])
    assert rates[0] == 0.5
    assert rates[-1] == 0, "the last report says that nothing happens any more"
    assert len(rates) < 10
    told = len(reported.heard)
    reported.report()
    assert len(reported.heard) == told
    reported.now += 3600
    reported.push(1, 1)
    reported.report()
    reported.push(1, 1)
    assert reported.report()["plain"]["pushes_s"] == 0.5, "the hour of silence is not in the rate"


def test_a_report_that_could_not_be_sent_is_repeated(reported: Reported) -> None:
    reported.takes = False
    reported.report()
    assert reported.meter.wait(reported.now) == PERIOD
    reported.takes = True
    reported.report()
    assert reported.meter.wait(reported.now) is None


def test_there_is_nothing_to_report_before_the_tables_are_ready(reported: Reported) -> None:
    reported.store.ready = False
    reported.meter.report(reported.now)
    assert reported.heard == []
    assert reported.meter.wait(reported.now) is None


def test_of_many_tables_some_are_in_each_report() -> None:
    reported = Reported({number: sparse(f"t{number}") for number in range(250)})
    for _ in range(3):
        reported.report()
    assert [len(each) for each in reported.heard] == [100, 100, 50]
    assert len({name for each in reported.heard for name in each}) == 250
