"""Modes: what a save keeps, by the numbers of Paddle's `save_persistables(mode=...)`. Ground: imports nothing.

Paddle's numbers are those of its accessors (`CtrCommonAccessor::Save` in
paddle/fluid/distributed/ps/table/ctr_accessor.cc). How they compare:

| mode | Paddle | here |
|---|---|---|
| 0 | every row, with optimizer state and statistics | the same |
| 1 | rows whose score is over base_threshold, whose score since the last save is over delta_threshold and that were seen within delta_keep_days; values for serving | every row changed since the last save of mode 0, 1 or 3, with state and statistics: mode 0 and its deltas load as one save. No thresholds |
| 2 | rows over base_threshold seen within delta_keep_days; values for serving | every row's values, without state and statistics. No thresholds: `shrink` removes rows |
| 3 | every row; after it each row's unseen days grow by one | every row; the caller asks the tables to age the statistics |

A delta knows rows that came or changed, not rows that `shrink` removed: after a shrink save with mode 0 or 3.
"""  # noqa: E501  # a table row is one line

from __future__ import annotations

from enum import IntEnum


class SaveMode(IntEnum):
    """Paddle's numbers."""

    ALL = 0
    DELTA = 1
    VALUES = 2
    AGED = 3
