"""`fleetrun::rows`: an operation of programs whose tables are outside of them, in files that a server of
requests maps and changes. A program has a number in place of each table; whoever runs it says which tables
those are.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class RowTable(Protocol):
    """What has rows for ids."""

    def rows(self, ids: Tensor) -> Tensor:
        """(n, dim) for ids (n,) int64."""


TABLES: dict[int, RowTable] = {}
"""By the numbers that programs are given."""

_LIBRARY = torch.library.Library("fleetrun", "DEF")  # type: ignore[no-untyped-call]  # torch's
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "rows(Tensor ids, Tensor table, int dim, ScalarType dtype, int limit) -> Tensor"
)


def _rows(ids: Tensor, table: Tensor, dim: int, dtype: torch.dtype, limit: int) -> Tensor:
    """(..., dim) for ids (...). Raises IndexError for an id outside of [0, limit), unless that is -1."""
    flat = ids.reshape(-1).to(torch.int64)
    if limit >= 0 and len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < limit:
        raise IndexError(f"an id is outside of the {limit} rows of its table")
    return TABLES[int(table)].rows(flat).to(dtype).reshape(*ids.shape, dim)


def _shape(ids: Tensor, table: Tensor, dim: int, dtype: torch.dtype, limit: int) -> Tensor:
    return ids.new_empty((*ids.shape, dim), dtype=dtype)


_LIBRARY.impl("rows", _rows, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("fleetrun::rows", _shape, lib=_LIBRARY)


class RowsElsewhere(torch.nn.Module):
    """An embedding whose rows are in the table `name`. `limit`: how many ids there are, None: any int64;
    `padding` (an id) reads as zeros.
    """

    table: Tensor

    def __init__(
        self, name: str, dim: int, dtype: torch.dtype, limit: int | None, padding: int | None
    ) -> None:
        super().__init__()
        self.name, self.dim = name, dim
        self._dtype, self._limit, self._padding = dtype, -1 if limit is None else limit, padding
        self.register_buffer("table", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor, clicks: Tensor | None = None) -> Tensor:
        rows: Tensor = torch.ops.fleetrun.rows(ids, self.table, self.dim, self._dtype, self._limit)
        if self._padding is not None:
            rows = torch.where((ids == self._padding)[..., None], 0.0, rows)
        return rows
