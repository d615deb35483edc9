"""Reading: a save's parts and shards, checked against the manifest. Knows files and checksums; leaves who
needs which rows to `loading` and `values`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from trainers.ps.saved.container import ContainerError, unpack
from trainers.ps.saved.errors import LoadError, load_error
from trainers.ps.saved.folder import Folder, open_folder
from trainers.ps.saved.manifest import (
    FileRecord,
    ManifestError,
    Piece,
    PieceKind,
    SavedPart,
    SavedTable,
    Shard,
)
from trainers.ps.saved.modes import SaveMode
from trainers.ps.saved.saves import current
from trainers.ps.saved.source import Candidates, Chunk, counts_of
from trainers.ps.tables.cut import DenseRows, Rows
from trainers.ps.tables.spec import TableSpec


@dataclass(frozen=True, slots=True)
class OpenSave:
    """One save and its parts, in the order of servers."""

    id: str
    mode: SaveMode
    step: int
    parts: tuple[SavedPart, ...]


@dataclass(frozen=True, slots=True)
class OpenFolder:
    """The saves that make up the tables of a folder, in the order in which they are applied."""

    folder: Folder
    saves: tuple[OpenSave, ...]

    @property
    def values_only(self) -> bool:
        return self.saves[0].mode is SaveMode.VALUES

    def tables(self) -> dict[str, SavedTable]:
        """Every table by name, as the last save that has it; sparse ones as the first of its servers."""
        found: dict[str, SavedTable] = {}
        for save in reversed(self.saves):
            for part in save.parts:
                for table in part.tables:
                    found.setdefault(table.spec.name, table)
        return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """A shard to read, of a part in a save's folder."""

    save: str
    part: SavedPart
    shard: Shard


def open_saves(where: str | os.PathLike[str]) -> OpenFolder:
    """Read the manifest and every part that it names. Raises LoadError."""
    manifest = current(where)
    folder = open_folder(where)
    saves = []
    for save in manifest.saves:
        parts = tuple(_part(folder, save.id, record) for record in save.parts)
        complete = [part.server for part in parts] == list(range(len(parts)))
        if not parts or not complete or any(part.servers != len(parts) for part in parts):
            servers = [f"{part.server} of {part.servers}" for part in parts]
            raise LoadError(
                f"{folder.path(save.id)} has the parts of servers {servers}: not all, or of several jobs"
            )
        saves.append(OpenSave(save.id, save.mode, save.step, parts))
    return OpenFolder(folder, tuple(saves))


def check_sizes(folder: Folder, wanted: Sequence[Wanted]) -> None:
    """Whether every file is there with its size: cheap, and done before the first row is loaded."""
    for want in wanted:
        name = f"{want.save}/{want.shard.file.name}"
        try:
            size = folder.size(name)
        except OSError as error:
            raise load_error(error, folder.path(name)) from error
        if size != want.shard.file.size:
            raise LoadError(_wrong_size(folder.path(name), size, want.shard.file.size))


def read_file(
    folder: Folder, save: str, record: FileRecord, *, verify: bool = True, into: torch.Tensor | None = None
) -> torch.Tensor:
    """(size,) uint8. `verify`: compare the checksum too, not only the size; `into`: see Folder.read. Raises
    LoadError.
    """
    path = folder.path(f"{save}/{record.name}")
    try:
        content = folder.read(f"{save}/{record.name}", into)
    except OSError as error:
        raise load_error(error, path) from error
    if len(content) != record.size:
        raise LoadError(_wrong_size(path, len(content), record.size))
    if verify:
        digest = xxhash.xxh3_64_hexdigest(content.numpy().data)
        if digest != record.xxh3_64:
            raise LoadError(
                f"{path} is damaged: its checksum (xxh3-64) is {digest}, and the save says {record.xxh3_64}. "
                "Copy it again from where it came, or load another save."
            )
    return content


