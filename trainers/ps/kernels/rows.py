"""Rows: records of key, values, optimizer state and statistics in one block of memory, found by an index.

Everything that depends on the layout of a record, except the steps of optimizers (`updates`): finding and
inserting, initial values, cuts that are read while another thread changes the rows, statistics, removal.

Record: key int64 | values float32 x dim | each state float32 x dim | show, click, unseen days float32, if
kept | stamp float32, if bounded; a multiple of 8 bytes. The last two are the statistics. Loops work in
blocks: they prefetch the entries, then the records, then compute, so that many reads of memory are in flight
at the same time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainers.kernels.compiled import Flags, Floats, Keys, Mask, Scalar, Words, compiled
from trainers.ps.kernels.index import (
    BLOCK,
    ENOUGH,
    FULL,
    GOLDEN,
    SEGMENT,
    Index,
    finalize,
    home,
    probe,
    remove_entry,
    search,
    slot_at,
    split,
    where,
)
from trainers.ps.kernels.memory import fence, prefetch

# ---- Initial values: a pure function of (seed, key, column), independent of the order of arrival and of the
# number of servers.

UNIFORM, NOTHING = 1, 0

_UNIT24 = np.float32(2.0**-24)
_UNIT53 = 2.0**-53
_TURN = 2.0 * math.pi


class Fresh(NamedTuple):
    """The content of a new row. Kind 1: uniform from a up to b; 2: normal, mean a, deviation b; 0:
    uninitialized, state and statistics included, because all of it will be overwritten.
    """

    kind: int
    a: np.float32
    b: np.float32
    seed: np.uint64
    state: np.float32


@compiled
def fill_values(fresh: Fresh, key: Scalar, floats: Floats, start: Scalar, dim: Scalar) -> None:
    """floats[start : start + dim] = the initial values of a key: splitmix64's sequence from a start computed
    from seed and key; 24 bits of a word for a uniform value, two words for two normal ones (Box-Muller).
    """
    word = finalize(finalize(fresh.seed + GOLDEN) ^ np.uint64(key))
    if fresh.kind == UNIFORM:
        width = fresh.b - fresh.a
        for column in range(dim):
            word += GOLDEN
            part = np.float32(np.int64(finalize(word) >> np.uint64(40)))
            floats[start + column] = fresh.a + width * (part * _UNIT24)
        return
    for column in range(0, dim, 2):
        word += GOLDEN
        above_zero = (np.float64(np.int64(finalize(word) >> np.uint64(11))) + 1.0) * _UNIT53
        word += GOLDEN
        angle = _TURN * (np.float64(np.int64(finalize(word) >> np.uint64(11))) * _UNIT53)
        radius = math.sqrt(-2.0 * math.log(above_zero))
        floats[start + column] = fresh.a + fresh.b * np.float32(radius * math.cos(angle))
        if column + 1 < dim:
            floats[start + column + 1] = fresh.a + fresh.b * np.float32(radius * math.sin(angle))


@compiled
def initial_rows(fresh: Fresh, keys: Keys, positions: Keys, flat: Floats, dim: Scalar) -> None:
    """Rows `positions` of `flat` = the initial values of their keys."""
    for position in positions:
        fill_values(fresh, keys[position], flat, position * dim, dim)


# ---- Finding, inserting and writing rows.

COUNT, STRIDE, DIM, STATES, STATISTICS, DAY, COST = 0, 1, 2, 3, 4, 5, 6
"""`Rows.numbers`: rows in use, 8-byte words a record, columns, state values a row, statistics a row, the flag
EVEN_DAY on every second day, and what a row costs of its budget; 0: the table is not bounded.
"""

OPEN, CUT_ROWS, READ, TAKEN = 0, 1, 2, 3
"""`Rows.cut`: whether there is a cut, its rows, how many of them were read, how many images were taken."""

CHANGED, SINCE_CUT, EVEN_DAY = 1, 2, 4
"""`Rows.flags`: changed since it was last saved (or before the cut); changed since the cut was made; the last
day that passed for the row.
"""

_LINE = 8  # words of a cache line
_AHEAD = 8  # lines of a record to prefetch; the processor prefetches the rest


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
    """To be called before the rows in slots[:count] change (-1: none): flags them, and keeps their images if
    the cut may still need them. For many rows at once: a call with arrays costs more than a row.
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
    if it may be changed. `bases`, `tags`: working space of BLOCK words.
    """
    entries, words, flags, stride = index.entries, rows.words, rows.flags, rows.numbers[STRIDE]
    prefetched, image_of = min(used, _LINE * _AHEAD), rows.image_of
    may_keep = used == stride and rows.cut[OPEN]
    for i in range(stop - start):
        base, tag = where(index, keys[start + i])
        bases[i], tags[i] = base, tag
        prefetch(entries, base + home(tag))
    for i in range(stop - start):
        place = probe(entries, bases[i], tags[i], home(tags[i]))
        slots[i] = slot = slot_at(entries, bases[i] + place)
        if slot >= 0:
            for word in range(0, prefetched, _LINE):
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
    """out[i] = the values of keys[i]; writes the positions of keys without a row to `missing` and returns
    their number.
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
def without_row(index: Index, rows: Rows, keys: Keys, missing: Keys) -> int:
    """Writes the positions of keys without a row to `missing` and returns their number."""
    count = np.int64(0)  # with a literal 0 numba would compile every callee twice
    bases, tags, slots = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.int64)
    for start in range(0, len(keys), BLOCK):
        stop = min(start + BLOCK, len(keys))
        locate(index, rows, keys, start, stop, np.int64(1), bases, tags, slots)
        for i in range(stop - start):
            if slots[i] < 0:
                missing[count] = start + i
                count += 1
    return int(count)


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
    `fresh` says. Returns (the next position, ENOUGH or what the index needs to continue). There must be
    memory for the rows.
    """
    numbers, words, flags, cut = rows.numbers, rows.words, rows.flags, rows.cut
    entries, fill, stride = index.entries, index.fill, numbers[STRIDE]
    start, needs = begin, ENOUGH
    new = np.uint8(numbers[DAY]) | (np.uint8(SINCE_CUT) if cut[OPEN] else np.uint8(CHANGED))
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
                # Not part of the cut, which may still have to know whether the row that was here had changed.
                flags[slot] = new | (flags[slot] & np.uint8(CHANGED) if cut[OPEN] else np.uint8(0))
            slots[i] = slot
        if fresh.kind != NOTHING:
            blank(fresh, rows, before)
    return start, needs


@compiled
def blank(fresh: Fresh, rows: Rows, first: Scalar) -> None:
    """Fill rows from `first` on behind their keys: initial values and state, zero statistics. For many rows
    at once: a call with arrays costs more than a row.
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
    Missing state becomes `state_of_new`, missing statistics 0.
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


