"""Kernels that put examples together. They know arrays only and run without the GIL; `columns` and `exchange`
give them their meaning.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainers.ps.kernels.compiled import compiled

Int64s = NDArray[np.int64]


@compiled
def take_rows(source: NDArray[Any], rows: Int64s, out: NDArray[Any]) -> None:
    """out[i] = source[rows[i]]; both (n, width)."""
    width = source.shape[1]
    for i in range(len(rows)):
        row = rows[i]
        for j in range(width):
            out[i, j] = source[row, j]


@compiled
def bag_offsets(counts: NDArray[np.int32], columns: Int64s, rows: Int64s, out: Int64s) -> None:
    """Where each bag begins when the slots stand one after the other: out (slots * n + 1,), from 0."""
    total = 0
    at = 0
    for slot in range(len(columns)):
        for i in range(len(rows)):
            out[at] = total
            at += 1
            total += counts[rows[i], columns[slot]]
    out[at] = total


@compiled
def take_bags(
    counts: NDArray[np.int32],
    columns: Int64s,
    rows: Int64s,
    values: NDArray[Any],
    starts: Int64s,
    which: int,
    offsets: Int64s,
    out: NDArray[Any],
) -> None:
    """The values of these rows' bags from example by example to slot by slot; `offsets` are bag_offsets'.
    starts[:, which] (all rows + 1,) is where each example's values begin.
    """
    for i in range(len(rows)):
        at = starts[rows[i], which]
        for slot in range(len(columns)):
            to = offsets[slot * len(rows) + i]
            for j in range(counts[rows[i], columns[slot]]):
                out[to + j] = values[at + j]
            at += counts[rows[i], columns[slot]]


@compiled
def take_values(values: NDArray[Any], starts: Int64s, which: int, rows: Int64s, out: NDArray[Any]) -> None:
    """The values of these examples, one after the other; starts[:, which] is where each example's begin."""
    to = 0
    for i in range(len(rows)):
        for at in range(starts[rows[i], which], starts[rows[i] + 1, which]):
            out[to] = values[at]
            to += 1
