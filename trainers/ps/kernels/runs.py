"""Kernels of rows and updates over a run of tables. One call handles a whole request, so its cost grows with
its keys and not with the number of tables.

numba accepts no list of tables. Each table therefore publishes the addresses of its arrays as a line of
numbers, and a kernel makes the arrays again from this line. Callers must keep the tables alive and their
lines up to date. Keys are in the order of the tables. The keys of table t are at [starts[t], starts[t + 1]).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from trainers.kernels.compiled import Floats, Keys, Mask, Scalar, Words, compiled, variant
from trainers.ps.kernels import updates
from trainers.ps.kernels.eviction import FLOORS, LEVELS, PARTS, Uses, count_uses
from trainers.ps.kernels.index import BLOCK, ENOUGH, SEGMENT, SEGMENTS, Index
from trainers.ps.kernels.memory import carray, pointer
from trainers.ps.kernels.rows import (
    COUNT,
    DIM,
    DTYPE,
    ROW_NUMBERS,
    STRIDE,
    Fresh,
    Rows,
    initial_rows,
    insert,
    locate,
    pull,
    revise,
    work_of_block,
)

(
    RECORDS,
    RECORD_PLACES,
    FLAGS,
    FLAG_COUNT,
    NUMBERS,
    IMAGES,
    IMAGE_PLACES,
    IMAGE_OF,
    IMAGE_COUNT,
    CUT,
    ENTRIES,
    ENTRY_COUNT,
    DIRECTORY,
    DIRECTORY_SIZE,
    FILL,
    FILL_SIZE,
    DEPTHS,
    INDEX_NUMBERS,
    SECRETS,
    ROOM,
    CLOCK,
    CELLS,
    COLUMNS,
) = range(23)
"""Columns of a line. They hold the addresses and lengths of the arrays of `Rows`, `Index` and `Uses`. ROOM is
the number of rows for which there is memory.
"""

_MOST_KEYS = 1 << 40
"""A number above the keys of any message, and small enough that a sum does not overflow."""

NEEDS_ROOM = 3
"""The resource that `insert_run` may need to continue, besides the resources of the index."""


class Run(NamedTuple):
    """The lines of some tables, and the contents of their new rows (`Fresh` in columns)."""

    lines: Keys  # (tables, COLUMNS)
    kinds: Keys
    seeds: Words
    numbers: Floats  # (tables, 3): a, b, state


def line_of(index: Index, rows: Rows, uses: Uses, room: int) -> list[int]:
    """Return the line of a table. The arrays of the table must stay alive and must not move."""
    return [
        *(rows.floats.ctypes.data, len(rows.floats), rows.flags.ctypes.data, len(rows.flags)),
        *(rows.numbers.ctypes.data, rows.images.ctypes.data, len(rows.images)),
        *(rows.image_of.ctypes.data, len(rows.image_of), rows.cut.ctypes.data),
        *(index.entries.ctypes.data, len(index.entries), index.directory.ctypes.data, len(index.directory)),
        *(index.fill.ctypes.data, len(index.fill), index.depths.ctypes.data),
        *(index.numbers.ctypes.data, index.secret.ctypes.data, room),
        *(uses.clock.ctypes.data, uses.cells.ctypes.data),
    ]


@compiled
def index_at(lines: Keys, table: Scalar) -> Index:
    """Return the index of a table from its line."""
    line = lines[table]
    return Index(
        carray(pointer(line[ENTRIES]), (line[ENTRY_COUNT],), np.uint64),
        carray(pointer(line[DIRECTORY]), (line[DIRECTORY_SIZE],), np.uint32),
        carray(pointer(line[FILL]), (line[FILL_SIZE],), np.int32),
        carray(pointer(line[DEPTHS]), (line[FILL_SIZE],), np.int32),
        carray(pointer(line[INDEX_NUMBERS]), (2,), np.int64),
        carray(pointer(line[SECRETS]), (2,), np.uint64),
    )


@compiled
def rows_at(lines: Keys, table: Scalar) -> Rows:
    """Return the rows of a table from its line."""
    line = lines[table]
    return Rows(
        carray(pointer(line[RECORDS]), (line[RECORD_PLACES],), np.float32),
        carray(pointer(line[FLAGS]), (line[FLAG_COUNT],), np.uint8),
        carray(pointer(line[NUMBERS]), (ROW_NUMBERS,), np.int64),
        carray(pointer(line[IMAGES]), (line[IMAGE_PLACES],), np.float32),
        carray(pointer(line[IMAGE_OF]), (line[IMAGE_COUNT],), np.uint32),
        carray(pointer(line[CUT]), (4,), np.int64),
    )


@compiled
def uses_at(lines: Keys, table: Scalar) -> Uses:
    """Return the uses of a table from its line."""
    line = lines[table]
    return Uses(
        carray(pointer(line[CLOCK]), (FLOORS + PARTS,), np.float64),
        carray(pointer(line[CELLS]), (LEVELS * PARTS,), np.int64),
    )


@compiled
def fresh_at(run: Run, table: Scalar) -> Fresh:
    """Return the content of a table's new rows."""
    numbers = run.numbers[table]
    kind: Scalar = run.kinds[table]
    seed: Scalar = run.seeds[table]
    return Fresh(kind, numbers[0], numbers[1], seed, numbers[2])


@compiled
def accumulate(spans: Keys, starts: Keys) -> bool:
    """Fill `starts` as `starts_of` of `tables.run` describes. Return True if all spans are valid."""
    valid, total = True, np.int64(0)
    starts[0] = 0
    for table in range(len(spans)):
        valid &= -1 <= spans[table] < _MOST_KEYS
        total += max(0, min(spans[table], _MOST_KEYS))
        starts[table + 1] = total
    return valid


