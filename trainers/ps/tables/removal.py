"""Remove rows from a storage in slices between requests, because a day passes or because a budget evicted
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from trainers.kernels.compiled import Floats, Keys
from trainers.ps.kernels.eviction import (
    ANCIENT,
    EVICTED,
    FLOORS,
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

NoteRemoved = Callable[[Keys], None]
"""A function that receives the keys of removed records."""


class PassingDay:
    """A day that passes in the rows of a storage, some at a time.

    A row that is used before its turn has its day first. The rows are therefore always as if the whole day
    had passed at the start. A cut must not be open until `over` is true. `removed` counts the rows removed so
    far.
    """

    def __init__(self, storage: Storage, policy: Floats, note_removed: NoteRemoved) -> None:
        self._storage, self._policy, self._note_removed = storage, policy, note_removed
        self._next = self.removed = 0
        storage.rows.numbers[DAY] ^= EVEN_DAY

    @property
    def over(self) -> bool:
        return self._next >= len(self._storage)

    def pass_some(self, rows: int) -> None:
        """Let the day pass for so many more rows. At the end, return memory to the system."""
        storage = self._storage
        removed_keys = np.empty(min(rows, len(storage)), np.int64)
        self._next, removed, count = shrink(
            *storage.arrays, storage.uses, self._policy, self._next, len(removed_keys), removed_keys
        )
        self.removed += removed
        self._note_removed(removed_keys[:count])
        if self.over:
            storage.give_back()

    def pass_for(self, keys: Keys) -> None:
        """Let the day pass for the rows of these keys, which are about to be used."""
        storage, removed_keys = self._storage, np.empty(len(keys), np.int64)
        count = shrink_keys(*storage.arrays, storage.uses, self._policy, keys, removed_keys)
        self.removed += count
        self._note_removed(removed_keys[:count])

    def pass_for_last(self, rows: int) -> None:
        """Let the day pass for so many last rows, which are about to move to the places of other rows."""
        before = -1
        while before != self.removed:  # each removal makes other rows the last ones
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
    """The rows of a storage in a budget, which evicts them. `day` is the day that passes in them, if any.

    Rows are not swept meanwhile, because rows without their day would take the places of other rows.
    """

    def __init__(self, storage: Storage, budget: Budget, note_removed: NoteRemoved) -> None:
        self.budget = budget
        self.day: PassingDay | None = None
        self._storage, self._note_removed = storage, note_removed
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
        """Start a sweep. See Evictable."""
        self._sweep_again = self._unswept > 0
        self._unswept = self._unswept or len(self)
        return self._unswept + (len(self) if self._sweep_again else 0)

    def sweep(self, work: int) -> int:
        """Continue a sweep. See Evictable."""
        if not self._unswept or work <= 0 or self.day is not None:
            return 0
        before = min(self._unswept, len(self))
        self._unswept, count = self._leave(before, work)
        done = before - self._unswept + REMOVAL * count
        if not self._unswept and self._sweep_again:
            self._unswept, self._sweep_again = len(self), False
        return done

    def restart(self, units: float) -> None:
        """Restart the clock. See Evictable. All rows count as changed, because an incremental save must not
        follow stamps of the earlier clock.
        """
        for records in all_will_change(self._storage):
            stamps = records[:, -1].copy()
            evicted = np.empty(len(stamps), np.bool_)
            find_evicted(keys_of(records), stamps, self.budget.uses.clock[FLOORS:], evicted)
            least = np.where(evicted, EVICTED, ANCIENT)
            records[:, -1] = np.where(stamps > 0, np.maximum(np.float64(stamps) - units, least), 0)

    def _leave(self, before: int, work: int) -> tuple[int, int]:
        """Remove evicted rows. See the kernel `sweep`."""
        storage, removed_keys = self._storage, np.empty(min(work // REMOVAL + 1, before), np.int64)
        then, count = sweep(*storage.arrays, storage.uses, before, work, removed_keys)
        self._note_removed(removed_keys[:count])
        return then, count

    def before_use(self, keys: Keys) -> None:
        """Remove the records of evicted rows among these keys."""
        if not self._unswept:
            return
        if self.day is not None:
            self.day.pass_for_last(len(keys))
        storage, removed_keys = self._storage, np.empty(len(keys), np.int64)
        count = remove_evicted(*storage.arrays, storage.uses, keys, removed_keys)
        self._note_removed(removed_keys[:count])

    def count_uses(self, keys: Keys, stats: Floats = _NO_STATS) -> None:
        """Count uses of the rows of these keys."""
        self._count(keys, stats)
        self.budget.settle()

    def _count(self, keys: Keys, stats: Floats = _NO_STATS) -> None:
        count_uses(*self._storage.arrays, self._storage.uses, keys, stats)

    def uncount(self, keys: Keys) -> None:
        """Stop counting the rows of these keys, which are about to be overwritten or removed."""
        uncount_keys(*self._storage.arrays, self._storage.uses, keys)

    def count_loaded(self, slots: Keys) -> None:
        """Count rows that were loaded with their stamps."""
        count_loaded(self._storage.rows, self._storage.uses, slots, self.budget.passed)
