"""How rows leave a storage in slices between requests: a day passes in them, or a budget has evicted them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from trainers.kernels.compiled import Floats, Keys
from trainers.ps.kernels.eviction import (
    ANCIENT,
    FLOORS,
    GONE,
    REMOVAL,
    count_loaded,
    count_uses,
    find_evicted,
    remove_evicted,
    shrink,
    shrink_keys,
    sweep,
    uncount_keys,
)
from trainers.ps.kernels.rows import COST, DAY, EVEN_DAY, will_change
from trainers.ps.tables.budget import ROW_BYTES, Budget
from trainers.ps.tables.storage import Storage, keys_of

Gone = Callable[[Keys], None]
"""Is told the keys whose records were removed."""


class PassingDay:
    """A day passes in the rows of a storage, some at a time. A row that is used before its turn has its day
    first: so the rows are at any time as if the whole day had passed when this was made. Then no cut may be
    open before `over`. `removed`: how many rows so far.
    """

    def __init__(self, storage: Storage, policy: Floats, gone: Gone) -> None:
        self._storage, self._policy, self._gone = storage, policy, gone
        self._next = self.removed = 0
        storage.rows.numbers[DAY] ^= EVEN_DAY

    @property
    def over(self) -> bool:
        return self._next >= len(self._storage)

    def pass_some(self, rows: int) -> None:
        """For so many rows more; at the end, memory is returned to the system."""
        storage = self._storage
        gone = np.empty(min(rows, len(storage)), np.int64)
        self._next, removed, count = shrink(
            *storage.arrays, storage.uses, self._policy, self._next, len(gone), gone
        )
        self.removed += removed
        self._gone(gone[:count])
        if self.over:
            storage.give_back()

    def pass_for(self, keys: Keys) -> None:
        """For the rows of these keys, which are about to be used."""
        storage, gone = self._storage, np.empty(len(keys), np.int64)
        count = shrink_keys(*storage.arrays, storage.uses, self._policy, keys, gone)
        self.removed += count
        self._gone(gone[:count])

    def pass_for_last(self, rows: int) -> None:
        """For so many last rows, which are about to take the places of others."""
        before = -1
        while before != self.removed:  # others are the last then
            before, count = self.removed, len(self._storage)
            self.pass_for(self._storage.keys(max(0, count - rows), count))


_NO_STATS = np.empty((0, 2), np.float32)
_AT_ONCE = 1 << 14


def all_will_change(storage: Storage) -> Iterator[Floats]:
    """Call `will_change` for all rows, some at a time, and yield their records."""
    for start in range(0, len(storage), _AT_ONCE):
        slots = np.arange(start, min(start + _AT_ONCE, len(storage)))
        will_change(storage.rows, slots, len(slots))
        yield storage.records(start, start + len(slots))


class BoundedRows:
    """The rows of a storage in a budget, which evicts them. `day`: the one that passes in them, if any. Then
    nothing is swept: rows that have not had it would take the places of others.
    """

    def __init__(self, storage: Storage, budget: Budget, gone: Gone) -> None:
        self.budget = budget
        self.day: PassingDay | None = None
        self._storage, self._gone = storage, gone
        self._unswept, self._sweep_again = 0, False
        cost = 4 * storage.stride + ROW_BYTES if budget.bound.bytes else 1
        storage.bound(budget.uses, cost, evicts=not budget.on_disk)
        budget.add(self)

    def __len__(self) -> int:
        return len(self._storage)

    @property
    def row_cost(self) -> int:
        """See Evictable."""
        return int(self._storage.rows.numbers[COST])

    def begin_sweep(self) -> int:
        """See Evictable."""
        self._sweep_again = self._unswept > 0
        self._unswept = self._unswept or len(self)
        return self._unswept + (len(self) if self._sweep_again else 0)

    def sweep(self, work: int) -> int:
        """See Evictable."""
        if not self._unswept or work <= 0 or self.day is not None:
            return 0
        before = min(self._unswept, len(self))
        self._unswept, count = self._leave(before, work)
        done = before - self._unswept + REMOVAL * count
        if not self._unswept and self._sweep_again:
            self._unswept, self._sweep_again = len(self), False
        return done

    def restart(self, units: float) -> None:
        """See Evictable. All rows count as changed: a delta must not follow stamps of the earlier clock."""
        for records in all_will_change(self._storage):
            stamps = records[:, -1].copy()
            evicted = np.empty(len(stamps), np.bool_)
            find_evicted(keys_of(records), stamps, self.budget.uses.clock[FLOORS:], evicted)
            least = np.where(evicted, GONE, ANCIENT)
            records[:, -1] = np.where(stamps > 0, np.maximum(np.float64(stamps) - units, least), 0)

    def _leave(self, before: int, work: int) -> tuple[int, int]:
        """See the kernel `sweep`."""
        storage, gone = self._storage, np.empty(min(work // REMOVAL + 1, before), np.int64)
        then, count = sweep(*storage.arrays, storage.uses, before, work, gone)
        self._gone(gone[:count])
        return then, count

    def before_use(self, keys: Keys) -> None:
        """Remove the records of those of these keys that have been evicted."""
        if not self._unswept:
            return
        if self.day is not None:
            self.day.pass_for_last(len(keys))
        storage, gone = self._storage, np.empty(len(keys), np.int64)
        count = remove_evicted(*storage.arrays, storage.uses, keys, gone)
        self._gone(gone[:count])

    def count_uses(self, keys: Keys, stats: Floats = _NO_STATS) -> None:
        """The rows of these keys were used."""
        self._count(keys, stats)
        self.budget.settle()

    def _count(self, keys: Keys, stats: Floats = _NO_STATS) -> None:
        count_uses(*self._storage.arrays, self._storage.uses, keys, stats)

    def uncount(self, keys: Keys) -> None:
        """The rows of these keys are about to be overwritten or removed."""
        uncount_keys(*self._storage.arrays, self._storage.uses, keys)

    def count_loaded(self, slots: Keys) -> None:
        """These were loaded with their stamps."""
        count_loaded(self._storage.rows, self._storage.uses, slots, self.budget.passed)
