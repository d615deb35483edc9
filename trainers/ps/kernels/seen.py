"""Seen: statistics of rows, counts of candidates, and the removal of rows that are not worth their memory."""

from __future__ import annotations

import numpy as np

from trainers.ps.kernels.compiled import Floats, Keys, Mask, Scalar, compiled
from trainers.ps.kernels.index import BLOCK, Index, home, remove_entry, search, where
from trainers.ps.kernels.mixing import finalize
from trainers.ps.kernels.rows import CHANGED, COUNT, DIM, STATES, STRIDE, Rows, locate, will_change


@compiled
def add_seen(index: Index, rows: Rows, keys: Keys, stats: Floats) -> None:
    """Add shows and clicks (n, 2) to the rows of keys, where there are any, and note that they were seen
    today. `stats` (0, 2): only the latter.
    """
    numbers = rows.numbers
    offset = 2 + numbers[DIM] + numbers[STATES]
    bases, tags, slots = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.int64)
    for start in range(0, len(keys), BLOCK):
        stop = min(start + BLOCK, len(keys))
        locate(index, rows, keys, start, stop, numbers[STRIDE], bases, tags, slots)
        will_change(rows, slots, stop - start)
        for i in range(stop - start):
            if slots[i] < 0:
                continue
            place = slots[i] * numbers[STRIDE] * 2 + offset
            if len(stats):
                rows.floats[place] += stats[start + i, 0]
                rows.floats[place + 1] += stats[start + i, 1]
            rows.floats[place + 2] = np.float32(0)


@compiled
def count_up(rows: Rows, slots: Keys, needed: Scalar, admitted: Mask) -> None:
    """Count the candidates in `slots` (the first value of a record is its count); admitted[i] = whether it
    has been seen often enough.
    """
    for i in range(len(slots)):
        place = slots[i] * rows.numbers[STRIDE] * 2 + 2
        rows.floats[place] += np.float32(1)
        admitted[i] = rows.floats[place] >= needed


@compiled
def drawn(keys: Keys, seed: Scalar, chance: Scalar, admitted: Mask) -> None:
    """admitted[i] = whether keys[i] is among the share `chance` of all keys that the seed draws."""
    start = finalize(~seed)
    for i in range(len(keys)):
        word = finalize(finalize(np.uint64(keys[i]) ^ start))
        admitted[i] = np.float64(np.int64(word >> np.uint64(11))) * 2.0**-53 < chance


@compiled
def position_of(index: Index, rows: Rows, key: Scalar) -> Scalar:
    """The position of the key's entry, or of the empty one where it belongs."""
    base, tag = where(index, key)
    return search(index.entries, rows.words, rows.numbers[STRIDE], key, base, tag, home(tag))


@compiled
def remove_slot(index: Index, rows: Rows, slot: Scalar) -> None:
    """Remove a row; the last row takes its place."""
    numbers, words = rows.numbers, rows.words
    stride, last = numbers[STRIDE], numbers[COUNT] - 1
    remove_entry(index, position_of(index, rows, words[slot * stride]))
    if slot != last:
        position = position_of(index, rows, words[last * stride])
        index.entries[position] += np.uint64(slot) - np.uint64(last)
        for word in range(stride):
            words[slot * stride + word] = words[last * stride + word]
        rows.flags[slot] = rows.flags[last]
    numbers[COUNT] = last


@compiled
def remove_keys(index: Index, rows: Rows, keys: Keys) -> None:
    """Remove the rows of keys, where there are any."""
    for key in keys:
        entry = index.entries[position_of(index, rows, key)]
        if entry != np.uint64(0):
            remove_slot(index, rows, np.int64(entry & np.uint64(0xFFFFFFFF)) - 1)


@compiled
def shrink(index: Index, rows: Rows, policy: Floats) -> int:
    """One day passes, and rows go; returns how many. policy: decay, coefficients of show - click and of
    click, the least score, the most unseen days. Not while there is a cut.
    """
    decay, shown, clicked, least, oldest = policy[0], policy[1], policy[2], policy[3], policy[4]
    numbers, floats, flags = rows.numbers, rows.floats, rows.flags
    offset = 2 + numbers[DIM] + numbers[STATES]
    before, slot = numbers[COUNT], np.int64(0)  # numba would compile what it calls for a literal 0, too
    while slot < numbers[COUNT]:
        place = slot * numbers[STRIDE] * 2 + offset
        show = floats[place] * decay
        click = floats[place + 1] * decay
        days = floats[place + 2] + np.float32(1)
        if shown * (show - click) + clicked * click < least or days > oldest:
            remove_slot(index, rows, slot)
            continue
        flags[slot] |= np.uint8(CHANGED)  # no cut is open
        floats[place], floats[place + 1], floats[place + 2] = show, click, days
        slot += 1
    return int(before - numbers[COUNT])
