"""Count the requests and keys of the tables of a run, in one call for a whole request.

HyperLogLog (Flajolet et al. 2007) estimates the number of distinct keys from one key in 64. A cheap hash of
the key makes this choice, so a key is either always in the sample or never.
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
"""Counters of a table since its server started. They count requests of trainers and their keys, without reads
of an evaluation. They also count keys of pulls without a row, keys that an entry filter then admitted or
refused, rows that a budget evicted, and rows that a shrink removed.
"""


class TableCounts:
    """The counters of one table.

    `row` (COUNTERS,) int64 may be part of an array in which a run counts requests for all its tables.
    """

    def __init__(self) -> None:
        self.row = np.zeros(COUNTERS, np.int64)

    def missed(self, keys: int) -> None:
        """Count the keys without a row in a pull."""
        self.row[MISSED_KEYS] += keys

    def filtered(self, admitted: Mask) -> None:
        """Count the keys that an entry filter admitted and refused."""
        count = np.count_nonzero(admitted)
        self.row[ADMITTED] += count
        self.row[REFUSED] += len(admitted) - count

    def evicted(self, keys: Keys) -> None:
        self.row[EVICTED] += len(keys)

    def removed(self, keys: Keys) -> None:
        self.row[REMOVED] += len(keys)


REGISTERS, SAMPLED = 512, 64
"""REGISTERS is the number of registers of a table, few enough to stay in a cache. One key in SAMPLED is
examined.
"""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio
_SALT = np.uint64(0xD1B54A32D192ED03)


@compiled
def count_pulls(counts: Keys, seen: Flags, starts: Keys, keys: Keys) -> None:
    """Count a pull of the keys [starts[t], starts[t + 1]) of each table t.

    `counts` is (tables, COUNTERS) int64, and `seen` is (tables, REGISTERS) uint8.
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
                mixed = finalize(key ^ _SALT)  # not the hash that assigns keys to servers
                place = np.int64(mixed >> np.uint64(55))
                rank = np.uint8(1)
                while not mixed & np.uint64(1) and rank < np.uint8(53):
                    mixed >>= np.uint64(1)
                    rank += np.uint8(1)
                registers[place] = max(registers[place], rank)


@compiled
def count_pushes(counts: Keys, starts: Keys) -> None:
    """Count a push in the same way."""
    for table in range(len(starts) - 1):
        keys = starts[table + 1] - starts[table]
        if keys:
            counts[table, PUSHES] += 1
            counts[table, PUSHED_KEYS] += keys
