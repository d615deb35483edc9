"""Rows: records of key, values, optimizer state and statistics in one block of memory, found by an index.

Record: key int64 | values float32 x dim | each state float32 x dim | show, click, unseen days float32, if
kept; a multiple of 8 bytes. Loops go in blocks: ask for the entries' cache lines, then for the records', then
work; so many reads of memory are under way at the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainers.ps.kernels.compiled import Floats, Keys, Scalar, Words, compiled
from trainers.ps.kernels.index import (
    BLOCK,
    ENOUGH,
    FULL,
    SEGMENT,
    Index,
    home,
    probe,
    search,
    slot_at,
    split,
    where,
)
from trainers.ps.kernels.initial import NOTHING, Fresh, fill_values
from trainers.ps.kernels.memory import fence, prefetch

COUNT, STRIDE, DIM, STATES, STATISTICS = 0, 1, 2, 3, 4
"""`Rows.numbers`: rows in use, 8-byte words a record, columns, state values a row, statistics a row."""

OPEN, CUT_ROWS, READ, TAKEN = 0, 1, 2, 3
"""`Rows.cut`: whether there is a cut, its rows, how many of them were read, how many images were taken."""

CHANGED, SINCE_CUT = 1, 2
"""`Rows.flags`: changed since it was last saved (or before the cut); changed since the cut was made."""

_LINE = 8  # words of a cache line
_AHEAD = 8  # lines of a record that are asked for; the processor guesses the rest


class Rows(NamedTuple):
    """The arrays of the rows of a table, and those of its cut (empty while there is none)."""

    words: NDArray[np.int64]  # the records
    floats: NDArray[np.float32]  # the same memory
    flags: NDArray[np.uint8]  # of each row
    numbers: NDArray[np.int64]
    images: NDArray[np.int64]  # records as they were at the cut
    image_of: NDArray[np.uint32]  # of each row that has one
    cut: NDArray[np.int64]


@compiled
def will_change(rows: Rows, slots: Keys, count: Scalar) -> None:
    """To be called before the rows in slots[:count] change (-1: none): notes that, and keeps them as they are
    if the cut may still want them. For many rows at once: a call that gets arrays costs more than a row.
    """
    words, flags, cut, stride = rows.words, rows.flags, rows.cut, rows.numbers[STRIDE]
    images, image_of = rows.images, rows.image_of
    for i in range(count):
        slot = slots[i]
        if slot < 0:
            continue
        if not cut[OPEN]:
            flags[slot] |= np.uint8(CHANGED)
        elif not flags[slot] & np.uint8(SINCE_CUT):
            if cut[READ] <= slot < cut[CUT_ROWS]:
                image = cut[TAKEN]
                target = images[image * stride : (image + 1) * stride]
                source = words[slot * stride : (slot + 1) * stride]
                for word in range(stride):
                    target[word] = source[word]
                image_of[slot] = np.uint32(image)
                cut[TAKEN] = image + 1
                fence()  # a reader that sees the flag must find the image
            flags[slot] |= np.uint8(SINCE_CUT)
            fence()  # a reader that sees any change of the row must see the flag


@compiled
def locate(
    index: Index,
    rows: Rows,
    keys: Keys,
    start: Scalar,
    stop: Scalar,
    used: Scalar,
    bases: Keys,
    tags: Words,
    slots: Keys,
) -> None:
    """slots[i] = the slot of keys[start + i], or -1. `used`: words of a record that will be used; all of them
    means that it may be changed. `bases`, `tags`: working space of BLOCK words.
    """
    entries, words, flags, stride = index.entries, rows.words, rows.flags, rows.numbers[STRIDE]
    asked, image_of = min(used, _LINE * _AHEAD), rows.image_of
    may_keep = used == stride and rows.cut[OPEN]
    for i in range(stop - start):
        base, tag = where(index, keys[start + i])
        bases[i], tags[i] = base, tag
        prefetch(entries, base + home(tag))
    for i in range(stop - start):
        place = probe(entries, bases[i], tags[i], home(tags[i]))
        slots[i] = slot = slot_at(entries, bases[i] + place)
        if slot >= 0:
            for word in range(0, asked, _LINE):
                prefetch(words, slot * stride + word)
            prefetch(words, slot * stride + used - 1)
            if used == stride:
                prefetch(flags, slot)
            if may_keep:
                prefetch(image_of, slot)
    for i in range(stop - start):
        slot = slots[i]
        if slot >= 0 and words[slot * stride] != keys[start + i]:  # another key with the same tag
            base, tag = bases[i], tags[i]
            position = search(entries, words, stride, keys[start + i], base, tag, home(tag))
            slots[i] = slot_at(entries, position)


@compiled
def pull(index: Index, rows: Rows, keys: Keys, out: Floats, missing: Keys) -> int:
    """out[i] = the values of keys[i]; the positions of keys without a row go to `missing`. Returns how many
    those are.
    """
    count, stride, dim = 0, rows.numbers[STRIDE], rows.numbers[DIM]
    bases, tags, slots = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.int64)
    for start in range(0, len(keys), BLOCK):
        stop = min(start + BLOCK, len(keys))
        locate(index, rows, keys, start, stop, 1 + (dim + 1) // 2, bases, tags, slots)
        for i in range(stop - start):
            if slots[i] < 0:
                missing[count] = start + i
                count += 1
                continue
            source = slots[i] * stride * 2 + 2
            values, target = rows.floats[source : source + dim], out[start + i]
            for column in range(dim):
                target[column] = values[column]
    return count


@compiled
def gather(rows: Rows, slots: Keys, positions: Keys, out: Floats) -> None:
    """out[positions[i]] = the values of slots[i]."""
    stride, dim = rows.numbers[STRIDE], rows.numbers[DIM]
    for i in range(len(slots)):
        source = slots[i] * stride * 2 + 2
        values, target = rows.floats[source : source + dim], out[positions[i]]
        for column in range(dim):
            target[column] = values[column]


@compiled
def insert(index: Index, rows: Rows, fresh: Fresh, keys: Keys, begin: Scalar, slots: Keys) -> tuple[int, int]:
    """slots[i] = the slot of keys[i] from `begin` on; a key without a row gets the next one, filled as
    `fresh` says. Returns (how far it came, ENOUGH or what the index needs to go on). There must be room for
    the rows.
    """
    numbers, words, flags, cut = rows.numbers, rows.words, rows.flags, rows.cut
    entries, fill, stride = index.entries, index.fill, numbers[STRIDE]
    start, needs = begin, ENOUGH
    while start < len(keys) and needs == ENOUGH:
        first, stop, before = start, min(start + BLOCK, len(keys)), numbers[COUNT]
        start = stop
        for i in range(first, stop):
            base, tag = where(index, keys[i])
            prefetch(entries, base + home(tag))
        for i in range(first, stop):
            key = keys[i]
            base, tag = where(index, key)
            position = search(entries, words, stride, key, base, tag, home(tag))
            slot = slot_at(entries, position)
            if slot < 0:
                if fill[base // SEGMENT] >= FULL:
                    needs, start = split(index, base // SEGMENT), i
                    break
                slot = numbers[COUNT]
                numbers[COUNT] = slot + 1
                entries[position] = (tag << np.uint64(32)) | np.uint64(slot + 1)
                fill[base // SEGMENT] += 1
                words[slot * stride] = key
                flags[slot] = np.uint8(SINCE_CUT) if cut[OPEN] else np.uint8(CHANGED)  # not one of the cut's
            slots[i] = slot
        if fresh.kind != NOTHING:
            blank(fresh, rows, before)
    return start, needs


@compiled
def blank(fresh: Fresh, rows: Rows, first: Scalar) -> None:
    """What follows the keys of rows from `first` on: initial values and state, nothing seen. For many rows at
    once: a call that gets arrays costs more than a row.
    """
    words, floats, numbers = rows.words, rows.floats, rows.numbers
    stride, dim = numbers[STRIDE], numbers[DIM]
    for slot in range(first, numbers[COUNT]):
        place = slot * stride * 2 + 2
        fill_values(fresh, words[slot * stride], floats, place, dim)
        end = place + dim + numbers[STATES]
        for column in range(place + dim, end):
            floats[column] = fresh.state
        for column in range(end, end + numbers[STATISTICS]):
            floats[column] = np.float32(0)


@compiled
def write(
    rows: Rows, slots: Keys, values: Floats, state: Floats, statistics: Floats, state_of_new: Scalar
) -> None:
    """Overwrite rows: values (n, dim), state (states, n, dim) or (0, 0, 0), statistics (n, 3) or (0, 3).
    What is not given becomes `state_of_new` and 0.
    """
    numbers, floats = rows.numbers, rows.floats
    stride, dim = numbers[STRIDE], numbers[DIM]
    will_change(rows, slots, len(slots))
    for i in range(len(slots)):
        place = slots[i] * stride * 2 + 2
        target, source = floats[place : place + dim], values[i]  # slices, so that loops become vectors
        for column in range(dim):
            target[column] = source[column]
        place += dim
        for which in range(numbers[STATES] // dim):
            target = floats[place : place + dim]
            if len(state):
                source = state[which, i]
                for column in range(dim):
                    target[column] = source[column]
            else:
                for column in range(dim):
                    target[column] = state_of_new
            place += dim
        for column in range(numbers[STATISTICS]):
            floats[place + column] = statistics[i, column] if len(statistics) else np.float32(0)
