"""Table: what dense blocks and sparse rows have in common, and the way from a spec to a table.

A call that is refused (TableError) leaves the table as it was.
"""

from __future__ import annotations

from typing import Protocol

import torch

from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.errors import FullError, KeysError, NotFiniteError, ShapeError, TableError
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import TableKind, TableSpec

__all__ = ["FullError", "KeysError", "NotFiniteError", "ShapeError", "Table", "TableError", "make_table"]


class Table(Protocol):
    """The same verbs for dense blocks and sparse rows. `keys` is None for a dense block, with values or
    gradients of (size,) float32; for a sparse table it is (n,) int64, with (n, dim) float32.

    `check` refuses what `apply` would, `fits` what `assign` would.
    """

    spec: TableSpec
    step: int

    def __len__(self) -> int: ...

    def fits(self, keys: torch.Tensor | None, values: torch.Tensor) -> None: ...

    def assign(self, keys: torch.Tensor | None, values: torch.Tensor) -> None: ...

    def pull(self, keys: torch.Tensor | None, *, insert: bool = True) -> torch.Tensor: ...

    def check(
        self, keys: torch.Tensor | None, grad: torch.Tensor, stats: torch.Tensor | None = None
    ) -> None: ...

    def apply(
        self, keys: torch.Tensor | None, grad: torch.Tensor, lr: float, stats: torch.Tensor | None = None
    ) -> None: ...


def make_table(spec: TableSpec) -> DenseTable | SparseTable:
    """An empty table. Raises TableError for a rule that does not work on rows."""
    return DenseTable(spec) if spec.kind is TableKind.DENSE else SparseTable(spec)
