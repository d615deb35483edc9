"""Loading: from saved parts of any number of servers to the tables of one server. Knows who owns which rows;
leaves files to `reading`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from trainers import progress
from trainers.ps.kernels.owners import split
from trainers.ps.saved.blocks import Blocks
from trainers.ps.saved.fit import check_fit
from trainers.ps.saved.manifest import SavedPart
from trainers.ps.saved.reading import OpenFolder, Wanted, check_sizes, chunk_of, open_saves, read_shards
from trainers.ps.saved.source import Candidates, Chunk, SparseTarget, Target, counts_of
from trainers.ps.tables.cut import DenseRows, Rows
from trainers.ps.tables.spec import TableKind, TableSpec


@dataclass(frozen=True, slots=True)
class Place:
    """Server `server` of `servers`: which rows of a save it owns."""

    server: int
    servers: int

    def may_own_of(self, part: SavedPart) -> bool:
        """Whether a part can have rows for this server. A key's owner is a hash modulo the servers, so the
        two owners of a key are equal modulo the greatest common divisor of both numbers of servers.
        """
        return (part.server - self.server) % math.gcd(part.servers, self.servers) == 0

    def share_of(self, part: SavedPart) -> float:
        """About what share of a part's rows this server owns."""
        return math.gcd(part.servers, self.servers) / self.servers if self.may_own_of(part) else 0.0

    def owned(self, part: SavedPart, chunk: Rows | Candidates) -> Rows | Candidates:
        """Those of a part's rows that this server owns."""
        if part.servers % self.servers == 0:
            return chunk  # then a part belongs to one server as a whole
        mine = split(chunk.keys, self.servers)[self.server]
        if isinstance(chunk, Candidates):
            return Candidates(chunk.keys[mine], chunk.counts[mine])
        statistics = None if chunk.statistics is None else chunk.statistics[mine]
        state = tuple(tensor[mine] for tensor in chunk.state)
        return Rows(chunk.keys[mine], chunk.values[mine], state, statistics)


def load_tables(
    where: str | os.PathLike[str] | OpenFolder, tables: Sequence[Target], place: Place, *, verify: bool = True
) -> int:
    """Load what this server owns into its tables, which must be empty; returns the save's step.

    `verify`: compare checksums as well as sizes. Of a chain of deltas, save after save. From a save of mode
    2 optimizer state and statistics start anew. Raises LoadError: for another model, missing files and
    wrong sizes before any table was changed; for a wrong checksum in between, and then the tables hold a
    part of the save and must not be used.
    """
    opened = where if isinstance(where, OpenFolder) else open_saves(where)
    specs = [table.spec for table in tables]
    by_name = {table.spec.name: table for table in tables}
    expected = _expected(opened, place)
    for name, chunk in chunks(opened, specs, place, verify=verify):
        table = by_name[name]
        if isinstance(table, SparseTarget) and name in expected:
            table.expect(expected.pop(name))
        if not isinstance(chunk, Candidates):
            table.load(chunk)
        elif isinstance(table, SparseTarget):
            table.load_candidates(chunk.keys, chunk.counts)
    if not opened.values_only:
        for name, step in _steps(opened, specs, place).items():
            by_name[name].step = step
    return opened.saves[-1].step


def chunks(
    opened: OpenFolder, specs: Sequence[TableSpec], place: Place, *, verify: bool = True
) -> Iterator[tuple[str, Chunk]]:
    """(table name, what to load) for these tables, as `load_tables` does; valid until the next is asked for.
    Raises LoadError.
    """
    saved = [table.spec for table in opened.tables().values()]
    check_fit(saved, specs, opened.folder.where, whole=False, values_only=opened.values_only)
    by_name = {spec.name: spec for spec in specs}
    blocks = Blocks([spec for spec in specs if spec.kind is TableKind.DENSE])
    wanted = list(_wanted(opened, blocks, place))
    check_sizes(opened.folder, wanted)
    last = opened.saves[-1].id
    with progress.activity("loading tables", of=len(wanted)) as loading:
        for want, tensors in read_shards(opened.folder, wanted, verify=verify):
            for piece in want.shard.pieces:
                chunk = chunk_of(opened.folder, want, piece, tensors)
                if isinstance(chunk, DenseRows):
                    blocks.add(want.part.spec_of(piece.table), chunk)
                # Whoever waited for a row at an earlier save has one now, or waits in the last save too.
                elif isinstance(chunk, Rows) or want.save == last:
                    yield piece.table, _completed(place.owned(want.part, chunk), by_name[piece.table])
            loading.advance()
    for name, block in blocks.whole(opened.folder.where):
        yield name, _completed(block, by_name[name])


def _expected(opened: OpenFolder, place: Place) -> dict[str, int]:
    """About how many rows of each sparse table this server will have, as the first save says: later ones
    hold mostly the same rows.
    """
    rows: dict[str, float] = {}
    for part in opened.saves[0].parts:
        for table in part.tables:
            if table.spec.kind is TableKind.SPARSE:
                name = table.spec.name
                rows[name] = rows.get(name, 0.0) + table.rows * place.share_of(part)
    return {name: int(number) for name, number in rows.items()}


def _wanted(opened: OpenFolder, blocks: Blocks, place: Place) -> Iterator[Wanted]:
    """The shards that have something for this server."""
    for save in opened.saves:
        for part in save.parts:
            mine = place.may_own_of(part)
            for shard in part.shards:
                found = [part.spec_of(piece.table) for piece in shard.pieces]
                if any(mine if spec.kind is TableKind.SPARSE else blocks.overlap(spec) for spec in found):
                    yield Wanted(save.id, part, shard)


def _completed(chunk: Chunk, spec: TableSpec) -> Chunk:
    """With fresh state and statistics where the save has none, and without where the table has none."""
    if isinstance(chunk, Candidates):
        return chunk
    state = chunk.state
    if len(state) != spec.rule.states:
        state = tuple(torch.full_like(chunk.values, spec.rule.initial_state) for _ in range(spec.rule.states))
    if isinstance(chunk, DenseRows):
        return DenseRows(chunk.values, state)
    statistics = chunk.statistics if counts_of(spec) else None
    if counts_of(spec) and statistics is None:
        statistics = torch.zeros(len(chunk.keys), counts_of(spec))
    return Rows(chunk.keys, chunk.values, state, statistics)


def _steps(opened: OpenFolder, specs: Sequence[TableSpec], place: Place) -> dict[str, int]:
    """Each table's count of updates: the largest of those that its rows came from."""
    steps = dict.fromkeys((spec.name for spec in specs), 0)
    for part in opened.saves[-1].parts:
        for table in part.tables:
            for spec in specs:
                if _comes_from(spec, part, table.spec, place):
                    steps[spec.name] = max(steps[spec.name], table.step)
    return steps


def _comes_from(spec: TableSpec, part: SavedPart, saved: TableSpec, place: Place) -> bool:
    if spec.kind is TableKind.SPARSE:
        return spec.name == saved.name and place.may_own_of(part)
    return saved.kind is TableKind.DENSE and Blocks([spec]).overlap(saved)
