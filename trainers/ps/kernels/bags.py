"""Sums and means of rows over bags of ids, as in torch's embedding_bag, with their gradients. One call
handles the features of a group of tables, or the single feature of an EmbeddingBag.

`bounds` gives the limits of the bags of all features. Bag b of n bags of feature f has the ids at positions
[bounds[k + b], bounds[k + b + 1]), where k is n times features[f, KEY]. The id at position p needs the row
places[p - features[f, SHIFT]] of its table, whose rows start at features[f, FIRST] of `moved`, which gives
the position of the row. features[f, SKIPPED] is the place of ids that belong to no bag, or -1. The result is
in the columns from features[f, COLUMN] on. With features[f, MEAN], a bag gets the mean of its rows instead of
the sum. `weights` has one weight per position, or is empty.
"""

from __future__ import annotations

import numpy as np

from trainers.kernels.compiled import Floats, Keys, compiled

KEY, SHIFT, FIRST, SKIPPED, COLUMN, MEAN = range(6)
"""The columns of `features`, (features, 6) int64."""


@compiled
def find_bounds(given: Keys, lengths: bool, out: Keys) -> bool:
    """Write the limits of bags, given their lengths or the limits themselves. Return True if they ascend from
    0.
    """
    total, good = np.int64(0), True
    out[0] = 0
    for place in range(len(given)):
        value = given[place] + total if lengths else given[place]
        good = good and value >= total and (place > 0 or lengths or value == 0)
        out[place + lengths] = total = value
    return bool(good)


@compiled
def are_bounds(given: Keys, lengths: bool, bounds: Keys) -> bool:
    """Return True if `find_bounds` would write these limits."""
    for place in range(len(given)):
        if given[place] != (bounds[place + 1] - bounds[place] if lengths else bounds[place]):
            return False
    return len(bounds) == len(given) + lengths


@compiled
def pool_bags(
    rows: Floats, places: Keys, moved: Keys, features: Keys, bounds: Keys, weights: Floats, out: Floats
) -> None:
    """Write the sum or the mean of each bag to its row of `out`, (bags, columns) float32."""
    width, bags = rows.shape[1], len(out)
    for feature in features:
        first, skipped, shift, key = feature[FIRST], feature[SKIPPED], feature[SHIFT], feature[KEY] * bags
        column, mean = feature[COLUMN], feature[MEAN] != 0
        for bag in range(bags):
            target, found = out[bag, column : column + width], np.float32(0)
            for position in range(bounds[key + bag], bounds[key + bag + 1]):
                place = places[position - shift]
                if place == skipped:
                    continue
                source = rows[moved[first + place]]
                weight = weights[position] if len(weights) else np.float32(1)
                if found == np.float32(0):
                    for i in range(width):
                        target[i] = weight * source[i]
                else:
                    for i in range(width):
                        target[i] += weight * source[i]
                found += np.float32(1)
            if found == np.float32(0):
                target[:] = np.float32(0)
            elif mean:
                target /= found


@compiled
def scatter_bags(
    grads: Floats, places: Keys, moved: Keys, features: Keys, bounds: Keys, weights: Floats, out: Floats
) -> None:
    """Add gradients to the rows of `out`, given the gradients of the bags, (bags, columns) float32."""
    width, bags = out.shape[1], len(grads)
    for feature in features:
        first, skipped, shift, key = feature[FIRST], feature[SKIPPED], feature[SHIFT], feature[KEY] * bags
        column, mean = feature[COLUMN], feature[MEAN] != 0
        for bag in range(bags):
            source, begin, end = grads[bag, column : column + width], bounds[key + bag], bounds[key + bag + 1]
            factor = np.float32(1)
            if mean and end > begin + 1:
                found = np.float32(0)
                for position in range(begin, end):
                    found += np.float32(places[position - shift] != skipped)
                if found > np.float32(1):
                    factor /= found
            for position in range(begin, end):
                place = places[position - shift]
                if place == skipped:
                    continue
                target = out[moved[first + place]]
                if len(weights):
                    factor = weights[position]
                for i in range(width):
                    target[i] += factor * source[i]


@compiled
def weigh_bags(
    grads: Floats, rows: Floats, places: Keys, moved: Keys, features: Keys, bounds: Keys, out: Floats
) -> None:
    """Add the gradient of the weight at each position to `out`. Several features may have the same ids."""
    width, bags = rows.shape[1], len(grads)
    for feature in features:
        first, skipped, shift, key = feature[FIRST], feature[SKIPPED], feature[SHIFT], feature[KEY] * bags
        for bag in range(bags):
            source = grads[bag, feature[COLUMN] : feature[COLUMN] + width]
            for position in range(bounds[key + bag], bounds[key + bag + 1]):
                place = places[position - shift]
                if place != skipped:
                    row, total = rows[moved[first + place]], np.float32(0)
                    for i in range(width):
                        total += source[i] * row[i]
                    out[position] += total