@compiled
def pull_run(lines: Keys, starts: Keys, keys: Keys, out: Floats, missing: Keys, counts: Keys) -> int:
    """Write the values of keys[i] to out[i], and return the number of keys without a row.

    For each table, `missing` receives the positions of these keys among the table's keys, from starts[t] on,
    and `counts` their number.
    """
    total = np.int64(0)
    for table in range(len(counts)):
        start, stop = starts[table], starts[table + 1]
        if start < stop:
            index, rows = index_at(lines, table), rows_at(lines, table)
            found = pull(index, rows, keys[start:stop], out[start:stop], missing[start:stop])
            counts[table] = found
            total += found
    return int(total)


@compiled
def insert_run(
    run: Run,
    starts: Keys,
    keys: Keys,
    missing: Keys,
    counts: Keys,
    slots: Keys,
    first: Scalar,
    done: Scalar,
) -> tuple[int, int, int]:
    """Insert rows for the missing keys of `pull_run`, from key `done` of table `first` on.

    Write the slots to `slots`, in the places of `missing`. Return the table, its next key, and ENOUGH or the
    resource that the table needs to continue.
    """
    for table in range(first, len(counts)):
        count = counts[table]
        if count:
            start = starts[table]
            index, rows = index_at(run.lines, table), rows_at(run.lines, table)
            if not done and rows.numbers[COUNT] + count > run.lines[table, ROOM]:
                return table, 0, NEEDS_ROOM
            new = np.empty(count, np.int64)
            for i in range(count):
                new[i] = keys[start + missing[start + i]]
            done, needs = insert(
                index, rows, fresh_at(run, table), new, np.int64(done), slots[start : start + count]
            )
            if needs != ENOUGH:
                return table, int(done), int(needs)
        done = 0
    return len(counts), 0, ENOUGH


@compiled
def initial_run(run: Run, starts: Keys, keys: Keys, missing: Keys, counts: Keys, flat: Floats) -> None:
    """Fill `flat`, (n * dim,) float32, with the initial values of the missing keys."""
    for table in range(len(counts)):
        start, stop, end = starts[table], starts[table + 1], starts[table] + counts[table]
        if start < end:
            numbers = rows_at(run.lines, table).numbers
            dim = numbers[DIM]
            target, some = flat[start * dim : stop * dim], missing[start:end]
            initial_rows(fresh_at(run, table), keys[start:stop], some, target, dim, numbers[DTYPE])


@compiled
def revise_run(lines: Keys, starts: Keys, keys: Keys, values: Floats) -> None:
    """Set the values of these keys, which must all have rows. State and statistics stay."""
    bases, tags, slots = work_of_block()
    for table in range(len(starts) - 1):
        if starts[table] < starts[table + 1]:
            index, rows = index_at(lines, table), rows_at(lines, table)
            for start in range(starts[table], starts[table + 1], BLOCK):
                stop = min(start + BLOCK, starts[table + 1])
                locate(index, rows, keys, start, stop, rows.numbers[STRIDE], bases, tags, slots)
                revise(rows, slots[: stop - start], values[start:stop])


@compiled
def without_room(lines: Keys, starts: Keys, most: Scalar, lacking: Mask) -> bool:
    """Set lacking[t] if table t might lack memory for as many new rows as it has keys here. See
    Storage.has_room. Return True if there is such a table.
    """
    found = False
    for table in range(len(lacking)):
        new, line = starts[table + 1] - starts[table], lines[table]
        if new:
            rows, index = rows_at(lines, table), index_at(lines, table)
            total, segments = rows.numbers[COUNT] + new, index.numbers[SEGMENTS] + new
            lacking[table] = (
                total > min(most, line[FLAG_COUNT])
                or total * rows.numbers[STRIDE] > line[RECORD_PLACES]
                or segments * SEGMENT > line[ENTRY_COUNT]
            )
            found |= lacking[table]
    return found


@compiled
def count_uses_run(lines: Keys, starts: Keys, keys: Keys, stats: Floats) -> None:
    """Count uses of the rows of these keys of bounded tables."""
    for table in range(len(starts) - 1):
        start, stop = starts[table], starts[table + 1]
        if start < stop:
            index, rows, uses = index_at(lines, table), rows_at(lines, table), uses_at(lines, table)
            count_uses(index, rows, uses, keys[start:stop], stats)


# ---- One step of an optimizer. Each rule has a function, and all are variants of one function (see
# `variant`).

update: Callable[..., int] = updates.on_rows(updates.sgd)


def _run(
    lines: Keys, starts: Keys, keys: Keys, grad: Floats, options: Floats, missing: Keys, counts: Keys
) -> int:
    """Run `update` for every table, and return the number of keys without a row.

    `options` (tables, ...) has one line of kernel options per table.
    """
    total = np.int64(0)
    for t in range(len(counts)):
        start, stop = starts[t], starts[t + 1]
        if start < stop:
            index, rows, some = index_at(lines, t), rows_at(lines, t), missing[start:stop]
            counts[t] = update(index, rows, keys[start:stop], grad[start:stop], options[t], some)
            total += counts[t]
    return int(total)


@cache
def run_of(kernel: Callable[..., int]) -> Callable[..., int]:
    """Return the kernel over a run of tables for the kernel of one table."""
    return variant(_run, f"{kernel.__name__}_run", update=kernel)
