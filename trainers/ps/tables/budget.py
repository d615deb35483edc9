"""Budgets: how much memory the rows of a table, or of several tables together, may take, and which rows are
evicted. The stamps and floors of rows belong to `kernels.eviction`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainers.ps.kernels.eviction import (
    COST_UNIT,
    FLOORS,
    LEVEL,
    LEVELS,
    LEVELS_A_UNIT,
    LEVELS_BELOW,
    NOW,
    PARTS,
    POLICY,
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
_SWEPT_BY_ROW, _REMOVED_BY_ROW, _NEW_AT_LEAST = 64, 2, 128
"""Records to look at, and to remove at most, for each new row of a request, or as if it had made so many:
those of all evicted rows are gone before the 32nd has been used up.
"""
_NEW_BY_TICK = 1024
"""As above, when time passes: a millisecond or two."""
_TICKS = 480
"""Parts of a time to live by which the age of a row is known: fewer than LEVELS_BELOW."""

Clock = Sequence[float]
"""What must be kept of a budget besides its rows: the time, the floor of each part, and then wall times, each
with the level that began then.
"""


class Evictable(Protocol):
    """A table of the budget."""

    @property
    def in_memory(self) -> int:
        """Rows, and records of evicted ones."""

    def begin_sweep(self) -> None:
        """Rows were evicted, whose records are to be removed."""

    def sweep(self, records: int, removed: int) -> tuple[int, int]:
        """Look at so many records at most, and remove so many at most. How many that were."""


class Budget:
    """Of one or more tables of a server. Which rows it evicts depends on the uses of rows, and on the times
    that `tick` is told, in their order, and on nothing else: a server that applies the same requests again
    has the same rows.
    """

    def __init__(self, bound: Bound) -> None:
        self.bound = bound
        self._limit = bound.rows or bound.bytes
        clock = np.zeros(FLOORS + PARTS)
        clock[POLICY] = bound.policy
        clock[COST_UNIT] = 0 if bound.ttl_s else 1 / (_USES_A_UNIT[bound.policy] * self._limit)
        self.uses = Uses(clock, np.zeros(LEVELS * PARTS, np.int64))
        self._tables: list[Evictable] = []
        self._records = 0
        self._times: deque[tuple[float, int]] = deque()
        self.on_disk = False
        """Whether evicted rows are kept on disk. Then it may settle before any request."""
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
        full = self._limit and self.uses.clock[TOTAL] > self._limit - self._limit // _RESERVE
        if full and not self.held:
            self._evict()
        self._sweep(max(_NEW_AT_LEAST, sum(table.in_memory for table in self._tables) - self._records))

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
        self._sweep(_NEW_BY_TICK)

    def ticks_at(self, time: float) -> bool:
        """Whether `tick` does something at this time."""
        if not self.bound.ttl_s:
            return False
        return not self._times or time >= self._times[-1][0] + self.bound.ttl_s / _TICKS

    def clock(self) -> Clock:
        """A copy."""
        clock = self.uses.clock
        times = [number for time, level in self._times for number in (time, level)]
        return [clock[NOW].item(), *clock[FLOORS:].tolist(), *times]

    def restore(self, clocks: Sequence[Clock]) -> None:
        """Continue from the clocks of one or more budgets, whose rows are loaded after this."""
        floors = np.array([clock[1 : 1 + PARTS] for clock in clocks]).min(0)
        pass_until(self.uses, max(clock[0] for clock in clocks))
        self.uses.clock[FLOORS:] = floors
        times = clocks[0][1 + PARTS :]
        self._times = deque((time, int(level)) for time, level in zip(times[::2], times[1::2], strict=True))

    def _sweep(self, new: int) -> None:
        records, removed = _SWEPT_BY_ROW * new, _REMOVED_BY_ROW * new
        for table in self._tables:
            looked, gone = table.sweep(records, removed)
            records, removed = records - looked, removed - gone
        self._records = sum(table.in_memory for table in self._tables)

    def _evict(self) -> None:
        """Those with the lowest stamps, in groups of a level and a part."""
        clock = self.uses.clock
        costs = self._by_level().reshape(-1)
        surplus = clock[TOTAL] - (self._limit - self._limit // _FREED)
        level, part = divmod(int(np.searchsorted(costs.cumsum(), surplus)), PARTS)
        levels = np.full(PARTS, int(clock[LEVEL]) - LEVELS_BELOW + level)
        levels[: part + 1] += 1
        self._raise_floors(levels)

    def _raise_floors(self, levels: NDArray[np.int64]) -> None:
        """Evict the rows of each part that are below this level of it."""
        clock, cells = self.uses
        oldest = int(clock[LEVEL]) - LEVELS_BELOW
        costs = self._by_level()
        evicted = np.arange(LEVELS)[:, None] + oldest < levels
        clock[TOTAL] -= costs[evicted].sum()
        costs[evicted] = 0
        cells.reshape(LEVELS, PARTS)[self._places()] = costs
        np.maximum(clock[FLOORS:], levels / LEVELS_A_UNIT, out=clock[FLOORS:])
        pass_until(self.uses, clock[FLOORS:].max())  # a row that is used from now on is not below a floor
        for table in self._tables:
            table.begin_sweep()

    def _by_level(self) -> NDArray[np.int64]:
        """(LEVELS, PARTS): what rows cost, from the oldest level on; a copy."""
        return self.uses.cells.reshape(LEVELS, PARTS)[self._places()]

    def _places(self) -> NDArray[np.int64]:
        return (int(self.uses.clock[LEVEL]) - LEVELS_BELOW + np.arange(LEVELS)) % LEVELS
