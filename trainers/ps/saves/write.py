"""Write one server's part of a save. Its tables are saved as of one moment, in the background while training
continues.

Cuts of tables become pieces, pieces are gathered into shards, and each shard is a file. Memory is bounded,
because three shards exist at a time. One is filled from a cut, and two are written. One of these two is
hashed and copied to the kernel while the other waits for the disk.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fleetrun.aliases import Callback
from fleetrun.frozen import frozen
from trainers.ps.kernels.rows import UNSAVED
from trainers.ps.saves.manifest import (
    Piece,
    PieceKind,
    SavedPart,
    SavedTable,
    SaveMode,
    Shard,
)
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.rules import state_widths
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import RowType, TableKind, TableSpec
from trainers.ps.tables.storage import Candidates, DenseCut, DenseRows, SparseCut, SparseRows
from trainers.storage.errors import SaveError, save_error
from trainers.storage.folder import Folder, Where, open_folder
from trainers.storage.manifest import FileRecord, is_name
from trainers.storage.safetensors import Tensors, pack

# ---- Cuts: the tables at one moment.


@frozen(eq=False)
class Removed:
    """Keys (n,) int64 whose rows no longer exist."""

    keys: Tensor


Chunk = SparseRows | DenseRows | Candidates | Removed
"""Content of a table, as in a file and as a table loads it."""


class Target(Protocol):
    """A table that can be loaded with SparseRows or DenseRows."""

    spec: TableSpec
    step: int

    def load(self, rows: Any, /) -> None: ...


@runtime_checkable
class SparseTarget(Protocol):
    """A sparse table, which may have candidates and budgets. `expect` receives the number of rows that are
    about to be loaded. `restore_clocks` receives the clocks of the saved tables' budgets, before their rows
    and candidates are loaded.
    """

    def restore_clocks(
        self, rows: Sequence[Sequence[float]], candidates: Sequence[Sequence[float]]
    ) -> None: ...

    def remove(self, keys: Tensor) -> None: ...

    def expect(self, rows: int) -> None: ...

    def load_candidates(self, found: Candidates) -> None: ...


@frozen(eq=False)
class TableCut:
    """A table as of the moment of the save. The clocks belong to its budgets."""

    spec: TableSpec
    cut: SparseCut | DenseCut
    candidates: Candidates | None = None
    clock: Sequence[float] = ()
    candidate_clock: Sequence[float] = ()
    alive: int | None = None

    def close(self, *, saved: bool) -> None:
        if not isinstance(self.cut, DenseCut):
            self.cut.close(saved=saved)


def cut_tables(
    tables: Iterable[SparseTable | DenseTable], mode: SaveMode, *, of: int = UNSAVED
) -> list[TableCut]:
    """Cut all tables for a save of this mode. Call it in the thread of the tables, between two requests.

    `of` is the flag of rows that have changed since the last cut of its kind. Saves, snapshots for the
    server's own recovery, and published versions each have their own changes. Raises TableError and leaves no
    cut open if a cut is already open, or if no incremental save can follow.
    """
    cuts: list[TableCut] = []
    with contextlib.ExitStack() as undo:
        undo.callback(close_cuts, cuts, saved=False)
        for table in tables:
            cuts.append(_cut(table, mode, of))  # noqa: PERF401  # see close_cuts
        undo.pop_all()
    return cuts


def close_cuts(cuts: Iterable[TableCut], *, saved: bool) -> None:
    """Close cuts that are no longer read, in the thread of the tables. `saved`: the save was committed."""
    for cut in cuts:
        cut.close(saved=saved)


def _cut(table: SparseTable | DenseTable, mode: SaveMode, of: int) -> TableCut:
    if isinstance(table, DenseTable):
        return TableCut(table.spec, table.cut())
    waiting = None if mode.values_only else table.candidates()
    mark = mode is not SaveMode.VALUES or of != UNSAVED
    clocks = table.clocks()  # before the cut, because nothing would close it without memory for these
    cut = table.cut(changed_only=mode.changes, mark=mark, of=of)
    return TableCut(table.spec, cut, waiting, *clocks, table.alive)


def row_bytes(spec: TableSpec) -> int:
    """Return the bytes of a row of a sparse table, with key, state and statistics."""
    state = sum(state_widths(spec.rule, spec.size))
    return 8 + spec.size * spec.rows.dtype.dtype.itemsize + 4 * (state + spec.statistics)


# ---- Pieces and shards.

_PIECE_BYTES = 4 << 20
"""The bytes of rows that are read from a cut in one step. They suit the allocator and the caches."""


@frozen(eq=False)
class Packed:
    """A piece and its tensors by name. `error`: see SavedTable."""

    piece: Piece
    tensors: Tensors
    error: float = 0.0

    @property
    def size(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def pieces_of(table: TableCut, mode: SaveMode, shard_bytes: int, row_type: str) -> Iterator[Packed]:
    """Yield the pieces of one table. No piece is much larger than a shard. `row_type`: the type of the rows'
    values, see SaveSpec.
    """
    for number, (kind, chunk) in enumerate(_chunks(table, mode, shard_bytes)):
        tensors, error = _tensors(chunk, mode), 0.0
        rows = len(tensors["values" if kind is PieceKind.DENSE else "keys"])
        if kind is PieceKind.ROWS and row_type:
            error = _narrow(tensors, row_type)
        yield Packed(Piece(table.spec.name, kind, number, rows), tensors, error)


def codes_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows (n, dim) in 8 bits a value: codes (n, dim) uint8, and each row's scale and offset, (n, 2)
    float32.

    A value is offset + scale * code. Codes from 0 to 255 lie between the row's smallest and largest value, as
    in FBGEMM's 8-bit row-wise quantization. The error is at most half a scale, plus the rounding of float32.
    A row with a value that is not finite becomes NaN.
    """
    low = values.amin(1, keepdim=True)
    scale = values.amax(1, keepdim=True) / 255 - low / 255
    codes = ((values - low) / torch.where(scale > 0, scale, 1.0)).round_().clamp_(0, 255).nan_to_num_(0)
    scales = torch.cat([scale, low], 1)
    scales[~scales.isfinite().all(1)] = torch.nan
    return codes.to(torch.uint8), scales


