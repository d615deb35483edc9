"""Packing: cuts of tables as pieces, and pieces gathered into shards. Knows how a table becomes named tensors
and how large a shard is; leaves files to `writing`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainers.ps.saved.manifest import Piece, PieceKind
from trainers.ps.saved.modes import SaveMode
from trainers.ps.saved.source import Candidates, Chunk, TableCut, row_bytes
from trainers.ps.tables.cut import DenseCut, DenseRows
from trainers.ps.tables.spec import TableKind

_PIECE_BYTES = 4 << 20
"""Of rows that are read from a cut at once: small enough for the allocator and the caches."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A piece and its tensors by name."""

    piece: Piece
    tensors: dict[str, torch.Tensor]

    @property
    def size(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def pieces_of(table: TableCut, mode: SaveMode, shard_bytes: int) -> Iterator[tuple[int, Packed]]:
    """(slots walked, piece) of one table, none of them much larger than a shard."""
    for number, (walked, kind, chunk) in enumerate(_chunks(table, mode, shard_bytes)):
        tensors = _tensors(chunk, mode)
        rows = len(tensors["values" if kind is PieceKind.DENSE else "keys"])
        yield walked, Packed(Piece(table.spec.name, kind, number, rows), tensors)


def shards_of(pieces: Iterator[Packed], shard_bytes: int, ahead: int) -> Iterator[list[Packed]]:
    """Pieces in groups of about `shard_bytes`. A group is valid until `ahead` more were taken. Dense and
    sparse pieces stay apart, because a server that loads needs other files of each.
    """
    rooms = [_Room(shard_bytes) for _ in range(ahead + 1)]
    waiting: list[Packed] = []
    size = number = 0
    for packed in pieces:
        dense = packed.piece.kind is PieceKind.DENSE
        apart = waiting and dense != (waiting[0].piece.kind is PieceKind.DENSE)
        if waiting and (apart or size + packed.size > shard_bytes):
            yield waiting
            waiting, size, number = [], 0, number + 1
            rooms[number % len(rooms)].used = 0
        waiting.append(rooms[number % len(rooms)].kept(packed))
        size += packed.size
    if waiting:
        yield waiting


class _Room:
    """Memory for the pieces of one shard after another. The pieces' own memory is free again at once, so
    that the next piece gets it: fresh pages cost several times more than a copy within the caches.
    """

    def __init__(self, size: int) -> None:
        self._bytes = torch.from_numpy(np.empty(size, np.uint8))
        self.used = 0

    def kept(self, packed: Packed) -> Packed:
        """A copy in this memory, or the piece itself where there is no room for it."""
        if self.used + packed.size + 8 * len(packed.tensors) > len(self._bytes):
            return packed
        return Packed(packed.piece, {name: self._copy(tensor) for name, tensor in packed.tensors.items()})

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        stop = self.used + tensor.numel() * tensor.element_size()
        copy = self._bytes[self.used : stop].view(tensor.dtype).view(tensor.shape)
        self.used = -(-stop // 8) * 8  # int64 must begin at a multiple of 8
        np.copyto(copy.numpy(), tensor.numpy())  # in this thread: torch would wake all of its own
        return copy


def dense_first(cuts: Sequence[TableCut]) -> list[TableCut]:
    return sorted(cuts, key=lambda table: table.spec.kind is TableKind.SPARSE)


def _chunks(table: TableCut, mode: SaveMode, shard_bytes: int) -> Iterator[tuple[int, PieceKind, Chunk]]:
    cut = table.cut
    if isinstance(cut, DenseCut):
        yield 1, PieceKind.DENSE, cut.rows
        return
    step = max(1, min(shard_bytes, _PIECE_BYTES) // row_bytes(table.spec))
    for start in range(0, cut.rows, step):
        stop = min(start + step, cut.rows)
        yield stop, PieceKind.ROWS, cut.read(start, stop)
    waiting = table.candidates
    if waiting is not None and mode is not SaveMode.VALUES:
        step = max(1, shard_bytes // 12)
        for start in range(0, len(waiting.keys), step):
            some = slice(start, start + step)
            yield cut.rows, PieceKind.CANDIDATES, Candidates(waiting.keys[some], waiting.counts[some])


def _tensors(chunk: Chunk, mode: SaveMode) -> dict[str, torch.Tensor]:
    if isinstance(chunk, Candidates):
        return {"keys": chunk.keys, "counts": chunk.counts}
    tensors = {"values": chunk.values} if isinstance(chunk, DenseRows) else {"keys": chunk.keys}
    tensors["values"] = chunk.values
    if mode is not SaveMode.VALUES:
        tensors |= {f"state.{number}": state for number, state in enumerate(chunk.state)}
        if not isinstance(chunk, DenseRows) and chunk.statistics is not None:
            tensors["statistics"] = chunk.statistics
    return tensors
