"""Budgets against a model in plain Python: the rows that exist, their cost and the counts of the budget agree
after every operation, and no more rows leave than must.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from trainers.ps.kernels.eviction import (
    FLOORS,
    LEVELS_A_UNIT,
    LEVELS_BELOW,
    PARTS,
    TOTAL,
    cell_of,
    find_evicted,
    part_of,
    pass_until,
)
from trainers.ps.kernels.rows import COST
from trainers.ps.tables.budget import Budget
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.sparse import SparseTable, make_tables
from trainers.ps.tables.spec import (
    Bound,
    Entry,
    EntryKind,
    EvictionPolicy,
    RowOptions,
    ShrinkPolicy,
    TableKind,
    TableSpec,
)
from trainers.ps.tables.storage import Storage

pytestmark = pytest.mark.slow

LRU, LFU, SCORE = EvictionPolicy
ROWS = 200


def spec_of(bound: Bound, size: int = 1, **options: object) -> TableSpec:
    rows = RowOptions(bound=bound, **options)  # type: ignore[arg-type]
    return TableSpec(kind=TableKind.SPARSE, name="ids", size=size, rule=SGD(), rows=rows)


def push(table: SparseTable, keys: torch.Tensor, stats: torch.Tensor | None = None) -> None:
    table.apply(keys, torch.ones(len(keys), table.spec.size), 0.1, stats)


def alive(storage: Storage) -> dict[int, float]:
    """The stamp of each row that exists, by its key."""
    keys, stamps = storage.keys(0, len(storage)), storage.records(0, len(storage))[:, -1].copy()
    evicted = np.zeros(len(keys), np.bool_)
    find_evicted(keys, stamps, storage.uses.clock[FLOORS:].copy(), evicted)
    return dict(zip(keys[~evicted].tolist(), stamps[~evicted].tolist(), strict=True))


def storages(tables: Iterable[SparseTable]) -> list[Storage]:
    return [table.kept[0] for table in tables]


def agrees(budget: Budget, kept: Iterable[Storage]) -> None:
    """What the budget counts is what the rows cost, level by level."""
    uses, cells, total = budget.uses, np.zeros_like(budget.uses.cells), 0
    for storage in kept:
        cost = int(storage.rows.numbers[COST])
        for key, stamp in alive(storage).items():
            cells[cell_of(uses, stamp, part_of(key))] += cost
            total += cost
    assert uses.clock[TOTAL] == total
    assert np.array_equal(uses.cells, cells)


def test_the_first_eviction_leaves_the_rows_that_need_not_go() -> None:
    """Few misses: most rows are older than all levels that are told apart."""
    table = SparseTable(spec_of(Bound(rows=1000)))
    push(table, torch.arange(900))
    for _ in range(3500):
        push(table, torch.arange(20))
    for start in range(900, 950, 10):
        push(table, torch.arange(start, start + 10))
    assert table.budget is not None
    push(table, torch.arange(950, 970))
    assert len(alive(table.kept[0])) > 1000 - 1000 // 16 - 1000 // PARTS
    agrees(table.budget, storages([table]))


@dataclass
class Model:
    """A budget in plain Python: the stamp of each existing row, by table and key."""

    bound: Bound
    costs: list[int]
    now: float = LEVELS_BELOW / LEVELS_A_UNIT
    stamps: dict[tuple[int, int], float] = field(default_factory=dict)
    floors: list[int] = field(default_factory=lambda: [0] * PARTS)
    times: list[tuple[float, int]] = field(default_factory=list)
    held: bool = False

    @property
    def limit(self) -> int:
        return self.bound.rows or self.bound.bytes

    @property
    def total(self) -> int:
        return sum(self.costs[table] for table, _ in self.stamps)

    def use(self, table: int, keys: list[int], weights: list[float]) -> None:
        step = 0.0
        if not self.bound.ttl_s:
            step = self.costs[table] / ((8 if self.bound.policy is LRU else 2) * self.limit)
        for key, weight in zip(keys, weights, strict=True):
            self.now += step
            after = self.now
            if self.bound.policy is not LRU:
                if (table, key) in self.stamps:
                    weight += 2.0 ** (self.stamps[table, key] - self.now)
                after += min(math.log2(weight), 15.0)
            self.stamps[table, key] = float(np.float32(after))

    def level(self, stamp: float) -> int:
        return max(math.floor(stamp * LEVELS_A_UNIT), math.floor(self.now * LEVELS_A_UNIT) - LEVELS_BELOW)

    def settle(self) -> None:
        """The oldest level leaves first, and of it the part with the lowest floor, until a 16th is free. All
        stamps that are older than the levels are one level.
        """
        if self.held or not self.limit or self.total <= self.limit - self.limit // 32:
            return
        surplus = self.total - (self.limit - self.limit // 16)
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for (table, key), stamp in self.stamps.items():
            groups.setdefault((self.level(stamp), int(part_of(key))), []).append((table, key))
        turns = {part: (self.floors[part], part) for part in range(PARTS)}
        oldest = math.floor(self.now * LEVELS_A_UNIT) - LEVELS_BELOW
        for level, part in sorted(groups, key=lambda group: (group[0], turns[group[1]])):
            for row in groups[level, part]:
                surplus -= self.costs[row[0]]
                del self.stamps[row]
            if surplus <= 0:
                break
        for other in range(PARTS):
            below = level + (turns[other] <= turns[part])
            self.floors[other] = max(self.floors[other], below if below > oldest else 0)
        self.now = max(self.now, (level + 1) / LEVELS_A_UNIT)

    def tick(self, time: float) -> None:
        if self.times and time < self.times[-1][0] + self.bound.ttl_s / 480:
            return
        self.now = (math.floor(self.now * LEVELS_A_UNIT) + 1) / LEVELS_A_UNIT
        self.times.append((time, math.floor(self.now * LEVELS_A_UNIT)))
        for then, level in self.times:
            if then <= time - self.bound.ttl_s:
                self.floors = [max(floor, level) for floor in self.floors]
                for row in [row for row, stamp in self.stamps.items() if stamp * LEVELS_A_UNIT < level]:
                    del self.stamps[row]


class Pair:
    """Tables of one budget, and its model. What is done is done to both, and then they are compared."""

    def __init__(self, bound: Bound, sizes: tuple[int, ...] = (1,), **options: object) -> None:
        self.bound = bound
        self.specs = {number: spec_of(bound, size, **options) for number, size in enumerate(sizes)}
        self.tables = self.made()
        costs = [table.bounded.row_cost for table in self.tables if table.bounded is not None]
        self.model = Model(bound, costs)
        self.random = np.random.default_rng(1)

    def made(self) -> list[SparseTable]:
        return [each for each in make_tables(self.specs).values() if isinstance(each, SparseTable)]

    @property
    def budget(self) -> Budget:
        assert self.tables[0].budget is not None
        return self.tables[0].budget

    def push(self, number: int, keys: torch.Tensor) -> None:
        stats, weights = None, [1.0] * len(keys)
        if self.specs[number].rows.statistics:
            stats = torch.stack([torch.ones(len(keys)), (keys % 7 == 0).float()], 1)
            if self.bound.policy is SCORE:
                weights = [10.0 if key % 7 == 0 else 1.0 for key in keys.tolist()]
        push(self.tables[number], keys, stats)
        self.model.use(number, keys.tolist(), weights)
        self.model.settle()

    def remove(self, number: int, keys: torch.Tensor) -> None:
        self.tables[number].remove(keys)
        for key in keys.tolist():
            self.model.stamps.pop((number, key), None)

    def assign(self, number: int, keys: torch.Tensor) -> None:
        """The row is a new one."""
        self.tables[number].assign(keys, torch.zeros(len(keys), self.specs[number].size))
        for key in keys.tolist():
            self.model.stamps.pop((number, key), None)
        self.model.use(number, keys.tolist(), [1.0] * len(keys))
        self.model.settle()

    def tick(self, time: float) -> None:
        self.budget.tick(time)
        if self.bound.ttl_s:
            self.model.tick(time)

    def begin_day(self) -> None:
        """A day in which rows without use for 2 days are removed, of the first table."""
        self.tables[0].begin_shrink(ShrinkPolicy(delete_threshold=0.0, delete_after_unseen_days=2.0))
        self.model.held = True

    def end_day(self) -> None:
        while self.tables[0].shrink_some(50) is None:
            pass
        kept = alive(self.tables[0].kept[0])
        for row in [row for row in self.model.stamps if row[0] == 0 and row[1] not in kept]:
            del self.model.stamps[row]  # which rows a day removes is not the subject here
        self.model.held = False
        self.tables[0].release()
        self.model.settle()

    def reload(self) -> None:
        """As after a save and a restart."""
        back = self.made()
        for new, old in zip(back, self.tables, strict=True):
            new.restore_clocks(*([clock] if clock else [] for clock in old.clocks()))
        for new, old in zip(back, self.tables, strict=True):
            with old.cut() as cut:
                for start in range(0, cut.rows, 37):
                    new.load(cut.read(start, min(start + 37, cut.rows)))
            new.step = old.step
        self.tables = back

    def same(self) -> None:
        rows = {(n, key): s for n, t in enumerate(self.tables) for key, s in alive(t.kept[0]).items()}
        assert rows.keys() == self.model.stamps.keys()
        assert self.budget.uses.clock[TOTAL] == self.model.total
        agrees(self.budget, storages(self.tables))

    def keys(self, miss: float) -> torch.Tensor:
        """Some popular ids, again and again, and a share of others."""
        count = int(self.random.choice([1, 10, 40, 400, 4000], p=[0.2, 0.3, 0.3, 0.15, 0.05]))
        new = self.random.integers(100, 3000, self.random.binomial(count, miss))
        keys = np.concatenate([self.random.integers(0, 30, count - len(new)), new])
        return torch.from_numpy(self.random.permutation(keys))


BOUNDS = [
    (Bound(rows=ROWS), (1,), False),
    (Bound(rows=ROWS, policy=LFU), (1,), False),
    (Bound(rows=ROWS, policy=SCORE), (1,), True),
    (Bound(rows=ROWS, ttl_s=50.0), (1,), True),
    (Bound(ttl_s=50.0), (1,), False),
    (Bound(rows=ROWS, shared=True), (1, 1), True),
    (Bound(bytes=40 * ROWS, policy=LFU, shared=True), (1, 5), False),
]


@pytest.mark.parametrize(("bound", "sizes", "statistics"), BOUNDS)
@pytest.mark.parametrize("steps", [150, 400])
def test_rows_budget_and_model_agree_after_every_operation(
    steps: int, bound: Bound, sizes: tuple[int, ...], statistics: bool
) -> None:
    pair, time, miss = Pair(bound, sizes, statistics=statistics), 1e9, 0.5
    day = cut = None
    for step in range(steps):
        if step % 50 == 0:
            miss = float(pair.random.choice([0.0, 0.001, 0.01, 0.05, 0.5, 1.0]))
        number, keys = int(pair.random.integers(len(sizes))), pair.keys(miss)
        match pair.random.choice(["push", "assign", "remove", "tick", "day", "cut", "reload"], p=CHANCES):
            case "push":
                pair.push(number, keys)
            case "assign":
                pair.assign(number, keys[:50].unique())
            case "remove":
                pair.remove(number, keys[:20])
            case "tick":
                time += float(pair.random.choice([0.1, 1.0, 20.0]))
                pair.tick(time)
            case "day" if statistics and cut is None:
                pair.end_day() if day else pair.begin_day()
                day = not day
            case "cut" if not day:
                cut = pair.tables[0].cut() if cut is None else cut.close()
            case "reload" if cut is None and not day:
                pair.reload()
        pair.same()


CHANCES = [0.7, 0.05, 0.05, 0.1, 0.04, 0.04, 0.02]


def test_no_part_of_the_ids_keeps_its_rows_at_the_cost_of_the_others() -> None:
    """So few misses that all rows but the popular ones are older than all levels."""
    table, popular = SparseTable(spec_of(Bound(rows=1000))), torch.arange(20)
    for start in range(1000, 4000, 10):
        push(table, popular.repeat(2500))
        push(table, torch.arange(start, start + 10))
    ages = [4000 - key for key in alive(table.kept[0]) if key >= 1000]
    assert len(ages) > 800
    assert max(ages) < 2000, "no row is much older than the bound allows"


@pytest.mark.parametrize("policy", [LRU, LFU])
def test_a_clock_that_has_run_for_years_is_as_exact_as_a_new_one(policy: EvictionPolicy) -> None:
    """Two tables with the same uses; one has been in use for a billion units before."""
    bound = Bound(rows=100, policy=policy)
    new, old = SparseTable(spec_of(bound)), SparseTable(spec_of(bound))
    old.restore_clocks([[2.0**30, *[0.0] * PARTS]], [])
    random = np.random.default_rng(0)
    for table in (new, old):
        assert table.budget is not None
    for step in range(300):
        keys = torch.from_numpy(np.unique(random.integers(0, 400, 20)))
        for table in (new, old):
            push(table, keys)
        kept = alive(old.kept[0])
        assert kept.keys() == alive(new.kept[0]).keys(), step
        assert policy is LFU or set(keys.tolist()) <= kept.keys(), "the rows of the push itself"


def restarted(table: SparseTable) -> bool:
    """Let time pass until the clock restarts."""
    budget = table.budget
    assert budget is not None
    before = budget.passed
    pass_until(budget.uses, 65_536.0)
    budget.settle()
    return budget.passed > before


@pytest.mark.parametrize(
    "bound", [Bound(rows=ROWS), Bound(rows=ROWS, policy=LFU), Bound(rows=ROWS, ttl_s=50.0)]
)
def test_a_restart_of_the_clock_keeps_rows_order_and_counts(bound: Bound) -> None:
    """With rows of all ages, and some that are evicted and not removed yet."""
    pair = Pair(bound)
    for start in range(4):
        for step in range(40):
            pair.push(0, pair.keys(0.3))
            pair.budget.tick(1e9 + 40 * start + step)
        before = alive(pair.tables[0].kept[0])
        saved = pair.tables[0].cut(mark=True)
        saved.read(0, saved.rows)
        saved.close()
        with pair.tables[0].cut() as cut:
            then = cut.rows
            assert restarted(pair.tables[0])
            seen = cut.read(0, then)
        assert seen.statistics is not None
        assert dict(zip(seen.keys.tolist(), seen.statistics[:, -1].tolist(), strict=True)) == before
        after = alive(pair.tables[0].kept[0])
        assert after.keys() == before.keys()
        pairs = sorted((before[key], after[key]) for key in before)
        assert all(one[1] <= two[1] for one, two in itertools.pairwise(pairs))
        agrees(pair.budget, storages(pair.tables))
        with pair.tables[0].cut(changed_only=True) as cut:
            changed = cut.read(0, cut.rows)
        assert set(changed.keys.tolist()) == after.keys(), "a delta does not follow stamps of another clock"
    for _ in range(40):
        pair.push(0, pair.keys(0.3))
        agrees(pair.budget, storages(pair.tables))


def test_rows_that_expire_are_counted_when_the_clocks_of_two_servers_differ() -> None:
    """One of them is much later, so the levels of the other's wall times are older than all levels."""
    early, late = Pair(Bound(rows=ROWS, ttl_s=50.0)), Pair(Bound(rows=ROWS, ttl_s=50.0))
    for second in range(60):
        for pair, ids in ((early, 0), (late, 1000)):
            pair.budget.tick(1e9 + second)
            push(pair.tables[0], torch.arange(ids + second, ids + second + 1))
    pass_until(late.budget.uses, 1000.0)
    push(late.tables[0], torch.arange(2000, 2010))
    (both,) = early.made()
    both.restore_clocks([late.budget.clock(), early.budget.clock()], [])
    for pair in (early, late):
        with pair.tables[0].cut() as cut:
            both.load(cut.read(0, cut.rows))
    assert both.budget is not None
    for second in range(60, 170):
        both.budget.tick(1e9 + second)
        agrees(both.budget, storages([both]))
        if second == 75:
            assert {50, 1050, 2005} <= alive(both.kept[0]).keys(), "no row leaves before its time"
    assert not alive(both.kept[0])


def test_rows_that_are_loaded_twice_count_once() -> None:
    """Rows and candidates; also with stamps of a clock that is much later."""
    options = {"entry": Entry(EntryKind.COUNT, 9.0)}
    rows = Pair(Bound(rows=ROWS))
    rows.push(0, torch.arange(50))
    with rows.tables[0].cut() as cut:
        chunk = cut.read(0, cut.rows)
    assert chunk.statistics is not None
    counted = Pair(Bound(rows=ROWS), (1,), **options).tables[0]
    counted.pull(torch.arange(50))
    waiting = counted.candidates()
    candidates = counted.kept[1]
    for later in (0.0, 1e4):
        chunk.statistics[:, -1] += later
        for _ in range(2):
            rows.tables[0].load(chunk)
            counted.load_candidates(waiting)
        agrees(rows.budget, storages(rows.tables))
        assert candidates is not None
        agrees(counted.budgets[1], [candidates])
    rows.push(0, torch.arange(1000))
    agrees(rows.budget, storages(rows.tables))
