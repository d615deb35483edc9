"""Sources: a server's tables at one moment, for a save. Knows what belongs to a table beside its rows; leaves
tables themselves to `tables` and files to others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from trainers.ps.saved.modes import SaveMode
from trainers.ps.tables.cut import DenseCut, DenseRows, Rows
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import EntryKind, TableKind, TableSpec


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Keys (n,) int64 that wait for a row, and how often each was pulled, (n,) float32."""

    keys: torch.Tensor
    counts: torch.Tensor


Chunk = Rows | DenseRows | Candidates
"""What a file holds of a table, and a table takes."""


class SparseCut(Protocol):
    """A consistent view of a sparse table. `rows`: slots to walk, upwards; `step`: updates so far."""

    @property
    def rows(self) -> int: ...

    @property
    def step(self) -> int: ...

    def read(self, start: int, stop: int) -> Rows: ...

    def close(self, *, saved: bool = True) -> None: ...


class Target(Protocol):
    """A table that is loaded: Rows or DenseRows by `load`."""

    spec: TableSpec
    step: int

    def load(self, rows: Any, /) -> None: ...


@runtime_checkable
class SparseTarget(Protocol):
    """A sparse table, for which keys may wait. `expect`: so many rows are about to be loaded."""

    def expect(self, rows: int) -> None: ...

    def load_candidates(self, keys: torch.Tensor, counts: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class TableCut:
    """A table as of the moment that is saved."""

    spec: TableSpec
    cut: SparseCut | DenseCut
    candidates: Candidates | None = None

    @property
    def slots(self) -> int:
        return 1 if isinstance(self.cut, DenseCut) else self.cut.rows

    def close(self, *, saved: bool) -> None:
        if not isinstance(self.cut, DenseCut):
            self.cut.close(saved=saved)


def cut_tables(
    tables: Iterable[SparseTable | DenseTable], mode: SaveMode, *, snapshot: bool = False
) -> list[TableCut]:
    """Cuts of all tables, for a save of this mode; in the thread of the tables, between two requests.
    `snapshot`: for the server's own recovery; it leaves alone what the next delta will hold. Raises
    TableError, with no cut open, when one is open already.
    """
    mark = not snapshot and mode is not SaveMode.VALUES
    cuts: list[TableCut] = []
    with contextlib.ExitStack() as half:
        half.callback(close_cuts, cuts, saved=False)
        for table in tables:
            cuts.append(_cut(table, changed_only=mode is SaveMode.DELTA, mark=mark))  # noqa: PERF401  # see close_cuts
        half.pop_all()
    return cuts


def close_cuts(cuts: Iterable[TableCut], *, saved: bool) -> None:
    """In the thread of the tables, when nobody reads the cuts any more. `saved`: the save was committed."""
    for cut in cuts:
        cut.close(saved=saved)


def _cut(table: SparseTable | DenseTable, *, changed_only: bool, mark: bool) -> TableCut:
    if isinstance(table, DenseTable):
        return TableCut(table.spec, table.cut())
    keys, counts = table.candidates()
    return TableCut(table.spec, table.cut(changed_only=changed_only, mark=mark), Candidates(keys, counts))


def counts_of(spec: TableSpec) -> int:
    """Floats of statistics in a row of this table."""
    counted = spec.rows.statistics or spec.rows.entry.kind is EntryKind.SHOW_CLICK
    return 3 if counted and spec.kind is TableKind.SPARSE else 0


def row_bytes(spec: TableSpec) -> int:
    """Of a row of a sparse table with everything."""
    return 8 + 4 * (spec.size * (1 + spec.rule.states) + counts_of(spec))
