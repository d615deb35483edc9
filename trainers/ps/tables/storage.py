"""Hold the memory of sparse rows and of their index. The memory grows in place, and can be read as of one
moment while training continues. The table gives the numbers their meaning.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetrun.frozen import frozen
from trainers.kernels.compiled import Floats, Keys
from trainers.ps.kernels.eviction import FLOORS, NO_USES, PARTS, Uses, find_evicted
from trainers.ps.kernels.index import (
    DEEPEST,
    DEPTH,
    NEEDS_DIRECTORY,
    SECRET,
    SEGMENT,
    SEGMENTS,
    Index,
    laid_out,
)
from trainers.ps.kernels.memory import touch_pages
from trainers.ps.kernels.rows import (
    COST,
    COUNT,
    DIM,
    DTYPE,
    NOTHING,
    READ,
    ROW_NUMBERS,
    SEED,
    STATES,
    STATISTICS,
    STEP,
    STRIDE,
    TAKEN,
    VALUES,
    WIDTH,
    Fresh,
    Rows,
    insert,
    read,
    without_row,
)
from trainers.ps.kernels.runs import COLUMNS, NEEDS_ROOM, ROOM, line_of
from trainers.ps.tables.spec import FullError, RowType, TableError

# ---- Touch memory before it is written.
#
# The system clears a page at its first use. On a virtual machine, the host may have to find a page first.
# This takes longer than everything else about a new row, up to 3 ms per MiB.


def touch_in_background(words: NDArray[np.int64], start: int, stop: int) -> Future[None]:
    """Touch bytes [start, stop) in one thread for all arenas. Others may read and write the bytes
    meanwhile.
    """
    return _thread().submit(touch_pages, words, start // 8, stop // 8)


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "memory")


# ---- Memory that grows in place.
#
# A large address space is reserved at the start and costs nothing. Memory comes page by page at the first
# write, so the content never moves. If the system refuses such a reservation (`ulimit -v`,
# vm.overcommit_memory=2), the block starts small. When it is full, it is copied to a block of twice the size.

_NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python 3.11 does not define
_SMALL = 4 << 20  # bytes in pages of 4 KiB before larger pages, so that a small table stays small
_HUGE = 2 << 20  # bytes of a larger page
_AHEAD = 32 << 20  # bytes
_FIRST = 1 << 20  # bytes of an arena without reservation
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@cache
def reservation() -> int:
    """Return the bytes of address space for one arena, which is the node's memory, or 0 if address space is
    limited.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        strict = _OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        strict = False
    if strict or limit != resource.RLIM_INFINITY:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Arena:
    """A block of zeroed memory that grows in place.

    `reserve` bytes of address space are requested. With 0, or if the system refuses, the arena grows by
    copying.
    """

    words: NDArray[np.int64]
    """The memory as int64. After `grow` it may be another array, and old views keep the old memory."""

    def __init__(self, reserve: int) -> None:
        self._touched = self._used = 0
        self._touching: Future[None] | None = None
        self._reserved = reserve > 0
        try:
            self._map(max(reserve, _FIRST), _NORESERVE if reserve else 0)
        except OSError:
            self._map(_FIRST, 0)
            self._reserved = False

    @property
    def size(self) -> int:
        """The number of usable bytes."""
        return self.words.nbytes

    def grow(self, size: int) -> None:
        """Make room for `size` bytes. Raises FullError if memory is missing."""
        if size <= self.size:
            return
        old = self.words
        try:
            self._map(max(size, 2 * self.size), 0)
        except OSError as error:
            raise FullError(
                f"not enough memory for {size >> 20} MiB of rows ({error}). Start more servers, or shrink it"
            ) from error
        self.words[: len(old)] = old

    def expect(self, size: int, scale: int | None = None) -> None:
        """Get memory for the first `size` bytes, which are about to be used, and for more in the background.

        The additional memory is at most 32 MiB and an eighth of `scale` (default `size`). A large arena that
        grows steadily thus finds its memory ready. Only arenas with a reservation do this, because the thread
        needs address space of its own.
        """
        begin, more = max(self._touched, self._used), min((scale or size) // 8, _AHEAD)
        self._used = size
        if more < _HUGE or not self._reserved:
            return
        stop = min(size + more, self.size) // _HUGE * _HUGE
        if stop - begin >= _HUGE and (self._touching is None or self._touching.done()):
            with contextlib.suppress(RuntimeError):  # threads cannot start while the interpreter exits
                self._touching = touch_in_background(self.words, begin, stop)
                self._touched = stop

    def give_back(self, size: int) -> None:
        """Return the memory after the first `size` bytes to the system. From now on it reads as zeros."""
        self._touched, self._used = min(self._touched, size), size
        start = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < self.size:
            self._block.madvise(mmap.MADV_DONTNEED, start, self.size - start)

    def _map(self, size: int, flags: int) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
        if size > _SMALL:
            block.madvise(mmap.MADV_HUGEPAGE, _SMALL, size - _SMALL)
        self._block, self.words = block, np.frombuffer(block, np.int64)


MAX_ROWS = 2_000_000_000
"""The most rows of one table on one server.

The directory of an index ends at 2**DEEPEST segments. Hashes fill the densest segment at about 2.14e9 rows, a
little earlier or later in each process, because each process has its own secret. The limit is well below this
number, so every process finds room for the rows that another process had.
"""
_ROWS_AHEAD = 1024
_WORD = 8
_PLACE = 4
_NO_IMAGES = np.empty(0, np.float32), np.empty(0, np.uint32), np.zeros(4, np.int64)


NOTHING_NEW = Fresh(NOTHING, np.float32(0), np.float32(0), np.uint64(0), np.float32(0))


def typed(places: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """Return the values in places (n, width) as a tensor (n, dim) of this type."""
    if not len(places):  # torch cannot view an empty tensor as another type
        return torch.empty(0, dim, dtype=dtype)
    return places.view(dtype)[:, :dim].contiguous()


def keys_of(records: Floats) -> Keys:
    """Return a copy of the keys of records (n, stride), (n,) int64."""
    return records[:, :VALUES].copy().view(np.int64).reshape(-1)


class Storage:
    """Records by key, with `dim` values of a type, `states` floats of optimizer state and `statistics`
    floats.

    Slots are numbered from 0 without gaps, in the order of insertion. Kernels use `rows`, `index` and `uses`.
    `seed` determines the random rounding of values that are not float32.
    """

    rows: Rows
    index: Index
    uses: Uses
    dim: int
    statistics: int
    stride: int
    """Places of 4 bytes per record."""

    def __init__(
        self,
        dim: int,
        states: int,
        statistics: int,
        reserve: int | None = None,
        *,
        dtype: RowType = RowType.FLOAT32,
        seed: int = 0,
    ) -> None:
        reserve = reservation() if reserve is None else reserve
        self.uses, self.evicts = NO_USES, False
        self.dim, self.statistics, self.dtype = dim, statistics, dtype.dtype
        width = -(-dim * self.dtype.itemsize // _PLACE)
        self.stride = VALUES + width + states + statistics
        self._records = Arena(reserve)
        self._flags = Arena(reserve // (_PLACE * self.stride))
        self._entries = Arena(min(reserve, _WORD * SEGMENT << DEEPEST))
        self._room = 0
        self._line = np.zeros(COLUMNS, np.int64)
        self.index = Index(
            entries=self._entries.words.view(np.uint64),
            directory=np.zeros(1, np.uint32),
            fill=np.zeros(16, np.int32),
            depths=np.zeros(16, np.int32),
            numbers=np.array([0, 1], np.int64),
            secret=SECRET,
        )
        numbers = np.zeros(ROW_NUMBERS, np.int64)
        numbers[[STRIDE, DIM, STATES, STATISTICS]] = self.stride, dim, states, statistics
        numbers[[DTYPE, WIDTH]] = dtype, width
        numbers[SEED] = np.array(seed, np.uint64).astype(np.int64)
        self._view_rows(numbers, *_NO_IMAGES)

    def bound(self, uses: Uses, cost: int, *, evicts: bool) -> None:
        """Put the rows in a budget. From now on, the last statistic is a stamp, and a row costs so much.

        With `evicts`, rows with a stamp below their floor no longer exist.
        """
        self.uses, self.rows.numbers[COST], self.evicts = uses, cost, evicts
        self.publish(self._line)

    def floors(self) -> NDArray[np.float64]:
        """Return a copy of the stamps below which rows do not exist, (PARTS,) float64."""
        return self.uses.clock[FLOORS:].copy() if self.evicts else np.zeros(PARTS)

    def publish(self, line: Keys) -> None:
        """Write the line of this table (see `kernels.runs`) into `line`, and use this array from now on."""
        self._line = line
        self._line[:] = line_of(*self.arrays, self.uses, self._room)

    def __len__(self) -> int:
        return int(self.rows.numbers[COUNT])

    @property
    def bytes(self) -> int:
        """The bytes in use by rows, their flags and their index."""
        segments = int(self.index.numbers[SEGMENTS])
        return len(self) * (self.stride * _PLACE + 1) + segments * SEGMENT * _WORD

    @property
    def arrays(self) -> tuple[Index, Rows]:
        """The arrays in the form for kernels."""
        return self.index, self.rows

    def begin_update(self, step: int) -> None:
        """Use this step for the random rounding of values from now on."""
        self.rows.numbers[STEP] = step

    def records(self, start: int, stop: int) -> Floats:
        """Return a view of the records of these slots, (stop - start, stride) places."""
        return self.rows.floats[start * self.stride : stop * self.stride].reshape(-1, self.stride)

    def keys(self, start: int, stop: int) -> Keys:
        """Return a copy of the keys of these slots, (stop - start,) int64."""
        return keys_of(self.records(start, stop))

    def column(self, place: int) -> Floats:
        """Return a view of the number at this place after the key, (rows,) float32."""
        return self.rows.floats[VALUES + place : len(self) * self.stride : self.stride]

    def insert(self, keys: Keys, fresh: Fresh) -> Keys:
        """Return the slots of `keys`, (n,) int64. A key without a row gets one.

        Raises FullError if memory is missing. Rows inserted before the error stay.
        """
        slots = np.empty(len(keys), np.int64)
        try:
            self._make_room(len(self) + len(keys))
        except FullError:  # most keys may have a row already
            self._make_room(len(self) + without_row(*self.arrays, keys, slots))
        done = 0
        while done < len(keys):
            done, needs = insert(*self.arrays, fresh, keys, done, slots)
            if needs:
                self.grow(needs, 0)
        return slots

    def find(self, keys: Keys) -> Keys:
        """Return the slots of `keys`, (n,) int64, with -1 for a key without a row."""
        missing, slots = np.empty(len(keys), np.int64), np.full(len(keys), -1)
        here = np.ones(len(keys), np.bool_)
        here[missing[: without_row(*self.arrays, keys, missing)]] = False
        found = np.empty(np.count_nonzero(here), np.int64)
        insert(*self.arrays, NOTHING_NEW, keys[here], 0, found)
        slots[here] = found
        return slots

    def grow(self, needs: int, rows: int) -> None:
        """Provide what the kernels need to insert `rows` more rows. Raises FullError if memory is missing."""
        if needs == NEEDS_DIRECTORY:
            depth = int(self.index.numbers[DEPTH])
            if depth == DEEPEST:
                raise FullError(f"the index of a table is full at {len(self)} rows. Start more servers")
            self._set_index(directory=np.repeat(self.index.directory, 2))
            self.index.numbers[DEPTH] = depth + 1
        elif needs == NEEDS_ROOM:
            total = len(self) + rows
            self._make_room(total)
            fit = min(self._flags.size, self._records.size // (self.stride * _PLACE), MAX_ROWS)
            self._make_room(max(total, min(total + _ROWS_AHEAD, fit)))  # so that growth is rarely needed
        else:
            segments = int(self.index.numbers[SEGMENTS])
            self._entries.grow((segments + 1) * SEGMENT * _WORD)
            fill, depths = self.index.fill, self.index.depths
            if segments == len(fill):
                fill, depths = np.append(fill, np.zeros_like(fill)), np.append(depths, np.zeros_like(depths))
            entries = self._entries.words.view(np.uint64)
            self._set_index(entries=entries, fill=fill, depths=depths)

    def has_room(self, rows: int) -> bool:
        """Return True if so many new rows certainly fit into the reserved memory.

        In the worst case, each row splits a segment of the index.
        """
        total, segments = len(self) + rows, int(self.index.numbers[SEGMENTS]) + rows
        return (
            total <= min(MAX_ROWS, self._flags.size)
            and total * self.stride * _PLACE <= self._records.size
            and segments * SEGMENT * _WORD <= self._entries.size
        )

    def expect(self, rows: int) -> None:
        """Prepare for `rows` rows in all. Get memory in the background. If the table is empty, lay out the
        index so that segments need no split meanwhile.
        """
        rows = min(rows, MAX_ROWS)
        if not len(self):
            index = laid_out(self.index, rows)
            self._entries.grow(int(index.numbers[SEGMENTS]) * SEGMENT * _WORD)
            self.index = index._replace(entries=self._entries.words.view(np.uint64))
            self.publish(self._line)
        self._make_room(rows)

    def begin_cut(self, images: Floats, image_of: NDArray[np.uint32]) -> None:
        """Copy rows to an image before they change, from now on."""
        cut = np.array([1, len(self), 0, 0], np.int64)
        self._view_rows(self.rows.numbers, images, image_of, cut)

    def end_cut(self) -> None:
        """Stop keeping images. Existing images are freed once unused."""
        self._view_rows(self.rows.numbers, *_NO_IMAGES)

    def give_back(self) -> None:
        """Return memory after the last row to the system."""
        self._records.give_back(len(self) * self.stride * _PLACE)
        self._flags.give_back(len(self))
        self._room = self._line[ROOM] = len(self)

    def _set_index(self, **arrays: NDArray[Any]) -> None:
        self.index = self.index._replace(**arrays)
        self.publish(self._line)

    def _view_rows(
        self,
        numbers: NDArray[np.int64],
        images: Floats,
        image_of: NDArray[np.uint32],
        cut: NDArray[np.int64],
    ) -> None:
        self.rows = Rows(
            floats=self._records.words.view(np.float32),
            flags=self._flags.words.view(np.uint8),
            numbers=numbers,
            images=images,
            image_of=image_of,
            cut=cut,
        )
        self.publish(self._line)

    def _make_room(self, rows: int) -> None:
        if rows > MAX_ROWS:
            raise FullError(
                f"{rows:,} rows are too many for one server (at most {MAX_ROWS:,} per table). Start more "
                "servers"
            )
        size = rows * self.stride * _PLACE
        if size > self._records.size or rows > self._flags.size:
            try:
                self._records.grow(size)
                self._flags.grow(rows)
            finally:  # if only one of them grew, its former memory must not be used
                self._view_rows(self.rows.numbers, self.rows.images, self.rows.image_of, self.rows.cut)
        self._entries.expect(int(self.index.numbers[SEGMENTS]) * SEGMENT * _WORD)
        self._records.expect(size)
        self._room = self._line[ROOM] = max(self._room, rows)


# ---- Cuts show a table as of one moment, while training continues.


@frozen(eq=False)
class SparseRows:
    """Rows of a sparse table."""

    keys: Tensor
    """(n,) int64."""
    values: Tensor
    """(n, dim) float32, or the type of the table."""
    state: tuple[Tensor, ...]
    """(n, dim) float32 for each state, then (n, 1) float32 for each row-wise state."""
    statistics: Tensor | None = None
    """(n, columns) float32, or None. The columns are show, click and unseen days if the table counts them,
    and the stamp if the table is bounded.
    """
    removed: Tensor | None = None
    """The keys of rows that no longer exist."""


def split_records(storage: Storage, records: Floats, row_states: int) -> SparseRows:
    """Return copies of the parts of records (n, stride), which have so many row-wise states."""
    numbers = storage.rows.numbers
    width, dim, states = int(numbers[WIDTH]), int(numbers[DIM]), int(numbers[STATES])
    places = torch.from_numpy(records[:, VALUES : VALUES + width].copy())
    begin, end = VALUES + width, VALUES + width + states
    full = [torch.from_numpy(records[:, at : at + dim].copy()) for at in range(begin, end - row_states, dim)]
    of_row = [torch.from_numpy(records[:, at : at + 1].copy()) for at in range(end - row_states, end)]
    return SparseRows(
        torch.from_numpy(keys_of(records)),
        typed(places, storage.dtype, dim),
        (*full, *of_row),
        torch.from_numpy(records[:, end : end + int(numbers[STATISTICS])].copy()),
    )


@frozen(eq=False)
class Candidates:
    """Keys that do not have a row yet."""

    keys: Tensor
    """(n,) int64."""
    counts: Tensor
    """The number of pulls of each key, (n,) float32."""
    days: Tensor
    """The days since the last pull, (n,) float32."""
    stamps: Tensor | None = None
    """The stamps of a bounded table, (n,) float32, or None."""

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """All columns that exist."""
        columns = (self.keys, self.counts, self.days)
        return columns if self.stamps is None else (*columns, self.stamps)

    def at(self, some: slice | Tensor) -> Candidates:
        return Candidates(*(column[some] for column in self.columns))


@frozen(eq=False)
class DenseRows:
    """The content of a dense table."""

    values: Tensor
    """(size,) float32."""
    state: tuple[Tensor, ...]
    """(size,) float32 for each state."""


@frozen(eq=False)
class DenseCut:
    """A copy of a dense table as of its step."""

    rows: DenseRows
    step: int


class SparseCut:
    """A view of a sparse table as of one moment. A `with` block closes it, and it counts as saved unless the
    block fails. See Cut for the methods.
    """

    rows: int
    """The number of slots to read, ascending."""
    step: int
    """Updates of the table so far."""
    removed: Tensor
    """Keys whose rows were removed since the last save. Some of these keys may have a row again."""

    def read(self, start: int, stop: int) -> SparseRows:
        raise NotImplementedError

    def close(self, *, saved: bool = True) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(saved=kind is None)


class Cut(SparseCut):
    """A copy-on-write view of a sparse table as of the call of `SparseTable.cut`.

    Read the slots upwards from 0. `removed` holds the keys since the last cut with `mark`. If `changed` is
    not 0, the cut contains only rows with this flag. `read` may run in any thread, but `close` must run in
    the table's thread.
    """

    def __init__(
        self,
        storage: Storage,
        states: int,
        row_states: int,
        step: int,
        changed: int,
        removed: Keys,
        ended: Callable[[bool], None],
    ) -> None:
        self.rows, self.step = len(storage), step
        self.removed = torch.from_numpy(removed)
        self._storage, self._changed, self._ended = storage, changed, ended
        self._states, self._row_states = states, row_states
        self._floors = storage.floors()
        # Address space for an image of every row, and for the number of each row's image.
        sizes = (_PLACE * self.rows * storage.stride, 4 * self.rows)
        arenas = [Arena(size if reservation() else 0) for size in sizes]
        for arena, size in zip(arenas, sizes, strict=True):
            arena.grow(size)
        self._images, self._image_of = arenas
        self._open = True
        storage.begin_cut(self._images.words.view(np.float32), self._image_of.words.view(np.uint32))
        self.expect(0)

    def expect(self, changes: int) -> None:
        """Get memory for the images of so many rows that are about to change. Call it in the table's
        thread.
        """
        record = _PLACE * self._storage.stride
        taken = min(int(self._storage.rows.cut[TAKEN]) + changes, self.rows)
        self._images.expect(taken * record, self.rows * record)

    def read(self, start: int, stop: int) -> SparseRows:
        """Return the slots [start, stop) as of the cut. A cut of changed rows returns only these, so perhaps
        fewer.

        Read upwards, because images of earlier rows are no longer kept. Raises TableError for a step back,
        for a range outside the cut, and after `close`.
        """
        rows = self._storage.rows
        if not self._open:
            raise TableError("this cut is closed and cannot be read")
        if not int(rows.cut[READ]) <= start <= stop <= self.rows:
            raise TableError(
                f"slots {start} to {stop} cannot be read: the cut has {self.rows} slots, of which "
                f"{int(rows.cut[READ])} were read"
            )
        count, dim, statistics = stop - start, self._storage.dim, self._storage.statistics
        keys, places = np.empty(count, np.int64), torch.empty(count, int(rows.numbers[WIDTH]))
        state = np.empty((self._states, count, dim), np.float32)
        of_row = np.empty((count, self._row_states), np.float32)
        counts = np.empty((count, statistics), np.float32)
        below, width = self._floors.max(), places.numpy()
        found = read(rows, start, stop, self._changed, below, keys, width, state, of_row, counts)
        rows.cut[READ] = stop
        keys, counts, state, of_row = keys[:found], counts[:found], state[:, :found], of_row[:found]
        values = typed(places[:found], self._storage.dtype, dim)
        removed = None
        evicted = np.zeros(found, np.bool_)
        if self._storage.evicts and find_evicted(keys, counts[:, -1], self._floors, evicted):
            removed = torch.from_numpy(keys[evicted])
            kept = ~evicted
            keys, of_row, counts = keys[kept], of_row[kept], counts[kept]
            state, values = state[:, kept], values[torch.from_numpy(kept)]
        row_states = (
            torch.from_numpy(of_row[:, number].copy()).view(-1, 1) for number in range(self._row_states)
        )
        return SparseRows(
            torch.from_numpy(keys),
            values,
            (*(torch.from_numpy(each) for each in state), *row_states),
            torch.from_numpy(counts) if statistics else None,
            removed,
        )

    def close(self, *, saved: bool = True) -> None:
        """End the cut and free its images. You may close a cut twice.

        If it is `saved` and every row was read, a cut with `mark` marks rows as unchanged that have not
        changed since.
        """
        if self._open:
            self._open = False
            self._ended(saved and int(self._storage.rows.cut[READ]) == self.rows)
