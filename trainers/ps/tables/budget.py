"""Limit the memory for the rows of one or several tables, and decide which rows are evicted.

`kernels.eviction` handles the stamps and floors of rows.
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

from trainers.errors import BrokenError
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
"""The bytes that a row takes besides its record, which are its flags and its share of the index."""

_USES_A_UNIT = {EvictionPolicy.LRU: 8, EvictionPolicy.LFU: 2, EvictionPolicy.SCORE: 2}
"""The uses in a unit of the clock, for each row that fits.

In LFU and SCORE, a unit is the half-life of a use. It is long enough to count uses, and short enough for ids
that go out of use. In LRU, a longer unit orders rows that were used longer ago.
"""
_RESERVE, _FREED = 32, 16
"""Rows are evicted when less than a 32nd of the budget is free. Afterwards a 16th is free."""
_SWEPT_EARLY = 8 / 7
"""The records of evicted rows are removed while new rows use up the freed memory, a part at each request.
This factor makes the removal faster than necessary.
"""
_SWEPT_AT_LEAST, _SWEPT_BY_TICK = 1 << 13, 1 << 18
"""The work at each request, and the work when time passes. They take about 30 microseconds and 1
millisecond.
"""
_SWEPT_BY_NEW = 2 * REMOVAL
"""The work for each new row if time evicts rows. There may be very many such rows, and no bound needs their
memory.
"""
_CANDIDATES = 4
"""The candidates of a table that is bounded in bytes may additionally use a 4th of its bytes."""
_TICKS = 480
"""The number of parts of a time to live in which the age of a row is measured. It is less than
LEVELS_BELOW.
"""
_LONGEST = 1 << 16
"""The number of units after which a clock restarts. Stamps are float32. Up to 4 times as many units,
neighbours are at most a level apart.
"""
_TURN = LEVELS // LEVELS_A_UNIT
"""The units of all levels together. A clock is set back by whole turns, so levels stay in their cells."""

Clock = Sequence[float]
"""The state of a budget besides its rows. It is the time, the floor of each part, and wall times, each with
the level that started then.
"""


class Evictable(Protocol):
    """A table of the budget."""

    def __len__(self) -> int: ...

    @property
    def row_cost(self) -> int:
        """The cost of one row."""

    def begin_sweep(self) -> int:
        """Start to remove the records of evicted rows. Return the number of records to examine."""

    def sweep(self, work: int) -> int:
        """Do so much work of a sweep, and return the work done. Examining a record is 1, and removing it is
        REMOVAL.
        """

    def restart(self, units: float) -> None:
        """Subtract `units` from the stamps of all rows. The budget adjusts the floors afterwards."""


class Budgets:
    """The budgets of several tables. All rows with the same shared bound have one budget, and their
    candidates have another.
    """

    def __init__(self, disk: Path | None = None) -> None:
        self.disk = disk
        """The directory to which evicted rows move. None means that evicted rows are removed."""
        self._shared: dict[tuple[Bound, bool], Budget] = {}

    def of_rows(self, bound: Bound) -> Budget:
        return self._of(bound, counting=False)

    def of_candidates(self, bound: Bound) -> Budget:
        """Return the budget of candidates. They may be as many as the rows, or use a part of the bytes. The
        least recently pulled candidates leave first.
        """
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
    """The budget of one or more tables of a server. With `on_disk`, evicted rows move to the disk.

    The evicted rows depend only on the uses of rows and the times of `tick`, in their order. A server that
    applies the same requests again therefore has the same rows.
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
        """The work to sweep per unit of cost of a new row."""
        self._times: deque[tuple[float, int]] = deque()
        self.passed = 0.0
        """The units by which the clock has restarted since `restore`."""
        self.held = False
        """True while evictions are suspended. While a day passes in a table, the future cost of its rows is
        unknown.
        """
        pass_until(self.uses, LEVELS_BELOW / LEVELS_A_UNIT)

    def add(self, table: Evictable) -> None:
        """Add a table that shares the budget."""
        self._tables.append(table)

    def settle(self) -> None:
        """Evict rows if the budget is nearly used up, and remove some records of evicted rows. Call it after
        a request that may have used rows.
        """
        self._restart()
        new, full = self.uses.clock[TOTAL] - self._total, self._limit and self._room() < 0
        if full and not self.held:
            self._evict()
        self._sweep(max(_SWEPT_AT_LEAST, int(new * self._sweep_by_cost)))

    def before_use(self) -> None:
        """Settle the budget before rows of a request come back from disk, so that these rows do not leave
        before the request.
        """
        if self.on_disk:
            self.settle()

    def tick(self, time: float) -> None:
        """Advance the time to `time`, in seconds, and evict rows whose time to live has passed."""
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
        """Return True if `tick` changes something at this time."""
        if not self.bound.ttl_s:
            return False
        return not self._times or time >= self._times[-1][0] + self.bound.ttl_s / _TICKS

    @property
    def time(self) -> float | None:
        """The time of the last tick, or None before the first tick."""
        return self._times[-1][0] if self._times else None

    def move(self, by: float) -> None:
        """Move the times of rows by so many seconds."""
        self._times = deque((time + by, level) for time, level in self._times)

    def clock(self) -> Clock:
        """Return a copy of the clock."""
        clock = self.uses.clock
        times = [number for time, level in self._times for number in (time, level)]
        return [clock[NOW].item(), *clock[FLOORS:].tolist(), *times]

    def restore(self, clocks: Sequence[Clock]) -> None:
        """Continue from the clocks of one or more budgets.

        Their rows are loaded afterwards. The stamps of a clock that is behind the last clock are moved by
        `later`.
        """
        now = max(clock[0] for clock in clocks)
        self.passed = units = _turns(now)
        pass_until(self.uses, now - units)
        floors = [later(np.array(clock[1 : 1 + PARTS]), now - clock[0]) for clock in clocks]
        self.uses.clock[FLOORS:] = np.min(floors, 0)
        # Use the clock with the most levels, so that rows do not leave before their time.
        longest = max(clocks, key=len)
        times, behind = longest[1 + PARTS :], round((now - longest[0]) * LEVELS_A_UNIT)
        self._times = deque(
            (time, int(level) + behind) for time, level in zip(times[::2], times[1::2], strict=True)
        )
        self._set_back(units)

    def verify(self) -> None:
        """Raise BrokenError if the total is not the sum of its cells, so the wrong rows would be evicted."""
        total, counted = self.uses.clock[TOTAL], self.uses.cells.sum()
        if total != counted:
            raise BrokenError(
                f"The budget {self.bound} has rows of cost {counted}, but counts {total:.0f}. This server "
                "stops, because the wrong rows would be evicted. Report this with its log."
            )

    def _restart(self) -> None:
        """Subtract whole turns from a clock that has run for long, and from all its measurements.

        Stamps therefore stay exact in jobs of any length, and the same rows exist.
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
        """Subtract `units` from the floors, which keep their order, and from the levels of wall times."""
        floors = self.uses.clock[FLOORS:]
        least = ANCIENT * (0.5 + floors.argsort(kind="stable").argsort() / (2 * PARTS))
        floors[:] = np.where(floors > 0, np.maximum(floors - units, least), 0)
        self._times = deque((time, level - int(units) * LEVELS_A_UNIT) for time, level in self._times)

    def _room(self) -> float:
        """Return the cost that new rows may have before other rows must leave."""
        return float(self._limit - self._limit // _RESERVE - self.uses.clock[TOTAL])

    def _begin_sweep(self, room: float, least: float = 0.0) -> None:
        """Start a sweep that ends before new rows cost `room`, with at least the work `least` for each new
        row.
        """
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
        """Evict the rows with the lowest stamps, in groups of a level and a part.

        Within a level, the parts take turns. The part with the lowest floor comes first, because its rows are
        the oldest.
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
        """Evict the rows of each part below the part's level.

        All rows of the oldest level and of earlier levels are counted together, so they can only be evicted
        together.
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
        pass_until(self.uses, clock[FLOORS:].max())  # rows that are used from now on are not below a floor

    def _by_level(self) -> NDArray[np.int64]:
        """Return a copy of the costs of rows, (LEVELS, PARTS) int64, from the oldest level on."""
        return self.uses.cells.reshape(LEVELS, PARTS)[self._places()]

    def _places(self) -> NDArray[np.int64]:
        return (int(self.uses.clock[LEVEL]) - LEVELS_BELOW + np.arange(LEVELS)) % LEVELS


def later(stamps: NDArray[np.float64], units: float) -> NDArray[np.float64]:
    """Return the stamps of a clock that was set forward by so many units. Ancient stamps stay."""
    return np.where(stamps > ANCIENT, stamps + units, stamps)


def _turns(now: float) -> float:
    """Return the units by which a clock is set back at this time."""
    return 0.0 if now < _LONGEST else float(now // _TURN - 1) * _TURN
