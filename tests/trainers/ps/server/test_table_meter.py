"""What a server reports of its tables: rows that come and go, rates, and when it is silent."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from tests.support.shrinking import shrink
from trainers.ps.kernels.counts import REGISTERS
from trainers.ps.server.members import Member
from trainers.ps.server.samples import DistinctKeys, HotKeys, Sizes
from trainers.ps.server.steps import AsyncSteps
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
        self.steps = AsyncSteps(self.store, clock=lambda: self.now)
        self.server: Numbers = {}
        self.hot: dict[str, Numbers] = {}
        self.meter = TableMeter(self.store, self.steps, self._take, lambda: {"step": 3})

    def _take(self, server: Numbers, tables: Mapping[str, Numbers], hot: Mapping[str, Numbers]) -> bool:
        self.heard.append(tables)
        self.server = server
        self.hot |= hot
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
    assert (plain["rows"], plain["new"]) == (2, 2)
    assert (plain["pulls"], plain["pulled_keys"], plain["missed_keys"]) == (2, 5, 5)
    assert (plain["pushes"], plain["pushed_keys"]) == (1, 2)
    assert (plain["pulls_s"], plain["pulled_keys_s"], plain["pushes_s"]) == (0.4, 1.0, 0.2)
    assert plain["bytes"] > 2 * 16


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
    shrink(table, policy)  # type: ignore[union-attr]
    reported.meter.active = True
    found = reported.report()["filtered"]
    assert (found["rows"], found["removed"], found["new"]) == (0, 1, 1)


def test_it_is_silent_while_nothing_happens(reported: Reported) -> None:
    reported.report()
    reported.push(1, 1)
    rates = []
    while reported.meter.wait(reported.now) is not None:
        rates.append(reported.report()["plain"]["pushes_s"])
    assert rates[0] == 0.2
    assert rates[-1] == 0, "the last report says that nothing happens any more"
    assert len(rates) < 10
    told = len(reported.heard)
    reported.report()
    assert len(reported.heard) == told
    reported.now += 3600
    reported.push(1, 1)
    reported.report()
    reported.push(1, 1)
    assert reported.report()["plain"]["pushes_s"] == 0.2, "the hour of silence is not in the rate"


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
    reported = Reported({number: sparse(f"t{number}") for number in range(120)})
    for _ in range(3):
        reported.report()
    assert [len(each) for each in reported.heard] == [50, 50, 20]
    assert len({name for each in reported.heard for name in each}) == 120


# ---- What comes from samples.


def test_hot_keys_are_those_of_the_most_pulls(reported: Reported) -> None:
    reported.report()
    for number in range(30):
        reported.pull(1, 7, -3, 1000 + number) if number % 2 else reported.pull(1, 7, 1000 + number)
        reported.report()
    shares = list(reported.hot["plain"].items())
    assert shares[0] == ("7", 1.0)
    assert shares[1][0] == "-3"
    assert shares[1][1] == pytest.approx(0.5, abs=0.1)
    assert len(shares) == 20


def test_hot_keys_are_found_among_very_many() -> None:
    random, hot = np.random.default_rng(0), HotKeys()
    for _ in range(50):
        keys = [np.concatenate([random.integers(100, 1 << 40, 1000), np.arange(10)]) for _ in range(4)]
        hot.add(np.concatenate(keys), 4)
    top = hot.top()
    assert list(top.values())[:10] == [1.0] * 10
    assert set(list(top)[:10]) == set(map(str, range(10)))


def test_distinct_keys_of_the_last_hour(reported: Reported) -> None:
    for start in range(0, 40_000, 1000):
        reported.pull(1, *range(start, start + 1000))
        reported.pull(1, *range(start, start + 1000))
    reported.meter.report(reported.now)
    assert reported.heard[-1]["plain"]["ids_hour"] == 0, "what was before it began does not count"
    for start in range(0, 40_000, 1000):
        reported.pull(1, *range(start, start + 1000))
    assert reported.report()["plain"]["ids_hour"] == pytest.approx(40_000, rel=0.2)
    reported.now += 1800
    reported.report()
    reported.pull(1, *range(40_000, 60_000))
    assert reported.report()["plain"]["ids_hour"] == pytest.approx(60_000, rel=0.2)
    reported.now += 2000
    reported.pull(1, 1)
    reported.report()
    assert reported.heard[-1]["plain"]["ids_hour"] == pytest.approx(20_000, rel=0.2)


def test_keys_are_forgotten_after_an_hour_without_reports() -> None:
    registers = np.zeros(REGISTERS, np.uint8)
    distinct = DistinctKeys(registers, 0.0)
    registers[:] = 3
    assert distinct.count(299.0) > 0
    assert distinct.count(5000.0) == 0


def test_sizes_of_values_and_gradients(reported: Reported) -> None:
    assert "gradient_norm" not in reported.report()["plain"], "it is not known"
    for _ in range(3):
        reported.push(1, 1, 2, 3)
        found = reported.report()["plain"]
    assert found["gradient_norm"] == pytest.approx(2**0.5, rel=1e-3)
    assert (found["gradient_zeros"], found["gradient_not_finite"]) == (0, 0)
    assert found["value_norm"] > 0
    sizes = Sizes()
    sizes.add(np.array([[3.0, 4.0], [0.0, np.nan]], np.float32))
    assert sizes.numbers("x") == {"x_norm": 2.5, "x_zeros": 0.25, "x_not_finite": 0.25}


def test_staleness_is_what_others_pushed_since_the_pull(reported: Reported) -> None:
    reported.store.make(SPECS)
    slow, fast = Member(0), Member(1)
    reported.steps.pull(slow, 0, [])
    for number in range(3):
        reported.steps.pull(fast, number, [])
        reported.now += 0.25
        reported.steps.push(fast, number, [])
    reported.steps.pull(slow, 0, [])  # the same request again
    reported.steps.push(slow, 0, [])
    assert list(reported.steps.staleness) == [(0, 0.25)] * 3 + [(3, 0.75)]
