"""Remove rows from a table, after days without use (`shrink`) or because other rows need their place.

A row of a bounded table has a stamp, the last float of its statistics. The stamp is a time on the clock of
its budget, which advances with the uses of rows. A stamp of 0 means that the row has not been used yet. Under
LRU, the stamp is the time of the last use. Under LFU, a use weighs half as much when it is a unit of time
older. The stamp is the time at which a single use would weigh as much as all uses of the row together. SCORE
works like LFU, but uses weigh as much as their shows and clicks. This is LRFU (Lee et al. 2001) by forward
decay (Cormode et al. 2009), so a stamp changes only when its row is used.

Floors evict rows. Rows with a stamp below their floor count as removed from then on. Their records are
removed later, before their keys are used or by `sweep`, a slice at a time. The set of existing rows therefore
depends only on the order of uses. A hash distributes keys over PARTS parts with separate floors, so rows with
nearly equal stamps need not leave together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainers.kernels.compiled import Floats, Keys, Mask, Scalar, compiled
from trainers.ps.kernels.index import BLOCK, Index, finalize, home, slot_at, where
from trainers.ps.kernels.memory import key_at, prefetch
from trainers.ps.kernels.rows import (
    CHANGED,
    COST,
    COUNT,
    DAY,
    EVEN_DAY,
    STRIDE,
    Rows,
    day_passes,
    locate,
    position_of,
    remove_slot,
    stamp_at,
    will_change,
    work_of_block,
)

PARTS = 8
LEVELS_A_UNIT = 64
LEVELS_BELOW, LEVELS_ABOVE = 512, 1024
LEVELS = LEVELS_BELOW + LEVELS_ABOVE
"""The number of levels in which stamps are counted. A level is 1/64 of a unit. The levels cover stamps from 8
units before now to 16 units after now. The oldest level also counts all older stamps.
"""
_HIGHEST = LEVELS_ABOVE / LEVELS_A_UNIT - 1.0
"""The number of units that a stamp may be after now, or 2**15 times the weight of one use."""

ANCIENT = 2.0**-20
EVICTED = ANCIENT / 4
"""The stamps of rows whose last use was long before the clock restarted. Evicted rows have EVICTED, other
rows have ANCIENT. The floors of that time are between half of ANCIENT and ANCIENT.
"""

NOW, COST_UNIT, TOTAL, POLICY, LEVEL, FLOORS = 0, 1, 2, 3, 4, 5
"""Positions in `Uses.clock`. NOW is the time, COST_UNIT is the time that passes with a use of a row of cost
1, TOTAL is the cost of all rows, and LEVEL is the level of now. The floors of the parts begin at FLOORS.
"""
BY_TIME, BY_COUNT, BY_SCORE = 1, 2, 3

CLICK_WEIGHT = 10.0
"""The weight of a click, where a show without a click weighs 1. It matches the defaults of ShrinkPolicy."""


class Uses(NamedTuple):
    """The clock of a budget, and a ring (LEVELS * PARTS,) with the cost of rows by level and part."""

    clock: NDArray[np.float64]
    cells: NDArray[np.int64]


NO_USES = Uses(np.zeros(FLOORS + PARTS), np.zeros(1, np.int64))
"""The value for tables without a bound."""


@compiled
def part_of(key: Scalar) -> Scalar:
    """Return the part of a key. It is the same in every process, unlike the hash of an index."""
    return np.int64(finalize(np.uint64(key)) & np.uint64(PARTS - 1))


@compiled
def cell_of(uses: Uses, stamp: Scalar, part: Scalar) -> Scalar:
    """Return the cell that counts rows with this stamp."""
    level = np.int64(math.floor(np.float64(stamp) * LEVELS_A_UNIT))
    oldest = np.int64(uses.clock[LEVEL]) - LEVELS_BELOW
    return max(level, oldest) % LEVELS * PARTS + part


@compiled
def pass_until(uses: Uses, time: Scalar) -> None:
    """Advance the clock to `time`, if the clock is not later already. Merge levels that are too old into the
    next level.
    """
    clock, cells = uses.clock, uses.cells
    clock[NOW] = max(clock[NOW], time)
    level = np.int64(clock[LEVEL])
    while level < np.int64(math.floor(clock[NOW] * LEVELS_A_UNIT)):
        oldest, next_oldest = (level - LEVELS_BELOW) % LEVELS, (level - LEVELS_BELOW + 1) % LEVELS
        for part in range(PARTS):
            cells[next_oldest * PARTS + part] += cells[oldest * PARTS + part]
            cells[oldest * PARTS + part] = 0
        level += 1
    clock[LEVEL] = level


@compiled
def is_evicted(rows: Rows, uses: Uses, slot: Scalar) -> bool:
    """Return True if the row is below its floor. A floor of 0 means that nothing has been evicted yet."""
    part = part_of(key_at(rows.floats, slot * rows.numbers[STRIDE]))
    return bool(rows.floats[stamp_at(rows, slot)] < uses.clock[FLOORS + part])


@compiled
def uncount(rows: Rows, uses: Uses, slot: Scalar) -> None:
    """Stop counting a row that is about to be removed or to get another stamp."""
    place = stamp_at(rows, slot)
    stamp, part = rows.floats[place], part_of(key_at(rows.floats, slot * rows.numbers[STRIDE]))
    if stamp > np.float32(0) and stamp >= uses.clock[FLOORS + part]:
        uses.cells[cell_of(uses, stamp, part)] -= rows.numbers[COST]
        uses.clock[TOTAL] -= rows.numbers[COST]
    rows.floats[place] = np.float32(0)


@compiled
def count_uses(index: Index, rows: Rows, uses: Uses, keys: Keys, stats: Floats) -> None:
    """Count uses of the rows of these keys, in this order. `stats` is (n, 2) float32 with shows and clicks,
    or (0, 2).
    """
    clock, cells, floats, cost = uses.clock, uses.cells, rows.floats, rows.numbers[COST]
    step, by_time = cost * clock[COST_UNIT], clock[POLICY] == BY_TIME
    weighs = clock[POLICY] == BY_SCORE and len(stats) > 0
    bases, tags, slots = work_of_block()
    for start in range(0, len(keys), BLOCK):
        stop = min(start + BLOCK, len(keys))
        locate(index, rows, keys, start, stop, rows.numbers[STRIDE], bases, tags, slots)
        will_change(rows, slots, stop - start)
        for i in range(stop - start):
            if slots[i] < 0:
                continue
            place, part = stamp_at(rows, slots[i]), part_of(keys[start + i])
            before = np.float64(floats[place])
            if before > 0.0 and before >= clock[FLOORS + part]:
                cells[cell_of(uses, before, part)] -= cost
            else:
                clock[TOTAL] += cost
            pass_until(uses, clock[NOW] + step)
            now = after = clock[NOW]
            if not by_time:
                weight = 1.0
                if weighs:
                    shows, clicks = np.float64(stats[start + i, 0]), np.float64(stats[start + i, 1])
                    weight = max(1.0, shows + (CLICK_WEIGHT - 1.0) * clicks)
                if before > 0.0:
                    weight += 2.0 ** (before - now)
                after = now + min(math.log2(weight), _HIGHEST)
            floats[place] = np.float32(after)
            cells[cell_of(uses, floats[place], part)] += cost


@compiled
def find_evicted(keys: Keys, stamps: Floats, floors: NDArray[np.float64], evicted: Mask) -> bool:
    """Set evicted[i] for a key whose stamp is below its floor or is 0 (never used). Return True if there is
    one.
    """
    found = False
    for i in range(len(keys)):
        evicted[i] = stamps[i] == np.float32(0) or stamps[i] < floors[part_of(keys[i])]
        found |= evicted[i]
    return found


@compiled
def uncount_keys(index: Index, rows: Rows, uses: Uses, keys: Keys) -> None:
    """Stop counting the existing rows of these keys, before the rows are overwritten or removed."""
    for key in keys:
        slot = slot_at(index.entries, position_of(index, rows, key))
        if slot >= 0:
            will_change(rows, np.array([slot]), 1)
            uncount(rows, uses, slot)


@compiled
def count_loaded(rows: Rows, uses: Uses, slots: Keys, passed: Scalar) -> None:
    """Count rows that were loaded with their stamps, after the clock was set back by `passed` units.

    A stamp of another clock may lie in a future without levels, so it is limited.
    """
    latest = uses.clock[NOW] + _HIGHEST
    for slot in slots:
        place = stamp_at(rows, slot)
        if rows.floats[place] > np.float32(0):
            stamp: Scalar = np.float64(rows.floats[place])
            stamp = np.float32(min(max(stamp - passed, min(stamp, ANCIENT)), latest))
            part = part_of(key_at(rows.floats, slot * rows.numbers[STRIDE]))
            rows.floats[place] = stamp
            if stamp >= uses.clock[FLOORS + part]:
                uses.cells[cell_of(uses, stamp, part)] += rows.numbers[COST]
                uses.clock[TOTAL] += rows.numbers[COST]


@compiled
def remove_evicted(index: Index, rows: Rows, uses: Uses, keys: Keys, removed_keys: Keys) -> int:
    """Remove the records of evicted rows among these keys. Write their keys to `removed_keys`, and return
    their number.
    """
    count = np.int64(0)  # with a literal 0, numba would compile every callee twice
    bases, tags, slots = work_of_block()
    for start in range(0, len(keys), BLOCK):
        stop, first = min(start + BLOCK, len(keys)), count
        locate(index, rows, keys, start, stop, np.int64(1), bases, tags, slots)
        for i in range(stop - start):
            if slots[i] >= 0 and is_evicted(rows, uses, slots[i]):
                removed_keys[count] = keys[start + i]
                count += 1
        for i in range(first, count):  # not earlier, because a removal moves slots (a key may occur twice)
            slot = slot_at(index.entries, position_of(index, rows, removed_keys[i]))
            if slot >= 0:
                remove_slot(index, rows, slot)
    return int(count)


REMOVAL = 100
"""The cost of removing a record, where looking at a record costs 1. Measured in tables larger than caches."""


@compiled
def evicted_slots(rows: Rows, uses: Uses, below: Scalar, work: Scalar, found: Keys) -> tuple[int, int]:
    """Write the slots of evicted rows to `found` until it is full. Work as `sweep`, but remove nothing."""
    count, slot, left = np.int64(0), min(np.int64(below), rows.numbers[COUNT]), np.int64(work)
    stride = rows.numbers[STRIDE]
    while slot > 0 and left > 0 and count < len(found):
        slot, left = slot - 1, left - 1
        if slot >= _AHEAD:
            prefetch(rows.floats, (slot - _AHEAD) * stride)
            prefetch(rows.floats, (slot - _AHEAD + 1) * stride - 1)
        if is_evicted(rows, uses, slot):
            found[count] = slot
            count, left = count + 1, left - REMOVAL
    return int(slot), int(count)


@compiled
def sweep(
    index: Index, rows: Rows, uses: Uses, below: Scalar, work: Scalar, removed_keys: Keys
) -> tuple[int, int]:
    """Look at the records below slot `below` and remove evicted rows, until this has cost `work`.

    Write their keys to `removed_keys`. Return the slot where to continue and the number of removed rows. The
    search runs downwards, so a row that takes the place of another row has been examined before.
    """
    numbers, floats, stride = rows.numbers, rows.floats, rows.numbers[STRIDE]
    count, slot, left = np.int64(0), min(np.int64(below), numbers[COUNT]), np.int64(work)
    found = np.empty(BLOCK, np.int64)
    while slot > 0 and left > 0:
        then, some = evicted_slots(rows, uses, slot, left, found)
        left -= slot - then + REMOVAL * some
        slot = np.int64(then)
        for i in range(some):
            prefetch_entry(index, key_at(floats, found[i] * stride))
            # The second prefetch is for the row that takes its place.
            prefetch_entry(index, key_at(floats, (numbers[COUNT] - 1 - i) * stride))
        for i in range(some):
            removed_keys[count] = key_at(floats, found[i] * stride)
            count += 1
            remove_slot(index, rows, found[i])
    return int(slot), int(count)


@compiled
def prefetch_entry(index: Index, key: Scalar) -> None:
    """Prefetch the index entry of a key."""
    base, tag = where(index, key)
    prefetch(index.entries, base + home(tag))


_AHEAD = 16  # rows


# ---- Days pass (see `rows.day_passes`).


@compiled
def shrink(
    index: Index, rows: Rows, uses: Uses, policy: Floats, start: Scalar, most: Scalar, removed_keys: Keys
) -> tuple[int, int, int]:
    """Let a day pass for at most `most` rows from slot `start` on, except rows whose day has passed already.

    Return the next slot, the number of removed rows, and this number plus the rows that were evicted earlier.
    The keys of both are in `removed_keys`. Do not call `shrink` while there is a cut.
    """
    numbers, flags = rows.numbers, rows.flags
    slot, removed, count = np.int64(start), np.int64(0), np.int64(0)  # see `remove_evicted`
    for _ in range(most):
        if slot >= numbers[COUNT]:
            break
        evicted = numbers[COST] > 0 and is_evicted(rows, uses, slot)
        due = flags[slot] & np.uint8(EVEN_DAY) != np.uint8(numbers[DAY])
        if evicted or (due and day_passes(rows, slot, policy)):
            removed_keys[count] = key_at(rows.floats, slot * numbers[STRIDE])
            count += 1
            removed += 0 if evicted else 1
            if numbers[COST] > 0:
                uncount(rows, uses, slot)
            remove_slot(index, rows, slot)
            continue
        if due:
            flags[slot] = np.uint8(numbers[DAY]) | np.uint8(CHANGED)  # valid because no cut is open
        slot += 1
    return int(slot), int(removed), int(count)


@compiled
def shrink_keys(index: Index, rows: Rows, uses: Uses, policy: Floats, keys: Keys, removed_keys: Keys) -> int:
    """Let a day pass as in `shrink`, for the rows of these keys that are not evicted. Return the number of
    removed rows.
    """
    numbers, flags, count = rows.numbers, rows.flags, np.int64(0)
    for key in keys:
        slot = slot_at(index.entries, position_of(index, rows, key))
        if slot < 0 or flags[slot] & np.uint8(EVEN_DAY) == np.uint8(numbers[DAY]):
            continue
        if numbers[COST] > 0 and is_evicted(rows, uses, slot):
            continue
        if day_passes(rows, slot, policy):
            removed_keys[count] = key
            count += 1
            if numbers[COST] > 0:
                uncount(rows, uses, slot)
            remove_slot(index, rows, slot)
        else:
            flags[slot] = np.uint8(numbers[DAY]) | np.uint8(CHANGED)
    return int(count)