def decoded(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the values of `codes_of`, (n, dim) float32."""
    return scales[:, 1:] + scales[:, :1] * codes.float()


def _narrow(tensors: Tensors, row_type: str) -> float:
    """Convert the values to the published type. Return the largest difference of a value."""
    wide = tensors["values"].float()
    if row_type == "int8":
        tensors["values"], tensors["scales"] = codes_of(wide)
        here = decoded(tensors["values"], tensors["scales"])
    else:
        dtype = RowType.of(row_type).dtype
        most = torch.finfo(dtype).max
        tensors["values"] = torch.where(wide.isfinite(), wide.clamp(-most, most), wide).to(dtype)
        here = tensors["values"].float()
    apart = (here - wide).abs_()[here.isfinite() & wide.isfinite()]
    return float(apart.max()) if apart.numel() else 0.0


def shards_of(pieces: Iterator[Packed], shard_bytes: int, ahead: int) -> Iterator[list[Packed]]:
    """Yield pieces in groups of about `shard_bytes`. A group is valid until `ahead` more groups were taken.
    Dense and sparse pieces are kept apart, because a server that loads needs different files of each.
    """
    buffers = _shard_buffers(shard_bytes, ahead + 1)
    shard_bytes = buffers[0].size
    waiting: list[Packed] = []
    size = number = 0
    for packed in pieces:
        dense = packed.piece.kind is PieceKind.DENSE
        apart = waiting and dense != (waiting[0].piece.kind is PieceKind.DENSE)
        if waiting and (apart or size + packed.size > shard_bytes):
            yield waiting
            waiting, size, number = [], 0, number + 1
            buffers[number % len(buffers)].used = 0
        waiting.append(buffers[number % len(buffers)].kept(packed))
        size += packed.size
    if waiting:
        yield waiting


_SMALLEST_SHARD = 1 << 20
"""The smallest shard in bytes. With less memory, a save fails."""


def _shard_buffers(size: int, count: int) -> list[_ShardBuffer]:
    """Return `count` buffers of `size` bytes each. If memory is short, return smaller buffers that use at
    most half of it, because pieces and threads need memory too. Raises MemoryError.
    """
    found = size
    while found > _SMALLEST_SHARD:
        try:
            buffers = [_ShardBuffer(found) for _ in range(count)]
        except MemoryError:
            found //= 2
            continue
        if found == size:
            return buffers
        del buffers
        found //= 2
        break
    return [_ShardBuffer(min(size, max(found, _SMALLEST_SHARD))) for _ in range(count)]


class _ShardBuffer:
    """Memory for the pieces of one shard, reused for the next. The pieces' own memory is freed immediately,
    so that the next piece gets it. Fresh pages cost several times more than a copy within the caches.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._bytes = torch.from_numpy(np.empty(size, np.uint8))
        self.used = 0

    def kept(self, packed: Packed) -> Packed:
        """Return a copy in this memory, or the piece itself if it does not fit."""
        if self.used + packed.size + 8 * len(packed.tensors) > len(self._bytes):
            return packed
        copies = {name: self._copy(tensor) for name, tensor in packed.tensors.items()}
        return Packed(packed.piece, copies, packed.error)

    def _copy(self, tensor: Tensor) -> Tensor:
        stop = self.used + tensor.numel() * tensor.element_size()
        copy = self._bytes[self.used : stop].view(tensor.dtype).view(tensor.shape)
        self.used = -(-stop // 8) * 8  # int64 must start at a multiple of 8
        if tensor.dtype is torch.bfloat16:  # numpy lacks this type
            np.copyto(copy.view(torch.int16).numpy(), tensor.view(torch.int16).numpy())
        else:
            np.copyto(copy.numpy(), tensor.numpy())  # not torch, which would wake all its threads
        return copy


def _chunks(table: TableCut, mode: SaveMode, shard_bytes: int) -> Iterator[tuple[PieceKind, Chunk]]:
    cut = table.cut
    if isinstance(cut, DenseCut):
        yield PieceKind.DENSE, cut.rows
        return
    if mode.changes:  # first, because some of these may have a row again
        for removed in torch.split(cut.removed, max(1, min(shard_bytes, _PIECE_BYTES) // 8)):
            yield PieceKind.REMOVED, Removed(removed)
    step = max(1, min(shard_bytes, _PIECE_BYTES) // row_bytes(table.spec))
    for start in range(0, cut.rows, step):
        rows = cut.read(start, min(start + step, cut.rows))
        yield PieceKind.ROWS, rows
        if mode.changes and rows.removed is not None:
            yield PieceKind.REMOVED, Removed(rows.removed)
    waiting = table.candidates
    if waiting is not None and not mode.values_only:
        step = max(1, shard_bytes // 16)
        for start in range(0, len(waiting.keys), step):
            some = slice(start, start + step)
            yield PieceKind.CANDIDATES, waiting.at(some)


def _tensors(chunk: Chunk, mode: SaveMode) -> Tensors:
    if isinstance(chunk, Removed):
        return {"keys": chunk.keys}
    if isinstance(chunk, Candidates):
        columns = {"keys": chunk.keys, "counts": chunk.counts, "days": chunk.days}
        return columns if chunk.stamps is None else columns | {"stamps": chunk.stamps}
    tensors = {"values": chunk.values} if isinstance(chunk, DenseRows) else {"keys": chunk.keys}
    tensors["values"] = chunk.values
    if not mode.values_only:
        tensors |= {f"state.{number}": state for number, state in enumerate(chunk.state)}
        if not isinstance(chunk, DenseRows) and chunk.statistics is not None:
            tensors["statistics"] = chunk.statistics
    return tensors


# ---- Files.

SHARD_BYTES = 64 << 20
_WRITERS = 2
_NICENESS = 10


@frozen(kw_only=True)
class SaveSpec:
    """The task of one server: write part `server` of `servers` of the save `id`. The id comes from `new_id`,
    and is the same on every server. A shard has up to `shard_bytes`. `row_type`: float32, bfloat16, float16
    or int8 instead of the types of the rows' values in their tables.
    """

    id: str
    mode: SaveMode
    server: int
    servers: int
    shard_bytes: int = SHARD_BYTES
    row_type: str = ""

    def __post_init__(self) -> None:
        if not is_name(self.id) or not 0 <= self.server < self.servers:
            raise SaveError(f"a save cannot have id {self.id!r} and server {self.server} of {self.servers}")

    @property
    def part(self) -> str:
        return f"server-{self.server}"


class CancelledError(SaveError):
    """The save was abandoned."""


Progressed = Callable[[int], None]
"""Called regularly with the bytes packed so far. It may raise CancelledError."""


def lower_priority() -> None:
    """Lower the priority of this thread below the priority of training. On Linux, each thread has its own
    niceness. A higher niceness of the process stays.
    """
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
        os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)


def write_part(
    folder: Folder, spec: SaveSpec, cuts: Sequence[TableCut], blob: bytes | None, watch: Progressed
) -> FileRecord:
    """Write this server's files into `folder`/`spec.id`, and the part last. Return the record of the part.
    The cuts stay open. Raises SaveError and removes the written files of this part.
    """
    try:
        with contextlib.ExitStack() as undo:
            undo.callback(remove_part, folder, spec)
            folder.make(spec.id)
            tables: list[SavedTable] = []
            record = write_pieces(folder, spec, _pieces(cuts, spec, tables, watch), tables, blob)
            undo.pop_all()
            return record
    except OSError as error:
        raise save_error(error, folder.path(spec.id), folder.free()) from error
    except MemoryError as error:
        raise SaveError(
            f"The save to {folder.path(spec.id)} was stopped and removed, because no memory was left for it "
            f"({error}). Start more servers, or give them more memory. The former save is unchanged."
        ) from error


def remove_part(folder: Folder, spec: SaveSpec) -> None:
    """Remove this server's files of a save. The save's directory stays, because other servers may be writing
    into it.
    """
    for name in folder.names(spec.id):
        if name.lstrip(".").startswith((f"{spec.part}.", f"{spec.part}-")):
            folder.remove(f"{spec.id}/{name}")


def write_pieces(
    folder: Folder,
    spec: SaveSpec,
    pieces: Iterator[Packed],
    tables: Sequence[SavedTable],
    blob: bytes | None = None,
) -> FileRecord:
    """Write the files of these pieces, then the part. Return the record of the part. `tables` must be
    complete when the last piece has been taken. Raises OSError.
    """
    shards: list[Shard] = []
    pending: deque[Future[Shard]] = deque()
    with ThreadPoolExecutor(_WRITERS, "save", initializer=lower_priority) as writers:
        for number, shard in enumerate(shards_of(pieces, spec.shard_bytes, _WRITERS)):
            if len(pending) == _WRITERS:
                shards.append(pending.popleft().result())
            name = f"{spec.part}-{number:05d}.safetensors"
            pending.append(writers.submit(_write_shard, folder, spec.id, name, shard))
        shards += [future.result() for future in pending]
    record = None
    if blob is not None:
        record = FileRecord.of(f"{spec.part}.blob", [blob])
        folder.write(f"{spec.id}/{record.name}", [blob])
    text = SavedPart(spec.server, spec.servers, tuple(tables), tuple(shards), record).encode()
    folder.write(f"{spec.id}/{spec.part}.json", [text])
    return FileRecord.of(f"{spec.part}.json", [text])


def _write_shard(folder: Folder, save: str, name: str, shard: Sequence[Packed]) -> Shard:
    tensors = {
        packed.piece.prefix + key: tensor for packed in shard for key, tensor in packed.tensors.items()
    }
    content = pack(tensors, {"save": save})
    record = FileRecord.of(name, content)
    folder.write(f"{save}/{name}", content)
    return Shard(record, tuple(packed.piece for packed in shard))


_CONTENT = (PieceKind.DENSE, PieceKind.ROWS)


def _pieces(
    cuts: Sequence[TableCut], spec: SaveSpec, tables: list[SavedTable], watch: Progressed
) -> Iterator[Packed]:
    """Yield the pieces of all tables, dense tables first. Append a record to `tables` after each table."""
    packed_bytes = 0
    for table in sorted(cuts, key=lambda table: table.spec.kind is TableKind.SPARSE):
        rows, error = 0, 0.0
        for packed in pieces_of(table, spec.mode, spec.shard_bytes, spec.row_type):
            packed_bytes, error = packed_bytes + packed.size, max(error, packed.error)
            watch(packed_bytes)
            rows += packed.piece.rows if packed.piece.kind in _CONTENT else 0
            if packed.piece.rows:
                yield packed
        clocks = tuple(table.clock), tuple(table.candidate_clock)
        written = _with_type(table.spec, spec.row_type)
        tables.append(SavedTable(written, table.cut.step, rows, *clocks, error, table.alive))


def _with_type(spec: TableSpec, row_type: str) -> TableSpec:
    """Return the spec with the type in which its rows are written. Codes of 8 bits count as float32."""
    if spec.kind is not TableKind.SPARSE or not row_type:
        return spec
    dtype = RowType.FLOAT32 if row_type == "int8" else RowType.of(row_type)
    return replace(spec, rows=replace(spec.rows, dtype=dtype))


class PartTask:
    """A part that a thread of low priority writes, from construction on. `write` gets a function that returns
    True after `cancel`, and returns the part's record. `done` is called at the end, in the writing thread. If
    the task ended immediately, it is called in the constructing thread.
    """

    def __init__(
        self, name: str, write: Callable[[Callable[[], bool]], FileRecord], done: Callback | None
    ) -> None:
        self._cancelled = threading.Event()
        thread = ThreadPoolExecutor(1, name, initializer=lower_priority)
        self._future = thread.submit(write, self._cancelled.is_set)
        if done is not None:
            self._future.add_done_callback(lambda _: done())
        thread.shutdown(wait=False)

    @property
    def ended(self) -> bool:
        return self._future.done()

    @property
    def succeeded(self) -> bool:
        """True if it has ended, and `result` raises nothing."""
        return self._future.done() and not self._future.cancelled() and self._future.exception() is None

    def cancel(self) -> None:
        """Stop soon. `result` then raises CancelledError, unless everything has been written."""
        self._cancelled.set()

    def wait(self) -> None:
        """Wait until it has ended, with or without an error."""
        concurrent.futures.wait([self._future])

    def result(self, timeout: float | None = None) -> FileRecord:
        """Return the record of the part, for `commit`. Raises SaveError, or TimeoutError after `timeout`
        seconds.
        """
        return self._future.result(timeout)


class SaveTask(PartTask):
    """A part of a save. After the end, or after `cancel` and the end, the thread of the tables must call
    `close`.

    `then` is called in the writing thread with the part's record when the part is written. An error of `then`
    is the task's error. `done` is called with this task at the end. Raises MemoryError if no thread can
    start.
    """

    def __init__(
        self,
        where: Where,
        spec: SaveSpec,
        cuts: Sequence[TableCut],
        *,
        blob: bytes | None = None,
        then: Callable[[FileRecord], None] | None = None,
        done: Callable[[SaveTask], None] | None = None,
    ) -> None:
        self.spec = spec
        self._folder = open_folder(where)
        self._cuts = cuts
        self._then = then
        self.packed = 0
        """Bytes packed so far."""
        try:
            super().__init__("save", partial(self._run, blob), done and partial(done, self))
        except RuntimeError as error:
            raise MemoryError(
                f"cannot start a thread that writes to {self._folder.where}: {error}"
            ) from error

    def close(self, *, saved: bool) -> None:
        """Close the cuts after the end of the task, in the thread of the tables. `saved`: the save was
        committed, so the next incremental save starts here.
        """
        close_cuts(self._cuts, saved=saved)

    def _run(self, blob: bytes | None, cancelled: Callable[[], bool]) -> FileRecord:
        def watch(packed: int) -> None:
            if cancelled():
                raise CancelledError(
                    f"The save to {self._folder.path(self.spec.id)} was abandoned and removed."
                )
            self.packed = packed

        record = write_part(self._folder, self.spec, self._cuts, blob, watch)
        if self._then is not None:
            try:
                self._then(record)
            except OSError as error:
                raise save_error(error, self._folder.where, self._folder.free()) from error
        return record
