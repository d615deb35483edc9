"""Store rows as records of key, values, optimizer state and statistics in one block of memory. An index finds
them.

This module contains everything that depends on the layout of a record, except the steps of optimizers
(`updates`). It finds and inserts rows, computes initial values, reads cuts while another thread changes the
rows, keeps statistics, removes rows, and reads records from files.

Record: key int64 | values x dim, float32 or in 16 bits | optimizer state float32: dim for each state, then
one for each row-wise state | show, click, unseen days float32, if kept | stamp float32, if bounded. The last
two parts are the statistics. A record is measured in places of 4 bytes, and its values fill whole places.
Loops work in blocks. They prefetch the entries, then the records, and then compute, so many reads of memory
are in flight at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
from numba import types
from numpy.typing import NDArray

from trainers.kernels.compiled import Flags, Floats, Keys, Mask, Scalar, Words, compiled, inlined
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
from trainers.ps.kernels.memory import fence, key_at, prefetch, set_key
from trainers.ps.kernels.rounding import narrow, widen

# ---- Initial values. They are a pure function of (seed, key, column), independent of the order of arrival
# and of the number of servers.

UNIFORM, NOTHING = 1, 0

_UNIT24 = np.float32(2.0**-24)
_UNIT53 = 2.0**-53
_TURN = 2.0 * math.pi


class Fresh(NamedTuple):
    """The content of a new row.

    Kind 1 is uniform from a up to b. Kind 2 is normal with mean a and deviation b. Kind 0 leaves everything
    uninitialized, also state and statistics, because all of it will be overwritten.
    """

    kind: int
    a: np.float32
    b: np.float32
    seed: np.uint64
    state: np.float32


@compiled
def fill_values(fresh: Fresh, key: Scalar, floats: Floats, start: Scalar, dim: Scalar) -> None:
    """Write the initial values of a key to floats[start : start + dim].

    The random words are splitmix64's sequence, from a start computed from seed and key. A uniform value uses
    24 bits of one word. Two normal values use two words (Box-Muller).
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
def initial_rows(fresh: Fresh, keys: Keys, positions: Keys, flat: Floats, dim: Scalar, dtype: Scalar) -> None:
    """Fill the rows `positions` of `flat` with the initial values of their keys, rounded to the given row
    type.
    """
    halves, zero = np.empty(dim, np.uint16), np.int64(0)  # numba would compile separately for a literal 0
    for position in positions:
        start = position * dim
        fill_values(fresh, keys[position], flat, start, dim)
        if dtype:
            narrow(flat[start : start + dim], halves, zero, dtype)
            widen(halves, zero, dtype, flat[start : start + dim])


# ---- Finding, inserting and writing rows.

COUNT, STRIDE, DIM, STATES, STATISTICS, DAY, DTYPE, WIDTH, SEED, STEP, COST, ROW_NUMBERS = range(12)
"""Positions in `Rows.numbers`.

- COUNT: rows in use.
- STRIDE: places per record.
- DIM: columns.
- STATES: state values per row.
- STATISTICS: statistics per row.
- DAY: the flag EVEN_DAY on every second day.
- DTYPE: the type of the values (see `rounding`).
- WIDTH: places that the values need.
- SEED and STEP: a seed and the number of updates of the table, which determine random rounding.
- COST: the cost of a row in its budget, or 0 if the table is not bounded.
"""

VALUES = 2
"""The place in a record where the values start."""

OPEN, CUT_ROWS, READ, TAKEN = 0, 1, 2, 3
"""Positions in `Rows.cut`. OPEN is 1 while there is a cut, CUT_ROWS is the number of its rows, READ is the
number of rows read so far, and TAKEN is the number of images taken.
"""