# ---- Reading the rows of a cut while another thread changes them.


@compiled
def copy_record(
    floats: Floats, place: Scalar, dim: Scalar, to: Scalar, values: Floats, state: Floats, statistics: Floats
) -> None:
    """Copy the content of a record behind its key, from `place` on."""
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
    below: Scalar,
    keys: Keys,
    values: Floats,
    state: Floats,
    statistics: Floats,
) -> int:
    """Rows [start, stop) as of the cut; returns how many of them were copied. values (n, dim), state
    (states, n, dim), statistics (n, as many as there are). `changed_only`: those that have changed, and those
    with a stamp below `below`, which may have been evicted; 0: none.

    Without a lock: a row is copied first, and then its flag is read. A writer keeps the image, sets the flag
    and only then changes the row; so if the flag is not set, the copy is from before the change.
    """
    words, floats, flags = rows.words, rows.floats, rows.flags
    image_of, image_floats = rows.image_of, rows.images.view(np.float32)
    stride, dim = rows.numbers[STRIDE], rows.numbers[DIM]
    found = np.int64(0)  # with a literal 0 numba would compile every callee twice
    for slot in range(start, stop):
        if changed_only and not flags[slot] & np.uint8(CHANGED):
            kept = below == 0 or floats[stamp_at(rows, slot)] >= below
            if kept and not (below > 0 and flags[slot] & np.uint8(SINCE_CUT)):
                continue
        keys[found] = words[slot * stride]
        copy_record(floats, slot * stride * 2 + 2, dim, found, values, state, statistics)
        fence()
        if flags[slot] & np.uint8(SINCE_CUT):
            fence()
            image = np.int64(image_of[slot])
            keys[found], place = rows.images[image * stride], image * stride * 2 + 2
            copy_record(image_floats, place, dim, found, values, state, statistics)
        found += 1
    return int(found)


@compiled
def settle_flags(flags: Flags, saved: Scalar) -> None:
    """After a cut: a row counts as changed if it changed since the cut or, if that was not saved, before."""
    for slot in range(len(flags)):
        later = (flags[slot] >> np.uint8(1)) & np.uint8(CHANGED)
        earlier = np.uint8(0) if saved else flags[slot] & np.uint8(CHANGED)
        flags[slot] = (flags[slot] & np.uint8(EVEN_DAY)) | later | earlier


