"""Counters of one sparse table since its server started: see `kernels.counts`."""

from __future__ import annotations

import numpy as np

from trainers.kernels.compiled import Keys, Mask
from trainers.ps.kernels.counts import (
    ADMITTED,
    COUNTERS,
    EVICTED,
    MISSED_KEYS,
    REFUSED,
    REMOVED,
)


class TableCounts:
    """`row` (COUNTERS,) may be a part of an array in which a run counts requests for all its tables."""

    def __init__(self) -> None:
        self.row = np.zeros(COUNTERS, np.int64)

    def missed(self, keys: int) -> None:
        """Of a pull."""
        self.row[MISSED_KEYS] += keys

    def filtered(self, admitted: Mask) -> None:
        """By an entry filter."""
        count = np.count_nonzero(admitted)
        self.row[ADMITTED] += count
        self.row[REFUSED] += len(admitted) - count

    def evicted(self, keys: Keys) -> None:
        self.row[EVICTED] += len(keys)

    def removed(self, keys: Keys) -> None:
        self.row[REMOVED] += len(keys)
