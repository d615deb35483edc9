"""Cache: rows that a trainer keeps and trains itself in geo training. Knows which rows are here and what
they were at the last exchange; leaves the exchange to `geo`.
"""

from __future__ import annotations

import numpy as np
import torch

from trainers.ps.kernels.revise import revise
from trainers.ps.kernels.rows import pull
from trainers.ps.tables.rules import AnyRule, Fixed
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import RowOptions, TableKind, TableSpec


class _KeptTable(SparseTable):
    """A table that tells what it lacks, and takes new values without forgetting its optimizer state."""

    def known(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, dim) values, and the positions of the keys that have none, (m,) int64."""
        wanted = self._array(keys)
        out = np.empty((len(wanted), self.spec.size), np.float32)
        missing = np.empty(len(wanted), np.int64)
        count = pull(self._storage.index, self._storage.rows, wanted, out, missing)
        return torch.from_numpy(out), torch.from_numpy(missing[:count])

    def revise(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """New values of rows that are here."""
        slots = self._storage.insert(self._array(keys), self._fresh)
        revise(self._storage.rows, slots, values.contiguous().numpy())

    def everything(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys (n,) and values (n, dim); copies."""
        with self.cut() as cut:
            rows = cut.read(0, cut.rows)
        return rows.keys, rows.values


class Cache:
    """The rows of one table in one trainer. `rule` and `rows` are those of training."""

    def __init__(self, name: str, dim: int, rule: AnyRule, rows: RowOptions) -> None:
        bounds = RowOptions(low=rows.low, high=rows.high)
        self._table = _KeptTable(
            TableSpec(kind=TableKind.SPARSE, name=name, size=dim, rule=rule, rows=bounds)
        )
        self._touched_spec = TableSpec(kind=TableKind.SPARSE, name=name, size=dim, rule=Fixed())
        self._touched = _KeptTable(self._touched_spec)

    def known(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, dim) values, and the positions of the keys that are not here."""
        return self._table.known(keys)

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Rows that came from the servers."""
        self._table.assign(keys, values)

    def train(self, keys: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        """One update; rows that change for the first time since the last exchange are noted before it."""
        _, first = self._touched.known(keys)
        if len(first):
            new = keys[first]
            self._touched.assign(new, self._table.pull(new, insert=False))
        self._table.check(keys, grad)
        self._table.apply(keys, grad, lr)

    def changes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys that were trained since the last call, and by how much their values have changed."""
        keys, before = self._touched.everything()
        self._touched = _KeptTable(self._touched_spec)
        return keys, self._table.pull(keys, insert=False) - before

    def revise(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The servers' values of rows that are here."""
        self._table.revise(keys, values)
