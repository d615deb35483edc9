"""What happened in the tables of a run: one call for a whole request."""

from __future__ import annotations

from trainers.kernels.compiled import Keys, compiled

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


@compiled
def count_pulls(counts: Keys, starts: Keys, missing: Keys) -> None:
    """A pull of [starts[t], starts[t + 1]) keys of each table t, of which missing[t] had no row. `counts` is
    (tables, COUNTERS).
    """
    for table in range(len(missing)):
        keys = starts[table + 1] - starts[table]
        if keys:
            counts[table, PULLS] += 1
            counts[table, PULLED_KEYS] += keys
            counts[table, MISSED_KEYS] += missing[table]


@compiled
def count_pushes(counts: Keys, starts: Keys) -> None:
    """The same of a push."""
    for table in range(len(starts) - 1):
        keys = starts[table + 1] - starts[table]
        if keys:
            counts[table, PUSHES] += 1
            counts[table, PUSHED_KEYS] += keys
