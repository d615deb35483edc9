"""Reading: rows of a cut, copied while another thread changes them."""

from __future__ import annotations

import numpy as np

from trainers.ps.kernels.compiled import Flags, Floats, Keys, Scalar, compiled
from trainers.ps.kernels.memory import fence
from trainers.ps.kernels.rows import CHANGED, DIM, SINCE_CUT, STRIDE, Rows


@compiled
def copy_record(
    floats: Floats, place: Scalar, dim: Scalar, to: Scalar, values: Floats, state: Floats, statistics: Floats
) -> None:
    """What follows the key of a record, from `place` on."""
    source, target = floats[place : place + dim], values[to]  # slices, so that loops become vectors
    for column in range(dim):
        target[column] = source[column]
    for which in range(len(state)):
        place += dim
        source, target = floats[place : place + dim], state[which, to]
        for column in range(dim):
            target[column] = source[column]
    place += dim
    for column in range(statistics.shape[1]):
        statistics[to, column] = floats[place + column]


@compiled
def read(
    rows: Rows,
    start: Scalar,
    stop: Scalar,
    changed_only: Scalar,
    keys: Keys,
    values: Floats,
    state: Floats,
    statistics: Floats,
) -> int:
    """Rows [start, stop) as of the cut; returns how many of them were wanted. values (n, dim), state
    (states, n, dim), statistics (n, 3 or 0).

    Without a lock: a row is copied first, and then its flag is looked at. A writer keeps the image, sets
    the flag and only then changes the row; so where the flag is not set, the copy is of before.
    """
    words, floats, flags = rows.words, rows.floats, rows.flags
    image_of, image_floats = rows.image_of, rows.images.view(np.float32)
    stride, dim = rows.numbers[STRIDE], rows.numbers[DIM]
    found = np.int64(0)  # numba would compile what it calls for a literal 0, too
    for slot in range(start, stop):
        if changed_only and not flags[slot] & np.uint8(CHANGED):
            continue
        keys[found] = words[slot * stride]
        copy_record(floats, slot * stride * 2 + 2, dim, found, values, state, statistics)
        fence()
        if flags[slot] & np.uint8(SINCE_CUT):
            fence()
            place = np.int64(image_of[slot]) * stride * 2 + 2
            copy_record(image_floats, place, dim, found, values, state, statistics)
        found += 1
    return int(found)


@compiled
def settle(flags: Flags, saved: Scalar) -> None:
    """After a cut: what has changed since then is what has changed; and, if it was not saved, what had
    before.
    """
    for slot in range(len(flags)):
        later = flags[slot] >> np.uint8(1)
        flags[slot] = later if saved else (flags[slot] | later) & np.uint8(CHANGED)
