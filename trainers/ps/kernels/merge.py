"""Merge: rows of equal keys become their sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trainers.ps.kernels.compiled import Floats, Keys, Scalar, compiled
from trainers.ps.kernels.unique import unique


@compiled
def add_rows(place: Keys, rows: Floats, seen: Scalar, out: Floats) -> int:
    """out[place[i]] += rows[i] in the order of i; the first row of a place (a place >= seen) is copied.
    Returns how many places have been seen.
    """
    width = rows.shape[1]
    for position in range(len(place)):
        total, row = out[place[position]], rows[position]
        if place[position] >= seen:  # places are numbered by first appearance
            seen = place[position] + 1
            for column in range(width):
                total[column] = row[column]
        else:
            for column in range(width):
                total[column] += row[column]
    return int(seen)


def merge_rows(pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the rows of equal keys, in the order given: pieces of (keys (n,) int64, rows (n, width) float32)
    -> keys (u,) in the order of their first appearance, and (u, width) float32.

    Keys may repeat within a piece too. There must be at least one piece.
    """
    keys, place, _ = unique(torch.cat([keys for keys, _ in pieces]))
    out = np.empty((len(keys), pieces[0][1].shape[1]), np.float32)
    places, start, seen = place.numpy(), 0, 0
    for piece_keys, rows in pieces:
        stop = start + len(piece_keys)
        seen = add_rows(places[start:stop], rows.contiguous().numpy(), seen, out)
        start = stop
    return keys, torch.from_numpy(out)
