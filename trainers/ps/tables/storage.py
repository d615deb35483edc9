"""Memory of sparse rows and of their index: how it grows in place, and how it is read as of one moment while
training continues. The meaning of the numbers belongs to the table.
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

# ---- Touching memory before it is written.
#
# The system clears a page at its first use. On a virtual machine the host may have to find one first, which
# takes longer than everything else about a new row: up to 3 ms per MiB.


def touch_in_background(words: NDArray[np.int64], start: int, stop: int) -> Future[None]:
    """Touch bytes [start, stop), in one thread for all; others may read and write them meanwhile."""
    return _thread().submit(touch_pages, words, start // 8, stop // 8)


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "memory")


# ---- A large address space is reserved at the start and costs nothing: memory comes page by page when it is
# first written, so its content never moves. Where the system refuses such a reservation (`ulimit -v`,
# vm.overcommit_memory=2), the block starts small and is copied to one of twice the size when it is full.

_NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python 3.11 does not name
_SMALL = 4 << 20  # bytes in pages of 4 KiB before larger ones, so that a small table stays small
_HUGE = 2 << 20  # bytes of a larger page
_AHEAD = 32 << 20  # bytes
_FIRST = 1 << 20  # bytes of an arena without reservation
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@cache
def reservation() -> int:
    """Bytes of address space for one arena: the machine's memory, or 0 where address space is limited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        strict = _OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        strict = False
    if strict or limit != resource.RLIM_INFINITY:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Arena:
    """One block of zeroed memory that grows in place. `words` is the memory as int64. After `grow` it may be
    another array; old views keep the old memory.

    `reserve` bytes of address space are requested; with 0, or when that is refused, the arena grows by
    copying.
    """

    words: NDArray[np.int64]

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
        """Usable bytes."""
        return self.words.nbytes

    def grow(self, size: int) -> None:
        """Make room for `size` bytes. Raises FullError."""
        if size <= self.size:
            return
        old = self.words
        try:
            self._map(max(size, 2 * self.size), 0)
        except OSError as error:
            raise FullError(
                f"no memory for {size >> 20} MiB of rows ({error}); start more servers, or shrink the table"
            ) from error
        self.words[: len(old)] = old

    def expect(self, size: int, scale: int | None = None) -> None:
        """The first `size` bytes are about to be used: get memory for them and some more in the background,
        at most 32 MiB and an eighth of `scale` (default: `size`), so that a large arena that grows steadily
        finds its memory ready. Only with a reservation: the thread needs address space of its own.
        """
        begin, more = max(self._touched, self._used), min((scale or size) // 8, _AHEAD)
        self._used = size
        if more < _HUGE or not self._reserved:
            return
        stop = min(size + more, self.size) // _HUGE * _HUGE
        if stop - begin >= _HUGE and (self._touching is None or self._touching.done()):
            with contextlib.suppress(RuntimeError):  # no thread starts while the interpreter exits
                self._touching = touch_in_background(self.words, begin, stop)
                self._touched = stop

    def give_back(self, size: int) -> None:
        """Return the memory behind the first `size` bytes to the system; it reads as zeros from now on."""
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
"""Rows of one table on one server. The directory of an index ends at 2**DEEPEST segments, and hashes fill the
densest of them at about 2.14e9 rows: a little earlier or later in each process, as each has its own secret.
So the limit is a good deal below, where every process finds room for what another had.
"""
_ROWS_AHEAD = 1024
_WORD = 8
_PLACE = 4
_NO_IMAGES = np.empty(0, np.float32), np.empty(0, np.uint32), np.zeros(4, np.int64)


NOTHING_NEW = Fresh(NOTHING, np.float32(0), np.float32(0), np.uint64(0), np.float32(0))


def typed(places: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """(n, dim) of this type: the values in places (n, width)."""
    if not len(places):  # torch does not view nothing as another type
        return torch.empty(0, dim, dtype=dtype)
    return places.view(dtype)[:, :dim].contiguous()


def keys_of(records: Floats) -> Keys:
    """(n,) int64: the keys of records (n, stride), a copy."""
    return records[:, :VALUES].copy().view(np.int64).reshape(-1)


class Storage:
    """Records of `dim` values of a type, `states` floats of optimizer state and `statistics` floats, by key.
    Slots are numbered from 0 without gaps, in the order of insertion. `rows`, `index` and `uses` are what
    kernels take. `seed`: of the random rounding of values that are not float32.
    """

    rows: Rows
    index: Index
    uses: Uses
    dim: int
    statistics: int
    stride: int
    """Places of 4 bytes of a record."""

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
        """From now on the last of the statistics is a stamp, and a row costs so much of this budget.
        `evicts`: those with a stamp below their floor do not exist any more.
        """
        self.uses, self.rows.numbers[COST], self.evicts = uses, cost, evicts
        self.publish(self._line)

    def floors(self) -> NDArray[np.float64]:
        """(PARTS,): the stamps below which rows do not exist, a copy."""
        return self.uses.clock[FLOORS:].copy() if self.evicts else np.zeros(PARTS)

    def publish(self, line: Keys) -> None:
        """From now on keep the line of this table (see `kernels.runs`) here."""
        self._line = line
        self._line[:] = line_of(*self.arrays, self.uses, self._room)

    def __len__(self) -> int:
        return int(self.rows.numbers[COUNT])

    @property
    def bytes(self) -> int:
        """In use: of the rows, their flags and their index."""
        segments = int(self.index.numbers[SEGMENTS])
        return len(self) * (self.stride * _PLACE + 1) + segments * SEGMENT * _WORD

    @property
    def arrays(self) -> tuple[Index, Rows]:
        """As kernels take them."""
        return self.index, self.rows

    def begin_update(self, step: int) -> None:
        """Values that are rounded at random from now on are those of this step."""
        self.rows.numbers[STEP] = step

    def records(self, start: int, stop: int) -> Floats:
        """(stop - start, stride) places: those of these slots, a view."""
        return self.rows.floats[start * self.stride : stop * self.stride].reshape(-1, self.stride)

    def keys(self, start: int, stop: int) -> Keys:
        """(stop - start,) int64: those of these slots, a copy."""
        return keys_of(self.records(start, stop))

    def column(self, place: int) -> NDArray[np.float32]:
        """(rows,): of each record the number at this place behind the key; a view."""
        return self.rows.floats[VALUES + place : len(self) * self.stride : self.stride]

    def insert(self, keys: Keys, fresh: Fresh) -> Keys:
        """The slots of `keys`, (n,); a key without a row gets one. Raises FullError; rows inserted before
        that stay.
        """
        slots = np.empty(len(keys), np.int64)
        try:
            self._make_room(len(self) + len(keys))
        except FullError:  # most of them may have a row
            self._make_room(len(self) + without_row(*self.arrays, keys, slots))
        done = 0
        while done < len(keys):
            done, needs = insert(*self.arrays, fresh, keys, done, slots)
            if needs:
                self.grow(needs, 0)
        return slots

    def find(self, keys: Keys) -> Keys:
        """The slots of `keys`, (n,); -1 for a key without a row."""
        missing, slots = np.empty(len(keys), np.int64), np.full(len(keys), -1)
        here = np.ones(len(keys), np.bool_)
        here[missing[: without_row(*self.arrays, keys, missing)]] = False
        found = np.empty(np.count_nonzero(here), np.int64)
        insert(*self.arrays, NOTHING_NEW, keys[here], 0, found)
        slots[here] = found
        return slots

    def grow(self, needs: int, rows: int) -> None:
        """What the kernels need to insert `rows` more rows. Raises FullError."""
        if needs == NEEDS_DIRECTORY:
            self._double_directory()
        elif needs == NEEDS_ROOM:
            total = len(self) + rows
            self._make_room(total)
            fit = min(self._flags.size, self._records.size // (self.stride * _PLACE), MAX_ROWS)
            self._make_room(max(total, min(total + _ROWS_AHEAD, fit)))  # so that it is rarely asked for
        else:
            self._more_segments()

    def has_room(self, rows: int) -> bool:
        """Whether so many new rows certainly fit into the memory that is reserved. Each splits a segment of
        the index at worst.
        """
        total, segments = len(self) + rows, int(self.index.numbers[SEGMENTS]) + rows
        return (
            total <= min(MAX_ROWS, self._flags.size)
            and total * self.stride * _PLACE <= self._records.size
            and segments * SEGMENT * _WORD <= self._entries.size
        )

    def expect(self, rows: int) -> None:
        """Prepare for `rows` rows in all: get memory in the background and, if the table is empty, lay out
        the index so that no segment needs to be split meanwhile.
        """
        rows = min(rows, MAX_ROWS)
        if not len(self):
            index = laid_out(self.index, rows)
            self._entries.grow(int(index.numbers[SEGMENTS]) * SEGMENT * _WORD)
            self.index = index._replace(entries=self._entries.words.view(np.uint64))
            self.publish(self._line)
        self._make_room(rows)

    def begin_cut(self, images: NDArray[np.float32], image_of: NDArray[np.uint32]) -> None:
        """From now on rows are copied to an image before they change."""
        cut = np.array([1, len(self), 0, 0], np.int64)
        self._view_rows(self.rows.numbers, images, image_of, cut)

    def end_cut(self) -> None:
        """Stop keeping images; existing ones are freed once unused."""
        self._view_rows(self.rows.numbers, *_NO_IMAGES)

    def give_back(self) -> None:
        """Return memory behind the last row to the system."""
        self._records.give_back(len(self) * self.stride * _PLACE)
        self._flags.give_back(len(self))
        self._room = self._line[ROOM] = len(self)

    def _set_index(self, **arrays: NDArray[Any]) -> None:
        self.index = self.index._replace(**arrays)
        self.publish(self._line)

    def _view_rows(
        self,
        numbers: NDArray[np.int64],
        images: NDArray[np.float32],
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
                f"{rows:,} rows are too many for one server (at most {MAX_ROWS:,} a table); start more "
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

    def _double_directory(self) -> None:
        depth = int(self.index.numbers[DEPTH])
        if depth == DEEPEST:
            raise FullError(f"the index of a table is full at {len(self)} rows; start more servers")
        self._set_index(directory=np.repeat(self.index.directory, 2))
        self.index.numbers[DEPTH] = depth + 1

    def _more_segments(self) -> None:
        segments = int(self.index.numbers[SEGMENTS])
        self._entries.grow((segments + 1) * SEGMENT * _WORD)
        fill, depths = self.index.fill, self.index.depths
        if segments == len(fill):
            fill, depths = np.append(fill, np.zeros_like(fill)), np.append(depths, np.zeros_like(depths))
        entries = self._entries.words.view(np.uint64)
        self._set_index(entries=entries, fill=fill, depths=depths)


# ---- Cuts: a table as of one moment, read while training continues.


@frozen(eq=False)
class SparseRows:
    """Rows of a sparse table: keys (n,) int64; values (n, dim) float32, or of the type that the table has; a
    (n, dim) float32 for each state, then a (n, 1) for each row-wise state; statistics (n, columns) float32
    (show, click, unseen days if it counts them, stamp if it is bounded) or None. `removed`: keys of rows that
    do not exist any more.
    """

    keys: Tensor
    values: Tensor
    state: tuple[Tensor, ...]
    statistics: Tensor | None = None
    removed: Tensor | None = None


def split_records(storage: Storage, records: Floats, row_states: int) -> SparseRows:
    """(n, stride) places of a storage with so many row-wise states: copies."""
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
    """Keys (n,) int64 without a row yet, how often each was pulled, days since then, and the stamps of a
    bounded table, (n,) float32.
    """

    keys: Tensor
    counts: Tensor
    days: Tensor
    stamps: Tensor | None = None

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """All that there are."""
        columns = (self.keys, self.counts, self.days)
        return columns if self.stamps is None else (*columns, self.stamps)

    def at(self, some: slice | Tensor) -> Candidates:
        return Candidates(*(column[some] for column in self.columns))


@frozen(eq=False)
class DenseRows:
    """A dense table: values (size,) float32, and a (size,) float32 for each state."""

    values: Tensor
    state: tuple[Tensor, ...]


@frozen(eq=False)
class DenseCut:
    """A copy of a dense table as of its step."""

    rows: DenseRows
    step: int


class Closing:
    """A cut that a `with` block closes, as saved unless the block fails."""

    def close(self, *, saved: bool = True) -> None:
        """See Cut.close."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(saved=kind is None)


class Cut(Closing):
    """Copy-on-write view of a sparse table as of the moment when `SparseTable.cut` was called.

    `rows` slots must be read upwards from 0; `step` is the table's at that moment, and `removed` are the keys
    of rows that were removed before it, since the last cut with `mark`; some may have a row again. `changed`:
    only rows with this flag; 0: all. `read` may
    run in another thread than the table's, `close` must run in the table's thread; leaving a `with` block
    closes too.
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
        self._images, self._image_of = _room_for(self.rows, storage.stride)
        self._open = True
        storage.begin_cut(self._images.words.view(np.float32), self._image_of.words.view(np.uint32))
        self.expect(0)

    def expect(self, changes: int) -> None:
        """Get memory for the images of so many rows that are about to change. In the table's thread."""
        record = _PLACE * self._storage.stride
        taken = min(int(self._storage.rows.cut[TAKEN]) + changes, self.rows)
        self._images.expect(taken * record, self.rows * record)

    def read(self, start: int, stop: int) -> SparseRows:
        """Slots [start, stop) as of the cut; a cut of changed rows returns only those, so perhaps fewer.

        Must go upwards: rows that were read are no longer kept. Raises TableError for a step back, a range
        outside the cut, and after `close`.
        """
        rows = self._storage.rows
        if not self._open:
            raise TableError("this cut is closed and cannot be read any more")
        if not int(rows.cut[READ]) <= start <= stop <= self.rows:
            raise TableError(
                f"slots {start} to {stop} cannot be read: the cut has {self.rows}, of which "
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
        """End the cut and free its images. With `saved`, and if every row was read, a cut with `mark` marks
        all rows as unchanged that have not changed since. Closing twice is allowed.
        """
        if self._open:
            self._open = False
            self._ended(saved and int(self._storage.rows.cut[READ]) == self.rows)


def _room_for(rows: int, stride: int) -> tuple[Arena, Arena]:
    """Address space for an image of every row, and for the number of each row's image."""
    sizes = (_PLACE * rows * stride, 4 * rows)
    arenas = tuple(Arena(size if reservation() else 0) for size in sizes)
    for arena, size in zip(arenas, sizes, strict=True):
        arena.grow(size)
    return arenas[0], arenas[1]