UNSAVED, SINCE_CUT, EVEN_DAY, NOT_IN_SNAPSHOT, UNPUBLISHED = 1, 2, 4, 8, 16
CHANGED = UNSAVED | NOT_IN_SNAPSHOT | UNPUBLISHED
"""The bits of `Rows.flags`.

- UNSAVED: changed since the last save, or between that save and the open cut.
- SINCE_CUT: changed since the cut was made.
- EVEN_DAY: the last day that passed for the row.
- NOT_IN_SNAPSHOT: changed since the last snapshot, or between it and the open cut.
- UNPUBLISHED: changed since the last published version, or between it and the open cut.
"""

_LINE = 16  # places per cache line
_AHEAD = 8  # lines of a record to prefetch, because the processor prefetches the rest


class Rows(NamedTuple):
    """The arrays of a table's rows, and the arrays of its cut, which are empty without a cut."""

    floats: Floats
    flags: Flags  # one per row
    numbers: NDArray[np.int64]
    images: Floats  # records as they were at the cut
    image_of: NDArray[np.uint32]  # the number of a row's image, for rows that have one
    cut: NDArray[np.int64]


@compiled
def will_change(rows: Rows, slots: Keys, count: Scalar) -> None:
    """Flag the rows in slots[:count] (-1 means none), and keep their images if the cut may still need them.

    Call it before the rows change, for many rows at once, because a call with arrays costs more than a row.
    """
    floats, flags, cut, stride = rows.floats, rows.flags, rows.cut, rows.numbers[STRIDE]
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
                source = floats[slot * stride : (slot + 1) * stride]
                for place in range(stride):
                    target[place] = source[place]
                image_of[slot] = np.uint32(image)
                cut[TAKEN] = image + 1
                fence()  # a reader that sees the flag must find the image
            flags[slot] |= np.uint8(SINCE_CUT)
            fence()  # a reader that sees any change of the row must see the flag


@inlined
def work_of_block() -> tuple[Keys, Words, Keys]:
    """Return the memory for `locate`, which is `bases`, `tags` and `slots` of a block of keys."""
    return np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.int64)


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
    """Write the slot of keys[start + i] to slots[i], or -1.

    `used` is the number of places of a record that will be used, or all places if the record may change. See
    `work_of_block` for `bases` and `tags`.
    """
    entries, floats, flags, stride = index.entries, rows.floats, rows.flags, rows.numbers[STRIDE]
    prefetched, image_of = min(used, _LINE * _AHEAD), rows.image_of
    may_keep = used == stride and rows.cut[OPEN]
    for i in range(stop - start):
        base, tag = where(index, keys[start + i])
        bases[i], tags[i] = base, tag
        prefetch(entries, base + home(tag))
    for i in range(stop - start):
        position = bases[i] + probe(entries, bases[i], tags[i], home(tags[i]))
        slots[i] = slot = slot_at(entries, position)
        if slot >= 0:
            for place in range(0, prefetched, _LINE):
                prefetch(floats, slot * stride + place)
            prefetch(floats, slot * stride + used - 1)
            if used == stride:
                prefetch(flags, slot)
            if may_keep:
                prefetch(image_of, slot)
    for i in range(stop - start):
        slot = slots[i]
        # The record belongs to a different key with the same tag.
        if slot >= 0 and key_at(floats, slot * stride) != keys[start + i]:
            base, tag = bases[i], tags[i]
            position = search(entries, floats, stride, keys[start + i], base, tag, home(tag))
            slots[i] = slot_at(entries, position)


@compiled
def pull(index: Index, rows: Rows, keys: Keys, out: Floats, missing: Keys) -> int:
    """Write the values of keys[i] to out[i]. Write the positions of keys without a row to `missing`, and
    return their number.
    """
    count, stride, dim = 0, rows.numbers[STRIDE], rows.numbers[DIM]
    dtype, halves = rows.numbers[DTYPE], rows.floats.view(np.uint16)
    bases, tags, slots = work_of_block()
    for start in range(0, len(keys), BLOCK):
        stop = min(start + BLOCK, len(keys))
        locate(index, rows, keys, start, stop, VALUES + rows.numbers[WIDTH], bases, tags, slots)
        for i in range(stop - start):
            if slots[i] < 0:
                missing[count] = start + i
                count += 1
                continue
            source = slots[i] * stride + VALUES
            if dtype:
                widen(halves, 2 * source, dtype, out[start + i])
                continue
            values, target = rows.floats[source : source + dim], out[start + i]
            for column in range(dim):
                target[column] = values[column]
    return count


