"""Sums and means of rows over bags of ids, as in torch's embedding_bag, with their gradients.

The ids of bag b are at [ends[b - 1], ends[b]). `places` gives the row that each id needs, and `moved` gives
the position of that row. `skipped` is the place of ids that belong to no bag, or -1. `weights` has one weight
per id, or is empty. With `mean`, a bag gets the mean of its rows instead of the sum.
"""

from __future__ import annotations

import numpy as np

from trainers.kernels.compiled import Floats, Keys, compiled


@compiled
def pool_bags(
    rows: Floats,
    places: Keys,
    moved: Keys,
    skipped: int,
    ends: Keys,
    weights: Floats,
    mean: bool,
    out: Floats,
) -> None:
    """Add up the rows of each bag in `out`, (bags, width) float32, which must contain zeros."""
    begin = np.int64(0)
    for bag in range(len(ends)):
        target, found = out[bag], np.float32(0)
        for position in range(begin, ends[bag]):
            if places[position] == skipped:
                continue
            source = rows[moved[places[position]]]
            found += np.float32(1)
            if len(weights):
                weight = weights[position]
                for column in range(len(target)):
                    target[column] += weight * source[column]
            else:
                for column in range(len(target)):
                    target[column] += source[column]
        if mean and found > np.float32(1):
            for column in range(len(target)):
                target[column] /= found
        begin = ends[bag]


@compiled
def scatter_bags(
    grads: Floats,
    places: Keys,
    moved: Keys,
    skipped: int,
    ends: Keys,
    weights: Floats,
    mean: bool,
    out: Floats,
) -> None:
    """Add gradients to the rows of `out`, given the gradients of the bags, (bags, width) float32."""
    begin = np.int64(0)
    for bag in range(len(ends)):
        source, found = grads[bag], np.float32(0)
        for position in range(begin, ends[bag]):
            found += np.float32(places[position] != skipped)
        share = np.float32(1) / found if mean and found > np.float32(1) else np.float32(1)
        for position in range(begin, ends[bag]):
            if places[position] == skipped:
                continue
            factor = weights[position] if len(weights) else share
            target = out[moved[places[position]]]
            for column in range(len(source)):
                target[column] += factor * source[column]
        begin = ends[bag]


@compiled
def weigh_bags(
    grads: Floats, rows: Floats, places: Keys, moved: Keys, skipped: int, ends: Keys, out: Floats
) -> None:
    """Write the gradient of the weight of id i to out[i]. `out` must contain zeros."""
    begin = np.int64(0)
    for bag in range(len(ends)):
        for position in range(begin, ends[bag]):
            if places[position] != skipped:
                row, total = rows[moved[places[position]]], np.float32(0)
                for column in range(len(row)):
                    total += grads[bag, column] * row[column]
                out[position] = total
        begin = ends[bag]
