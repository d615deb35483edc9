"""Revise: new values for rows that are there; their optimizer state stays."""

from __future__ import annotations

from trainers.ps.kernels.compiled import Floats, Keys, compiled
from trainers.ps.kernels.rows import DIM, STRIDE, Rows


@compiled
def revise(rows: Rows, slots: Keys, values: Floats) -> None:
    """The values of slots[i] = values[i]. For tables of which nobody makes cuts: no image is kept."""
    stride, dim = rows.numbers[STRIDE], rows.numbers[DIM]
    for i in range(len(slots)):
        start = slots[i] * stride * 2 + 2
        target, source = rows.floats[start : start + dim], values[i]
        for column in range(dim):
            target[column] = source[column]