@compiled
def revise(rows: Rows, slots: Keys, values: Floats) -> None:
    """The values of slots[i] = values[i]; state and statistics stay."""
    stride, dim = rows.numbers[STRIDE], rows.numbers[DIM]
    will_change(rows, slots, len(slots))
    for i in range(len(slots)):
        start = slots[i] * stride * 2 + 2
        target, source = rows.floats[start : start + dim], values[i]
        for column in range(dim):
            target[column] = source[column]


# ---- Statistics of rows, counts of candidates, and removal.


@compiled
def add_seen(index: Index, rows: Rows, keys: Keys, stats: Floats) -> None:
    """Add shows and clicks (n, 2) to existing rows of keys and reset their unseen days. `stats` (0, 2): only
    the latter.
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
    """Count the candidates in `slots` (the first value of a record is its count, the second its unseen days);
    admitted[i] = whether it has been seen often enough.
    """
    for i in range(len(slots)):
        place = slots[i] * rows.numbers[STRIDE] * 2 + 2
        rows.floats[place] += np.float32(1)
        rows.floats[place + 1] = np.float32(0)
        admitted[i] = rows.floats[place] >= needed


@compiled
def drawn(keys: Keys, seed: Scalar, chance: Scalar, admitted: Mask) -> None:
    """admitted[i] = whether keys[i] is in the fraction `chance` of all keys that the seed selects."""
    start = finalize(~seed)
    for i in range(len(keys)):
        word = finalize(finalize(np.uint64(keys[i]) ^ start))
        admitted[i] = np.float64(np.int64(word >> np.uint64(11))) * 2.0**-53 < chance


@compiled
def stamp_at(rows: Rows, slot: Scalar) -> Scalar:
    """Where in `floats` the last of a row's statistics is: the stamp, if the table is bounded."""
    numbers = rows.numbers
    return slot * numbers[STRIDE] * 2 + 1 + numbers[DIM] + numbers[STATES] + numbers[STATISTICS]


@compiled
def position_of(index: Index, rows: Rows, key: Scalar) -> Scalar:
    """The position of the key's entry, or of the empty one where it belongs."""
    base, tag = where(index, key)
    return search(index.entries, rows.words, rows.numbers[STRIDE], key, base, tag, home(tag))


@compiled
def remove_slot(index: Index, rows: Rows, slot: Scalar) -> None:
    """Remove a row; the last row takes its place."""
    numbers, words = rows.numbers, rows.words
    flags, stride, last = rows.flags, numbers[STRIDE], numbers[COUNT] - 1
    if rows.cut[OPEN]:
        will_change(rows, np.array([slot, last]), 2)  # `last` will be given to a new row
    remove_entry(index, position_of(index, rows, words[slot * stride]))
    if slot != last:
        position = position_of(index, rows, words[last * stride])
        index.entries[position] += np.uint64(slot) - np.uint64(last)
        for word in range(stride):
            words[slot * stride + word] = words[last * stride + word]
        if not rows.cut[OPEN]:
            flags[slot] = flags[last]
        else:  # its CHANGED says whether the row that the cut has there had changed
            flags[slot] = (flags[slot] & ~np.uint8(EVEN_DAY)) | (flags[last] & np.uint8(EVEN_DAY))
    numbers[COUNT] = last


@compiled
def remove_keys(index: Index, rows: Rows, keys: Keys) -> None:
    """Remove the existing rows of keys."""
    for key in keys:
        entry = index.entries[position_of(index, rows, key)]
        if entry != np.uint64(0):
            remove_slot(index, rows, np.int64(entry & np.uint64(0xFFFFFFFF)) - 1)


@compiled
def day_passes(rows: Rows, slot: Scalar, policy: Floats) -> bool:
    """A day passes for a row, or for a candidate, which has no statistics; whether it is to be removed.
    policy: decay, coefficients of show - click and of click, the minimum score, the maximum unseen days.
    """
    decay, shown, clicked, least, oldest = policy[0], policy[1], policy[2], policy[3], policy[4]
    numbers, floats = rows.numbers, rows.floats
    place = slot * numbers[STRIDE] * 2 + 2
    if not numbers[STATISTICS]:
        floats[place + 1] += np.float32(1)
        return bool(floats[place + 1] > oldest)
    place += numbers[DIM] + numbers[STATES]
    floats[place] *= decay
    floats[place + 1] *= decay
    floats[place + 2] += np.float32(1)
    show, click, days = floats[place], floats[place + 1], floats[place + 2]
    return bool(shown * (show - click) + clicked * click < least or days > oldest)
