"""Define `fleetrun::rows`, an operation for programs whose tables are in separate files.

A server of requests maps and changes these files. A program has a number in place of each table. The caller
of the program maps these numbers to tables.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Rows(Protocol):
    """A table that returns (n, dim) rows for ids (n,) int64."""

    def rows(self, ids: Tensor, /) -> Tensor: ...


TABLES: WeakValueDictionary[int, Rows] = WeakValueDictionary()
"""Tables by their numbers in programs, while a model uses them."""

_LIBRARY = torch.library.Library("fleetrun", "DEF")  # type: ignore[no-untyped-call]  # torch's
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "rows(Tensor ids, Tensor table, int dim, ScalarType dtype, int limit) -> Tensor"
)


def _rows(ids: Tensor, table: Tensor, dim: int, dtype: torch.dtype, limit: int) -> Tensor:
    """Return (..., dim) rows for ids (...). Raises IndexError for an id outside [0, limit), unless `limit` is
    -1.
    """
    flat = ids.reshape(-1).to(torch.int64)
    if limit >= 0 and len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < limit:
        raise IndexError(f"an id is outside the {limit} rows of its table")
    return TABLES[int(table)].rows(flat).to(dtype).reshape(*ids.shape, dim)


def _shape(ids: Tensor, table: Tensor, dim: int, dtype: torch.dtype, limit: int) -> Tensor:
    return ids.new_empty((*ids.shape, dim), dtype=dtype)


_LIBRARY.impl("rows", _rows, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("fleetrun::rows", _shape, lib=_LIBRARY)


class RowsElsewhere(torch.nn.Module):
    """An embedding whose rows are in the table `name`.

    `limit` is the number of ids, or None for any int64. The id `padding` reads as zeros.
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
