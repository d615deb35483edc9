"""Budgets: how much memory the rows of a table, or of several tables together, may take, and which rows are
evicted. The stamps and floors of rows belong to `kernels.eviction`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainers.ps.kernels.eviction import (
    ANCIENT,
    COST_UNIT,
    FLOORS,
    LEVEL,
    LEVELS,
    LEVELS_A_UNIT,
    LEVELS_BELOW,
    NOW,
    PARTS,
    POLICY,
    REMOVAL,
    TOTAL,
    Uses,
    pass_until,
)
from trainers.ps.tables.spec import Bound, EvictionPolicy

ROW_BYTES = 16
"""What a row takes besides its record: its flags, and its share of the index."""

_USES_A_UNIT = {EvictionPolicy.LRU: 8, EvictionPolicy.LFU: 2, EvictionPolicy.SCORE: 2}
"""A unit of the clock is so many uses for each row that there is room for. In LFU and SCORE it is the
half-life of a use: long enough to count, short enough for ids that go out of use. In LRU a longer unit orders
rows that were used longer ago.
"""
_RESERVE, _FREED = 32, 16
"""Rows are evicted when less than a 32nd of the budget is free; then a 16th is."""
_SWEPT_EARLY = 8 / 7
"""The records of evicted rows are removed while the memory that they leave is used up, a part at each
request: at so many times the speed that this needs.
"""
_SWEPT_AT_LEAST, _SWEPT_BY_TICK = 1 << 13, 1 << 18
"""At each request, and when time passes: about 30 microseconds and a millisecond."""
_SWEPT_BY_NEW = 2 * REMOVAL
"""For each new row, where time evicts rows: these may be very many, and no bound needs their memory."""
_CANDIDATES = 4
"""The candidates of a table that is bounded in bytes may have a 4th of these, besides."""
_TICKS = 480
"""Parts of a time to live by which the age of a row is known: fewer than LEVELS_BELOW."""
_LONGEST = 1 << 16
"""Units after which a clock restarts. Stamps are float32: up to 4 times as many units, neighbours are at most
a level apart.
"""
_TURN = LEVELS // LEVELS_A_UNIT
"""Units of all levels together. A clock is set back by whole turns, so that levels stay in their cells."""

Clock = Sequence[float]
"""What must be kept of a budget besides its rows: the time, the floor of each part, and then wall times, each
with the level that began then.
"""


class Evictable(Protocol):
    """A table of the budget."""

    def __len__(self) -> int: ...

    @property
    def row_cost(self) -> int:
        """What one of its rows costs."""

    def begin_sweep(self) -> int:
        """Rows were evicted, whose records are to be removed. How many records are to be looked at."""

    def sweep(self, work: int) -> int:
        """Do so much of it: a look at a record is 1, its removal REMOVAL. How much that was."""

    def restart(self, units: float) -> None:
        """Subtract this from the stamps of all rows. The floors are subtracted from after this."""


class Budgets:
    """Those of several tables: one for all rows with the same shared bound, and one for their candidates."""

    def __init__(self, disk: Path | None = None) -> None:
        self.disk = disk
        """The folder that the rows are moved to which budgets evict; None: they are removed."""
        self._shared: dict[tuple[Bound, bool], Budget] = {}

    def of_rows(self, bound: Bound) -> Budget:
        return self._of(bound, counting=False)

    def of_candidates(self, bound: Bound) -> Budget:
        """As many as rows, or a part of the bytes: the least recently pulled leave first."""
        share = replace(bound, bytes=-(-bound.bytes // _CANDIDATES), policy=EvictionPolicy.LRU)
        return self._of(share, counting=True)

    def _of(self, bound: Bound, *, counting: bool) -> Budget:
        on_disk = self.disk is not None and not counting
        if not bound.shared:
            return Budget(bound, on_disk=on_disk)
        if (bound, counting) not in self._shared:
            self._shared[bound, counting] = Budget(bound, on_disk=on_disk)
        return self._shared[bound, counting]


class Budget:
    """Of one or more tables of a server. Which rows it evicts depends on the uses of rows, and on the times
    that `tick` is told, in their order, and on nothing else: a server that applies the same requests again
    has the same rows. `on_disk`: evicted rows are moved there.
    """

    def __init__(self, bound: Bound, *, on_disk: bool = False) -> None:
        self.bound, self.on_disk = bound, on_disk
        self._limit = bound.rows or bound.bytes
        clock = np.zeros(FLOORS + PARTS)
        clock[POLICY] = bound.policy
        clock[COST_UNIT] = 0 if bound.ttl_s else 1 / (_USES_A_UNIT[bound.policy] * self._limit)
        self.uses = Uses(clock, np.zeros(LEVELS * PARTS, np.int64))
        self._tables: list[Evictable] = []
        self._total = 0.0
        self._sweep_by_cost = 0.0
        """How much is to be swept for what a new row costs."""
        self._times: deque[tuple[float, int]] = deque()
        self.passed = 0.0
        """Units by which the clock has restarted since `restore`."""
        self.held = False
        """Whether nothing is evicted for now: while a day passes in one of the tables, it is not known what
        its rows will cost.
        """
        pass_until(self.uses, LEVELS_BELOW / LEVELS_A_UNIT)

    def add(self, table: Evictable) -> None:
        """One more table shares it."""
        self._tables.append(table)

    def settle(self) -> None:
        """After a request that may have used rows: evict some if the budget is nearly used up, and remove
        some records of those that were.
        """
        self._restart()
        new, full = self.uses.clock[TOTAL] - self._total, self._limit and self._room() < 0
        if full and not self.held:
            self._evict()
        self._sweep(max(_SWEPT_AT_LEAST, int(new * self._sweep_by_cost)))

    def before_use(self) -> None:
        """Before the rows of a request come back from disk: so that none of them leaves again before it."""
        if self.on_disk:
            self.settle()

    def tick(self, time: float) -> None:
        """It is `time`, in seconds; rows whose time to live is over are evicted."""
        if not self.ticks_at(time):
            return
        clock = self.uses.clock
        pass_until(self.uses, (clock[LEVEL] + 1) / LEVELS_A_UNIT)
        self._times.append((time, int(clock[LEVEL])))
        over = None
        while self._times and self._times[0][0] <= time - self.bound.ttl_s:
            over = self._times.popleft()[1]
        if over is not None:
            self._raise_floors(np.full(PARTS, over))
            self._begin_sweep(self._room() if self._limit else math.inf, _SWEPT_BY_NEW)
        self._sweep(_SWEPT_BY_TICK)
        self._restart()

    def ticks_at(self, time: float) -> bool:
        """Whether `tick` does something at this time."""
        if not self.bound.ttl_s:
            return False
        return not self._times or time >= self._times[-1][0] + self.bound.ttl_s / _TICKS

    @property
    def time(self) -> float | None:
        """The last time of a tick, or None."""
        return self._times[-1][0] if self._times else None

    def move(self, by: float) -> None:
        """Move the times of rows by so many seconds."""
        self._times = deque((time + by, level) for time, level in self._times)

    def clock(self) -> Clock:
        """A copy."""
        clock = self.uses.clock
        times = [number for time, level in self._times for number in (time, level)]
        return [clock[NOW].item(), *clock[FLOORS:].tolist(), *times]

    def restore(self, clocks: Sequence[Clock]) -> None:
        """Continue from the clocks of one or more budgets, whose rows are loaded after this, with stamps that
        are `later` by as much as their clock is behind the last one.
        """
        now = max(clock[0] for clock in clocks)
        self.passed = units = _turns(now)
        pass_until(self.uses, now - units)
        floors = [later(np.array(clock[1 : 1 + PARTS]), now - clock[0]) for clock in clocks]
        self.uses.clock[FLOORS:] = np.min(floors, 0)
        longest = max(clocks, key=len)  # the one with the most levels, so that no row leaves before its time
        times, behind = longest[1 + PARTS :], round((now - longest[0]) * LEVELS_A_UNIT)
        self._times = deque(
            (time, int(level) + behind) for time, level in zip(times[::2], times[1::2], strict=True)
        )
        self._set_back(units)

    def _restart(self) -> None:
        """Subtract whole turns from a clock that has run for long, and from everything that it measured. So
        stamps stay exact however long a job runs, and the same rows exist.
        """
        clock = self.uses.clock
        if units := _turns(clock[NOW]):
            for table in self._tables:
                table.restart(units)
            self.passed += units
            clock[NOW] -= units
            clock[LEVEL] -= units * LEVELS_A_UNIT
            self._set_back(units)

    def _set_back(self, units: float) -> None:
        """Subtract this from the floors, which keep their order, and from the levels of wall times."""
        floors = self.uses.clock[FLOORS:]
        least = ANCIENT * (0.5 + floors.argsort(kind="stable").argsort() / (2 * PARTS))
        floors[:] = np.where(floors > 0, np.maximum(floors - units, least), 0)
        self._times = deque((time, level - int(units) * LEVELS_A_UNIT) for time, level in self._times)

    def _room(self) -> float:
        """What new rows may cost before others must leave."""
        return float(self._limit - self._limit // _RESERVE - self.uses.clock[TOTAL])

    def _begin_sweep(self, room: float, least: float = 0.0) -> None:
        """To be over before new rows cost so much; at least so much for each of them."""
        costs = [table.row_cost for table in self._tables]
        records = sum(cost * len(table) for cost, table in zip(costs, self._tables, strict=True))
        removed = (records - self.uses.clock[TOTAL]) / min(costs)
        work = sum(table.begin_sweep() for table in self._tables) + REMOVAL * removed
        self._sweep_by_cost = max(_SWEPT_EARLY * work / max(1.0, room), least / min(costs))

    def _sweep(self, work: int) -> None:
        for table in self._tables:
            work -= table.sweep(work)
        self._total = self.uses.clock[TOTAL]

    def _evict(self) -> None:
        """Those with the lowest stamps, in groups of a level and a part. Within a level the parts take turns:
        the one with the lowest floor, whose rows are the oldest, comes first.
        """
        clock = self.uses.clock
        turns = clock[FLOORS:].argsort(kind="stable")
        costs = self._by_level()[:, turns].reshape(-1)
        surplus = clock[TOTAL] - (self._limit - self._limit // _FREED)
        level, last = divmod(int(np.searchsorted(costs.cumsum(), surplus)), PARTS)
        levels = np.full(PARTS, int(clock[LEVEL]) - LEVELS_BELOW + level)
        levels[turns[: last + 1]] += 1
        self._raise_floors(levels)
        self._begin_sweep(self._room())

    def _raise_floors(self, levels: NDArray[np.int64]) -> None:
        """Evict the rows of each part that are below this level of it. All rows of the oldest level and of
        those before it are counted together, so they are evicted together or not at all.
        """
        clock, cells = self.uses
        oldest = int(clock[LEVEL]) - LEVELS_BELOW
        levels = np.where(levels > oldest, levels, 0)
        costs = self._by_level()
        evicted = np.arange(LEVELS)[:, None] + oldest < levels
        clock[TOTAL] -= costs[evicted].sum()
        costs[evicted] = 0
        cells.reshape(LEVELS, PARTS)[self._places()] = costs
        np.maximum(clock[FLOORS:], levels / LEVELS_A_UNIT, out=clock[FLOORS:])
        pass_until(self.uses, clock[FLOORS:].max())  # a row that is used from now on is not below a floor

    def _by_level(self) -> NDArray[np.int64]:
        """(LEVELS, PARTS): what rows cost, from the oldest level on; a copy."""
        return self.uses.cells.reshape(LEVELS, PARTS)[self._places()]

    def _places(self) -> NDArray[np.int64]:
        return (int(self.uses.clock[LEVEL]) - LEVELS_BELOW + np.arange(LEVELS)) % LEVELS


def later(stamps: NDArray[np.float64], units: float) -> NDArray[np.float64]:
    """Return stamps of a clock that was set forward by so many units. Those of long ago stay."""
    return np.where(stamps > ANCIENT, stamps + units, stamps)


def _turns(now: float) -> float:
    """The units by which a clock is set back at this time."""
    return 0.0 if now < _LONGEST else float(now // _TURN - 1) * _TURN
