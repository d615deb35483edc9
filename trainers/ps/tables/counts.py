"""Counters of one sparse table since its server started: see `kernels.counts`."""

from __future__ import annotations

import numpy as np

from trainers.kernels.compiled import Keys, Mask
from trainers.ps.kernels.counts import (
    ADMITTED,
    COUNTERS,
    EVICTED,
    MISSED_KEYS,
    PULLED_KEYS,
    PULLS,
    PUSHED_KEYS,
    PUSHES,
    REFUSED,
    REMOVED,
)


class TableCounts:
    """`row` (COUNTERS,) may be a part of a larger array, in which kernels count for several tables."""

    def __init__(self) -> None:
        self.row = np.zeros(COUNTERS, np.int64)

    def pulled(self, keys: int, missing: int) -> None:
        row = self.row
        row[PULLS] += keys > 0
        row[PULLED_KEYS] += keys
        row[MISSED_KEYS] += missing

    def pushed(self, keys: int) -> None:
        self.row[PUSHES] += keys > 0
        self.row[PUSHED_KEYS] += keys

    def filtered(self, admitted: Mask) -> None:
        """By an entry filter."""
        count = np.count_nonzero(admitted)
        self.row[ADMITTED] += count
        self.row[REFUSED] += len(admitted) - count

    def evicted(self, keys: Keys) -> None:
        self.row[EVICTED] += len(keys)

    def removed(self, keys: Keys) -> None:
        self.row[REMOVED] += len(keys)