@compiled
def without_row(index: Index, rows: Rows, keys: Keys, missing: Keys) -> int:
    """Write the positions of keys without a row to `missing`, and return their number."""
    count = np.int64(0)  # with a literal 0, numba would compile every callee twice
    bases, tags, slots = work_of_block()
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
    """Write the values of slots[i] to out[positions[i]]."""
    stride, dim = rows.numbers[STRIDE], rows.numbers[DIM]
    dtype, halves = rows.numbers[DTYPE], rows.floats.view(np.uint16)
    for i in range(len(slots)):
        source = slots[i] * stride + VALUES
        if dtype:
            widen(halves, 2 * source, dtype, out[positions[i]])
            continue
        values, target = rows.floats[source : source + dim], out[positions[i]]
        for column in range(dim):
            target[column] = values[column]


@compiled
def insert(index: Index, rows: Rows, fresh: Fresh, keys: Keys, begin: Scalar, slots: Keys) -> tuple[int, int]:
    """Write the slot of keys[i] to slots[i], from `begin` on. A key without a row gets the next slot, with
    the content of `fresh`.

    Return the next position, and ENOUGH or the resource that the index needs to continue. There must be
    memory for the rows.
    """
    numbers, floats, flags, cut = rows.numbers, rows.floats, rows.flags, rows.cut
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
            position = search(entries, floats, stride, key, base, tag, home(tag))
            slot = slot_at(entries, position)
            if slot < 0:
                if fill[base // SEGMENT] >= FULL:
                    needs, start = split(index, base // SEGMENT), i
                    break
                slot = numbers[COUNT]
                numbers[COUNT] = slot + 1
                entries[position] = (tag << np.uint64(32)) | np.uint64(slot + 1)
                fill[base // SEGMENT] += 1
                set_key(floats, slot * stride, key)
                # The new row is not part of the cut. CHANGED is kept, because the cut may still need the flag
                # of the row that was here.
                flags[slot] = new | (flags[slot] & np.uint8(CHANGED) if cut[OPEN] else np.uint8(0))
            slots[i] = slot
        if fresh.kind != NOTHING:
            blank(fresh, rows, before)
    return start, needs


@compiled
def blank(fresh: Fresh, rows: Rows, first: Scalar) -> None:
    """Fill the rows from `first` on with initial values, initial state and zero statistics. Their keys are
    set already.

    Call it for many rows at once, because a call with arrays costs more than a row.
    """
    floats, numbers = rows.floats, rows.numbers
    stride, dim, dtype = numbers[STRIDE], numbers[DIM], numbers[DTYPE]
    work, halves = np.empty(dim, np.float32), floats.view(np.uint16)
    for slot in range(first, numbers[COUNT]):
        key, place = key_at(floats, slot * stride), slot * stride + VALUES
        if dtype:
            fill_values(fresh, key, work, np.int64(0), dim)
            narrow(work, halves, 2 * place, dtype)
        else:
            fill_values(fresh, key, floats, place, dim)
        place += numbers[WIDTH]
        end = place + numbers[STATES]
        for column in range(place, end):
            floats[column] = fresh.state
        for column in range(end, end + numbers[STATISTICS]):
            floats[column] = np.float32(0)


@compiled
def write(
    rows: Rows,
    slots: Keys,
    values: Floats,
    state: Floats,
    of_row: Floats,
    statistics: Floats,
    state_of_new: Scalar,
) -> None:
    """Overwrite rows. Values (n, dim) are rounded to the nearest.

    `state` is (states, n, dim), row-wise state `of_row` is (n, row states), or they are (0, 0, 0) and (0, 0).
    `statistics` is (n, 3) or (0, 3). Missing state becomes `state_of_new`, and missing statistics become 0.
    """
    numbers, floats = rows.numbers, rows.floats
    stride, dim, dtype = numbers[STRIDE], numbers[DIM], numbers[DTYPE]
    halves = floats.view(np.uint16)
    will_change(rows, slots, len(slots))
    for i in range(len(slots)):
        place = slots[i] * stride + VALUES
        if dtype:
            narrow(values[i], halves, 2 * place, dtype)
        else:
            target, source = floats[place : place + dim], values[i]  # slices, so that loops become vectors
            for column in range(dim):
                target[column] = source[column]
        place += numbers[WIDTH]
        if not len(state) and not len(of_row):
            for column in range(numbers[STATES]):
                floats[place + column] = state_of_new
        for which in range(len(state)):
            target, source = floats[place + which * dim : place + (which + 1) * dim], state[which, i]
            for column in range(dim):
                target[column] = source[column]
        for column in range(of_row.shape[1]):
            floats[place + len(state) * dim + column] = of_row[i, column]
        place += numbers[STATES]
        for column in range(numbers[STATISTICS]):
            floats[place + column] = statistics[i, column] if len(statistics) else np.float32(0)


# ---- Read the rows of a cut while another thread changes the rows.


@compiled
def copy_record(
    floats: Floats,
    place: Scalar,
    to: Scalar,
    values: Floats,
    state: Floats,
    of_row: Floats,
    statistics: Floats,
) -> None:
    """Copy the content of a record without its key, from `place` on."""
    width, dim = values.shape[1], state.shape[2]
    source, target = floats[place : place + width], values[to]  # slices, so that loops become vectors
    for column in range(width):
        target[column] = source[column]
    place += width
    for which in range(len(state)):
        source, target = floats[place : place + dim], state[which, to]
        for column in range(dim):
            target[column] = source[column]
        place += dim
    for column in range(of_row.shape[1]):
        of_row[to, column] = floats[place + column]
    place += of_row.shape[1]
    for column in range(statistics.shape[1]):
        statistics[to, column] = floats[place + column]


@compiled
def read(
    rows: Rows,
    start: Scalar,
    stop: Scalar,
    changed: Scalar,
    below: Scalar,
    keys: Keys,
    values: Floats,
    state: Floats,
    of_row: Floats,
    statistics: Floats,
) -> int:
    """Copy the rows [start, stop) as of the cut, and return the number of copied rows.

    `values` (n, width) receives the raw places of the values. `state` is (states, n, dim), row-wise state
    `of_row` is (n, row states), and `statistics` is (n, statistics per row). If `changed` is 0, all rows are
    copied. Otherwise only rows with this flag are copied. Rows with a stamp under `below` are copied too,
    because they may have been evicted. 0 turns this off.

    This works without a lock. The reader copies a row first and then reads its flag. A writer keeps the
    image, then sets the flag, and only then changes the row. If the flag is not set, the copy is therefore
    from before the change.
    """
    floats, flags, stride = rows.floats, rows.flags, rows.numbers[STRIDE]
    image_of, images = rows.image_of, rows.images
    found = np.int64(0)  # with a literal 0, numba would compile every callee twice
    for slot in range(start, stop):
        if changed and not flags[slot] & np.uint8(changed):
            kept = below == 0 or floats[stamp_at(rows, slot)] >= below
            if kept and not (below > 0 and flags[slot] & np.uint8(SINCE_CUT)):
                continue
        keys[found] = key_at(floats, slot * stride)
        copy_record(floats, slot * stride + VALUES, found, values, state, of_row, statistics)
        fence()
        if flags[slot] & np.uint8(SINCE_CUT):
            fence()
            image = np.int64(image_of[slot]) * stride
            keys[found] = key_at(images, image)
            copy_record(images, image + VALUES, found, values, state, of_row, statistics)
        found += 1
    return int(found)


@compiled
def settle_flags(flags: Flags, saved: Scalar) -> None:
    """Settle the flags after a cut. A row is changed if it changed since the cut, or, except for the flag
    `saved`, before the cut.
    """
    kept = np.uint8(EVEN_DAY | CHANGED) & ~np.uint8(saved)
    for slot in range(len(flags)):
        later = np.uint8(CHANGED) if flags[slot] & np.uint8(SINCE_CUT) else np.uint8(0)
        flags[slot] = (flags[slot] & kept) | later


@compiled
def revise(rows: Rows, slots: Keys, values: Floats) -> None:
    """Set the values of slots[i] to values[i]. State and statistics stay."""
    stride, dim, dtype = rows.numbers[STRIDE], rows.numbers[DIM], rows.numbers[DTYPE]
    halves = rows.floats.view(np.uint16)
    will_change(rows, slots, len(slots))
    for i in range(len(slots)):
        start = slots[i] * stride + VALUES
        if dtype:
            narrow(values[i], halves, 2 * start, dtype)
            continue
        target, source = rows.floats[start : start + dim], values[i]
        for column in range(dim):
            target[column] = source[column]


# ---- Update statistics, count candidates, and remove rows.


@compiled
def add_seen(index: Index, rows: Rows, keys: Keys, stats: Floats) -> None:
    """Add shows and clicks (n, 2) to the existing rows of keys, and reset their unseen days.

    With `stats` (0, 2), only reset the unseen days.
    """
    numbers = rows.numbers
    offset = VALUES + numbers[WIDTH] + numbers[STATES]
    bases, tags, slots = work_of_block()
    for start in range(0, len(keys), BLOCK):
        stop = min(start + BLOCK, len(keys))
        locate(index, rows, keys, start, stop, numbers[STRIDE], bases, tags, slots)
        will_change(rows, slots, stop - start)
        for i in range(stop - start):
            if slots[i] < 0:
                continue
            place = slots[i] * numbers[STRIDE] + offset
            if len(stats):
                rows.floats[place] += stats[start + i, 0]
                rows.floats[place + 1] += stats[start + i, 1]
            rows.floats[place + 2] = np.float32(0)


@compiled
def count_up(rows: Rows, slots: Keys, needed: Scalar, admitted: Mask) -> None:
    """Count the candidates in `slots`, and set admitted[i] if the candidate has been seen often enough.

    The first value of a candidate's record is its count, and the second value is its unseen days.
    """
    for i in range(len(slots)):
        place = slots[i] * rows.numbers[STRIDE] + VALUES
        rows.floats[place] += np.float32(1)
        rows.floats[place + 1] = np.float32(0)
        admitted[i] = rows.floats[place] >= needed


@compiled
def drawn(keys: Keys, seed: Scalar, chance: Scalar, admitted: Mask) -> None:
    """Set admitted[i] if keys[i] is in the fraction `chance` of all keys that the seed selects."""
    start = finalize(~seed)
    for i in range(len(keys)):
        word = finalize(finalize(np.uint64(keys[i]) ^ start))
        admitted[i] = np.float64(np.int64(word >> np.uint64(11))) * 2.0**-53 < chance


@compiled
def stamp_at(rows: Rows, slot: Scalar) -> Scalar:
    """Return the place in `floats` of the row's last statistic, the stamp if the table is bounded."""
    numbers = rows.numbers
    return (slot + 1) * numbers[STRIDE] - 1


@compiled
def position_of(index: Index, rows: Rows, key: Scalar) -> Scalar:
    """Return the position of the key's entry, or of the empty entry where the key belongs."""
    base, tag = where(index, key)
    return search(index.entries, rows.floats, rows.numbers[STRIDE], key, base, tag, home(tag))


@compiled
def remove_slot(index: Index, rows: Rows, slot: Scalar) -> None:
    """Remove a row, and move the last row to its place."""
    numbers, floats = rows.numbers, rows.floats
    flags, stride, last = rows.flags, numbers[STRIDE], numbers[COUNT] - 1
    if rows.cut[OPEN]:
        will_change(rows, np.array([slot, last]), 2)  # a new row will get `last`
    remove_entry(index, position_of(index, rows, key_at(floats, slot * stride)))
    if slot != last:
        position = position_of(index, rows, key_at(floats, last * stride))
        index.entries[position] += np.uint64(slot) - np.uint64(last)
        for place in range(stride):
            floats[slot * stride + place] = floats[last * stride + place]
        if not rows.cut[OPEN]:
            flags[slot] = flags[last]
        else:  # its CHANGED belongs to the row that the cut has in this slot
            flags[slot] = (flags[slot] & ~np.uint8(EVEN_DAY)) | (flags[last] & np.uint8(EVEN_DAY))
    numbers[COUNT] = last


@compiled
def remove_keys(index: Index, rows: Rows, keys: Keys) -> None:
    """Remove the existing rows of these keys."""
    for key in keys:
        entry = index.entries[position_of(index, rows, key)]
        if entry != np.uint64(0):
            remove_slot(index, rows, np.int64(entry & np.uint64(0xFFFFFFFF)) - 1)


@compiled
def day_passes(rows: Rows, slot: Scalar, policy: Floats) -> bool:
    """Let a day pass for a row, or for a candidate, which has no statistics. Return True if it must be
    removed.

    `policy` holds decay, the coefficients of show - click and of click, the minimum score, and the maximum
    unseen days.
    """
    decay, shown, clicked, least, oldest = policy[0], policy[1], policy[2], policy[3], policy[4]
    numbers, floats = rows.numbers, rows.floats
    place = slot * numbers[STRIDE] + VALUES
    if numbers[STATISTICS] < 3:  # the record has at most a stamp
        floats[place + 1] += np.float32(1)
        return bool(floats[place + 1] > oldest)
    place += numbers[WIDTH] + numbers[STATES]
    floats[place] *= decay
    floats[place + 1] *= decay
    floats[place + 2] += np.float32(1)
    show, click, days = floats[place], floats[place + 1], floats[place + 2]
    return bool(shown * (show - click) + clicked * click < least or days > oldest)


# ---- Read records from a file by calls of the C library, many at once and without the GIL.

_word = types.int64
_pread = cast(Callable[..., object], types.ExternalFunction("pread", _word(types.int32, _word, _word, _word)))
_advise = cast(
    Callable[..., object],
    types.ExternalFunction("posix_fadvise", types.int32(types.int32, _word, _word, types.int32)),
)
_WILLNEED = np.int32(3)
_PAGE = 4096


@compiled
def read_records(file: Scalar, places: Keys, order: Keys, size: Scalar, target: Scalar) -> int:
    """Read record number places[i] of a file, of `size` bytes, to the address target + i * size.

    `order` sorts the places. Return the number of records read, in that order, before the first failure. All
    records are requested before the first is awaited, so the disk reads many at once.
    """
    requested = np.int64(-1)  # with a literal, numba would compile the loop twice
    for i in order:
        start = places[i] * size
        first, last = max(start // _PAGE, requested + 1), (start + size - 1) // _PAGE
        if first <= last:
            _advise(np.int32(file), first * _PAGE, (last - first + 1) * _PAGE, _WILLNEED)
            requested = last
    done = np.int64(0)
    for i in order:
        if _pread(np.int32(file), target + i * size, size, places[i] * size) != size:
            break
        done += 1
    return int(done)
