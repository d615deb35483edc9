"""What happened in the tables of a run: one call for a whole request.

Distinct keys are estimated by HyperLogLog (Flajolet et al. 2007), of one key in 64: which those are says a
cheap hash of the key, so a key is always in the sample or never.
"""

from __future__ import annotations

import numpy as np

from trainers.kernels.compiled import Flags, Keys, Mask, compiled
from trainers.ps.kernels.index import finalize

(
    PULLS,
    PULLED_KEYS,
    MISSED_KEYS,
    PUSHES,
    PUSHED_KEYS,
    ADMITTED,
    REFUSED,
    EVICTED,
    REMOVED,
    COUNTERS,
) = range(10)
"""Counters of a table since its server started: requests of trainers and their keys (reads of an evaluation
do not count), keys of pulls that had no row, keys that an entry filter then admitted or refused, rows that
a budget evicted, and rows that a shrink removed.
"""


class TableCounts:
    """The counters of one table. `row` (COUNTERS,) may be a part of an array in which a run counts requests
    for all its tables.
    """

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


REGISTERS, SAMPLED = 512, 64
"""Of a table, few enough to stay in a cache; one key in so many is looked at."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio
_SALT = np.uint64(0xD1B54A32D192ED03)


@compiled
def count_pulls(counts: Keys, seen: Flags, starts: Keys, keys: Keys) -> None:
    """A pull of keys [starts[t], starts[t + 1]) of each table t. `counts` is (tables, COUNTERS), `seen`
    (tables, REGISTERS).
    """
    for table in range(len(starts) - 1):
        start, stop = starts[table], starts[table + 1]
        if start == stop:
            continue
        counts[table, PULLS] += 1
        counts[table, PULLED_KEYS] += stop - start
        registers, words = seen[table], keys[start:stop].view(np.uint64)
        for i in range(len(words)):
            key = words[i]
            if (key * _SPREAD) >> np.uint64(58) == np.uint64(0):
                mixed = finalize(key ^ _SALT)  # another hash than that by which servers share keys
                place = np.int64(mixed >> np.uint64(55))
                rank = np.uint8(1)
                while not mixed & np.uint64(1) and rank < np.uint8(53):
                    mixed >>= np.uint64(1)
                    rank += np.uint8(1)
                registers[place] = max(registers[place], rank)


@compiled
def count_pushes(counts: Keys, starts: Keys) -> None:
    """The same of a push."""
    for table in range(len(starts) - 1):
        keys = starts[table + 1] - starts[table]
        if keys:
            counts[table, PUSHES] += 1
            counts[table, PUSHED_KEYS] += keys
