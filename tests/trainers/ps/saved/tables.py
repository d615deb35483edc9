"""Tables in memory, as simple as can be, and saves of them: the model that files are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.owners import owners
from trainers.ps.saves.manifest import Manifest, SaveMode, commit_save, current_manifest, new_id
from trainers.ps.saves.read import RowOwner, load_tables
from trainers.ps.saves.write import Candidates, SaveSpec, SaveTask, TableCut
from trainers.ps.tables.rules import Adagrad, Adam, RowWiseAdam, state_widths
from trainers.ps.tables.spec import RowOptions, RowType, TableKind, TableSpec
from trainers.ps.tables.storage import DenseCut, DenseRows, SparseCut, SparseRows
from trainers.storage.manifest import FileRecord

WORDS = TableSpec(kind=TableKind.SPARSE, name="words", size=4, rule=Adam(), rows=RowOptions(statistics=True))
USERS = TableSpec(kind=TableKind.SPARSE, name="users", size=3, rule=Adagrad())
LEAN = TableSpec(
    kind=TableKind.SPARSE, name="lean", size=3, rule=RowWiseAdam(), rows=RowOptions(dtype=RowType.BFLOAT16)
)


def dense_spec(start: int, stop: int, name: str = "fc.weight") -> TableSpec:
    return TableSpec(kind=TableKind.DENSE, name=f"{name}[{start}:{stop}]", size=stop - start, rule=Adam())


class MemoryTable:
    """Rows in a dict, in the order of their first insertion; a dense block under the key None."""

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.step = 0
        self.rows: dict[int | None, tuple[torch.Tensor, ...]] = {}
        self.changed: set[int | None] = set()
        self.waiting: dict[int, tuple[float, float]] = {}
        self.expected = 0
        self.alive: int | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def put(self, keys: Sequence[int | None], seed: int) -> MemoryTable:
        """Random rows with state and statistics for these keys."""
        random = torch.Generator().manual_seed(seed)
        for key in keys:
            widths = (self.spec.size, *state_widths(self.spec.rule, self.spec.size))
            row = [torch.randn(width, generator=random) for width in widths]
            row[0] = row[0].to(self.spec.rows.dtype.dtype)
            if self.spec.rows.statistics:
                row.append(torch.rand(3, generator=random))
            self.rows[key] = tuple(row)
            self.changed.add(key)
        self.step += 1
        return self

    def cut(self, *, changed_only: bool = False) -> TableCut:
        if self.spec.kind is TableKind.DENSE:
            values, *state = self.rows[None]
            return TableCut(self.spec, DenseCut(DenseRows(values, tuple(state)), self.step))
        keys = [key for key in self.rows if key in self.changed or not changed_only]
        self.changed.clear()
        columns = torch.tensor(list(self.waiting.values())).view(-1, 2).unbind(1)
        waiting = Candidates(torch.tensor(list(self.waiting)), *columns)
        rows = [(key, self.rows[key]) for key in keys]
        candidates = waiting if self.waiting else None
        return TableCut(self.spec, MemoryCut(self.spec, self.step, rows), candidates, alive=self.alive)

    def load(self, rows: SparseRows | DenseRows) -> None:
        columns = [rows.values, *rows.state]
        assert len(rows.state) == len(state_widths(self.spec.rule, self.spec.size))
        if isinstance(rows, DenseRows):
            self.rows[None] = tuple(column.clone() for column in columns)
            return
        columns += [] if rows.statistics is None else [rows.statistics]
        assert (rows.statistics is not None) == self.spec.rows.statistics
        for number, key in enumerate(rows.keys.tolist()):
            self.rows[key] = tuple(column[number].clone() for column in columns)

    def restore_clocks(self, rows: Sequence[Sequence[float]], candidates: Sequence[Sequence[float]]) -> None:
        assert not rows
        assert not candidates

    def remove(self, keys: torch.Tensor) -> None:
        for key in keys.tolist():
            self.rows.pop(key, None)

    def expect(self, rows: int) -> None:
        assert not self.rows
        self.expected = rows

    def load_candidates(self, found: Candidates) -> None:
        numbers = zip(found.counts.tolist(), found.days.tolist(), strict=True)
        self.waiting |= zip(found.keys.tolist(), numbers, strict=True)


class MemoryCut(SparseCut):
    def __init__(
        self, spec: TableSpec, step: int, rows: list[tuple[int | None, tuple[torch.Tensor, ...]]]
    ) -> None:
        self._spec, self.step, self._rows = spec, step, rows
        self.rows, self.removed = len(rows), torch.empty(0, dtype=torch.int64)
        self.saved: bool | None = None

    def read(self, start: int, stop: int) -> SparseRows:
        assert self.saved is None
        part = self._rows[start:stop]
        keys = torch.tensor([key for key, _ in part], dtype=torch.int64)
        columns = [torch.stack(column) for column in zip(*(row for _, row in part), strict=True)]
        statistics = columns.pop() if self._spec.rows.statistics else None
        return SparseRows(keys, columns[0], tuple(columns[1:]), statistics)

    def close(self, *, saved: bool = True) -> None:
        self.saved = saved


def spread(spec: TableSpec, keys: Sequence[int], servers: int, seed: int) -> list[MemoryTable]:
    """The table of each server, with rows that depend on the key and the seed only."""
    homes = owners(torch.tensor(keys, dtype=torch.int64), servers).tolist()
    tables = [MemoryTable(spec) for _ in range(servers)]
    for key, home in zip(keys, homes, strict=True):
        tables[home].put([key], seed * 1_000_003 + key % 999_983)
    for table in tables:
        table.step = 17
    return tables


def start(
    where: str | Path,
    servers: Sequence[Sequence[MemoryTable]],
    mode: SaveMode = SaveMode.ALL,
    *,
    step: int = 17,
    shard_bytes: int = 400,
) -> tuple[str, list[FileRecord]]:
    """Write the part of every server; nothing is committed."""
    id = new_id(step)
    tasks = []
    for server, tables in enumerate(servers):
        order = SaveSpec(id=id, mode=mode, server=server, servers=len(servers), shard_bytes=shard_bytes)
        cuts = [table.cut(changed_only=mode is SaveMode.DELTA) for table in tables]
        tasks.append(SaveTask(where, order, cuts))
    return id, [task.result(30) for task in tasks]


def save(
    where: str | Path,
    servers: Sequence[Sequence[MemoryTable]],
    mode: SaveMode = SaveMode.ALL,
    *,
    after: str | None = None,
    step: int = 17,
    shard_bytes: int = 400,
) -> Manifest:
    id, parts = start(where, servers, mode, step=step, shard_bytes=shard_bytes)
    assert commit_save(where, id, mode, step, parts, after=after)
    return current_manifest(where)


def load(where: str | Path, specs: Sequence[Sequence[TableSpec]]) -> list[list[MemoryTable]]:
    """The tables of as many servers as there are lists of specs."""
    servers = [[MemoryTable(spec) for spec in here] for here in specs]
    for server, tables in enumerate(servers):
        load_tables(where, tables, RowOwner(server, len(servers)))
    return servers


def same(ours: MemoryTable, theirs: MemoryTable) -> bool:
    return ours.rows.keys() == theirs.rows.keys() and all(
        len(row) == len(theirs.rows[key])
        and all(torch.equal(a, b) for a, b in zip(row, theirs.rows[key], strict=True))
        for key, row in ours.rows.items()
    )
