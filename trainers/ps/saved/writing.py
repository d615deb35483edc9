"""Writing: one server's part of a save, from cuts of its tables to files. Knows the order of the files and
how many are under way; leaves threads to `task` and the manifest to `saves`.

Memory is bounded: three shards exist at once, one being filled from a cut and two being written, so that one
is hashed and copied to the kernel while another waits for the disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from trainers.ps.saved.container import pack
from trainers.ps.saved.errors import SaveError, save_error
from trainers.ps.saved.folder import Folder
from trainers.ps.saved.manifest import FileRecord, PieceKind, SavedPart, SavedTable, Shard, is_name
from trainers.ps.saved.modes import SaveMode
from trainers.ps.saved.packing import Packed, dense_first, pieces_of, shards_of
from trainers.ps.saved.source import TableCut

SHARD_BYTES = 64 << 20
_WRITERS = 2
_NICE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """What all servers of one save are told. `id`: from `new_id`, the same on every server; the mode
    decides what is kept. `server` of `servers` is this one. A shard holds up to `shard_bytes`.
    """

    id: str
    mode: SaveMode
    step: int
    server: int
    servers: int
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        if not is_name(self.id) or not 0 <= self.server < self.servers:
            raise SaveError(f"a save of id {self.id!r} for server {self.server} of {self.servers}")

    @property
    def part(self) -> str:
        return f"server-{self.server}"


class CancelledError(SaveError):
    """The save was given up because the server stops."""


Watch = Callable[[int, int], None]
"""Called now and then with (slots walked, bytes packed); may raise CancelledError."""


def step_back() -> None:
    """This thread gives way to those that train: on Linux a thread has a niceness of its own. In a process
    that was started with a higher one it stays there.
    """
    thread = threading.get_native_id()
    if os.getpriority(os.PRIO_PROCESS, thread) < _NICE:
        os.setpriority(os.PRIO_PROCESS, thread, _NICE)


def write_part(
    folder: Folder, order: SaveOrder, cuts: Sequence[TableCut], blob: bytes | None, watch: Watch
) -> FileRecord:
    """Write this server's files into `folder`/`order.id` and return the record of the part, which is
    written last. Leaves the cuts open. Raises SaveError; then what was written of this part is removed.
    """
    try:
        with contextlib.ExitStack() as half:
            half.callback(remove_part, folder, order)
            record = _write(folder, order, cuts, blob, watch)
            half.pop_all()
            return record
    except OSError as error:
        raise save_error(error, folder.path(order.id), folder.free()) from error


def remove_part(folder: Folder, order: SaveOrder) -> None:
    """Remove what this server wrote of a save. The save's folder stays: others may be writing into it."""
    for name in folder.names(order.id):
        if name.lstrip(".").startswith((f"{order.part}.", f"{order.part}-")):
            folder.remove(f"{order.id}/{name}")


def _write(
    folder: Folder, order: SaveOrder, cuts: Sequence[TableCut], blob: bytes | None, watch: Watch
) -> FileRecord:
    folder.make(order.id)
    tables: list[SavedTable] = []
    shards: list[Shard] = []
    pending: deque[Future[Shard]] = deque()
    pieces = _pieces(cuts, order, tables, watch)
    with ThreadPoolExecutor(_WRITERS, "save", initializer=step_back) as writers:
        for number, shard in enumerate(shards_of(pieces, order.shard_bytes, _WRITERS)):
            if len(pending) == _WRITERS:
                shards.append(pending.popleft().result())
            name = f"{order.part}-{number:05d}.safetensors"
            pending.append(writers.submit(_write_shard, folder, order.id, name, shard))
        shards += [future.result() for future in pending]
    record = None
    if blob is not None:
        record = FileRecord.of(f"{order.part}.blob", [blob])
        folder.write(f"{order.id}/{record.name}", [blob])
    text = SavedPart(order.server, order.servers, tuple(tables), tuple(shards), record).encode()
    folder.write(f"{order.id}/{order.part}.json", [text])
    return FileRecord.of(f"{order.part}.json", [text])


def _write_shard(folder: Folder, save: str, name: str, shard: Sequence[Packed]) -> Shard:
    tensors = {
        packed.piece.prefix + key: tensor for packed in shard for key, tensor in packed.tensors.items()
    }
    content = pack(tensors, {"save": save})
    record = FileRecord.of(name, content)
    folder.write(f"{save}/{name}", content)
    return Shard(record, tuple(packed.piece for packed in shard))


def _pieces(
    cuts: Sequence[TableCut], order: SaveOrder, tables: list[SavedTable], watch: Watch
) -> Iterator[Packed]:
    """Pieces of all tables; `tables` gets a record as each is done."""
    before = packed_bytes = 0
    for table in dense_first(cuts):
        rows = 0
        for walked, packed in pieces_of(table, order.mode, order.shard_bytes):
            packed_bytes += packed.size
            watch(before + walked, packed_bytes)
            rows += packed.piece.rows if packed.piece.kind is not PieceKind.CANDIDATES else 0
            if packed.piece.rows:
                yield packed
        before += table.slots
        tables.append(SavedTable(table.spec, table.cut.step, rows))
