"""Values: a save as plain tensors, without any server. Knows the whole model's tables; leaves files to
`reading`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from trainers.ps.saved.blocks import Blocks
from trainers.ps.saved.fit import block_of
from trainers.ps.saved.reading import Wanted, check_sizes, chunk_of, open_saves, read_shards
from trainers.ps.tables.cut import DenseRows, Rows
from trainers.ps.tables.rules import Fixed
from trainers.ps.tables.spec import TableKind, TableSpec


@dataclass(frozen=True, slots=True, eq=False)
class SparseValues:
    """keys (n,) int64 ascending, values (n, dim) float32."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ModelValues:
    """`dense`: parameter name -> (elements,) float32, flat, as saves know no shapes; `sparse`: by table."""

    dense: dict[str, torch.Tensor]
    sparse: dict[str, SparseValues]


def read_values(where: str | os.PathLike[str], *, verify: bool = True) -> ModelValues:
    """Every value of a save of any mode, from all servers, in memory at once. Raises LoadError."""
    opened = open_saves(where)
    specs = [table.spec for table in opened.tables().values()]
    blocks = Blocks(_whole_parameters(specs))
    found: dict[str, list[SparseValues]] = {s.name: [] for s in specs if s.kind is TableKind.SPARSE}
    wanted = [
        Wanted(save.id, part, shard) for save in opened.saves for part in save.parts for shard in part.shards
    ]
    check_sizes(opened.folder, wanted)
    for want, tensors in read_shards(opened.folder, wanted, verify=verify):
        for piece in want.shard.pieces:
            chunk = chunk_of(opened.folder, want, piece, tensors)
            if isinstance(chunk, DenseRows):
                blocks.add(want.part.spec_of(piece.table), chunk)
            elif isinstance(chunk, Rows):
                # Copies: a view would keep the whole shard, with its optimizer state, in memory.
                found[piece.table].append(SparseValues(chunk.keys.clone(), chunk.values.clone()))
    dense = {name: rows.values for name, rows in blocks.whole(opened.folder.where)}
    sizes = {spec.name: spec.size for spec in specs}
    return ModelValues(dense, {name: _merged(pieces, sizes[name]) for name, pieces in found.items()})


def _whole_parameters(specs: list[TableSpec]) -> list[TableSpec]:
    """One block per dense parameter, over all of its saved blocks."""
    stops: dict[str, int] = {}
    for block in (block_of(spec) for spec in specs if spec.kind is TableKind.DENSE):
        stops[block.parameter] = max(block.stop, stops.get(block.parameter, 0))
    return [
        TableSpec(kind=TableKind.DENSE, name=name, size=size, rule=Fixed()) for name, size in stops.items()
    ]


def _merged(pieces: list[SparseValues], dim: int) -> SparseValues:
    """Pieces in the order of saves as one; of a key that comes again, the later values count."""
    keys = torch.cat([torch.empty(0, dtype=torch.int64), *(piece.keys for piece in pieces)])
    values = torch.cat([torch.empty(0, dim), *(piece.values for piece in pieces)])
    keys, order = torch.sort(keys, stable=True)
    last = torch.ones(len(keys), dtype=torch.bool)
    last[:-1] = keys[1:] != keys[:-1]
    return SparseValues(keys[last], values[order[last]])