def read_shards(
    folder: Folder, wanted: Sequence[Wanted], *, verify: bool = True
) -> Iterator[tuple[Wanted, dict[str, torch.Tensor]]]:
    """The tensors of each shard in turn; while one is used the next is read. They are valid until the next
    is asked for: two buffers serve all shards, because fresh memory costs more than reading into it. Raises
    LoadError.
    """
    largest = max((want.shard.file.size for want in wanted), default=0)
    buffers = [torch.from_numpy(np.empty(largest, np.uint8)) for _ in wanted[:2]]
    with ThreadPoolExecutor(1, "load") as reader:
        upcoming = deque(reader.submit(_tensors, folder, want, verify, buffers[0]) for want in wanted[:1])
        for number, want in enumerate(wanted, 1):
            for later in wanted[number : number + 1]:
                upcoming.append(reader.submit(_tensors, folder, later, verify, buffers[number % 2]))
            yield want, upcoming.popleft().result()


def chunk_of(folder: Folder, want: Wanted, piece: Piece, tensors: dict[str, torch.Tensor]) -> Chunk:
    """A piece of the shapes that its table's spec says. Raises LoadError naming the file."""
    spec = want.part.spec_of(piece.table)
    found = {name: tensors[piece.prefix + name] for name in _names(spec) if piece.prefix + name in tensors}
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}
    wanted = _shapes(spec, piece)
    # A save of values only has the values' names and no others; state comes whole or not at all.
    some = {name: wanted[name] for name in ("keys", "values") if name in wanted}
    if shapes not in (wanted, some):
        path = folder.path(f"{want.save}/{want.shard.file.name}")
        raise LoadError(f"{path} does not hold what its part says of table {piece.table!r}: {shapes}")
    if piece.kind is PieceKind.CANDIDATES:
        return Candidates(found["keys"], found["counts"])
    state = tuple(found[name] for name in found if name.startswith("state."))
    if piece.kind is PieceKind.DENSE:
        return DenseRows(found["values"], state)
    return Rows(found["keys"], found["values"], state, found.get("statistics"))


def _names(spec: TableSpec) -> list[str]:
    states = [f"state.{number}" for number in range(spec.rule.states)]
    return ["keys", "values", *states, "statistics", "counts"]


def _shapes(spec: TableSpec, piece: Piece) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    keys: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"keys": ((piece.rows,), torch.int64)}
    if piece.kind is PieceKind.CANDIDATES:
        return {**keys, "counts": ((piece.rows,), torch.float32)}
    dense = piece.kind is PieceKind.DENSE
    shape: tuple[int, ...] = (spec.size,) if dense else (piece.rows, spec.size)
    shapes = {} if dense else keys
    for name in ("values", *(f"state.{number}" for number in range(spec.rule.states))):
        shapes[name] = (shape, torch.float32)
    if counts_of(spec):
        shapes["statistics"] = ((piece.rows, counts_of(spec)), torch.float32)
    return shapes


def _part(folder: Folder, save: str, record: FileRecord) -> SavedPart:
    content = read_file(folder, save, record)
    try:
        return SavedPart.decode(content.numpy().tobytes())
    except ManifestError as error:
        raise LoadError(f"{folder.path(f'{save}/{record.name}')} cannot be used: {error}") from error


def _tensors(folder: Folder, want: Wanted, verify: bool, into: torch.Tensor) -> dict[str, torch.Tensor]:
    content = read_file(folder, want.save, want.shard.file, verify=verify, into=into)
    try:
        return unpack(content)
    except ContainerError as error:
        path = folder.path(f"{want.save}/{want.shard.file.name}")
        raise LoadError(f"{path} is no safetensors file as fleetrun writes them: {error}") from error


def _wrong_size(path: str, size: int, wanted: int) -> str:
    return f"{path} has {size} bytes, and the save says {wanted}: it was cut off or replaced. Copy it again."
