"""Cuts: what a table held at one moment, to be read while training goes on. Knows the order in which reader
and writer must work; leaves the copying to the kernels and files to others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch

from trainers.ps.kernels.reading import read
from trainers.ps.kernels.rows import READ, TAKEN
from trainers.ps.tables.arena import Arena, reservation
from trainers.ps.tables.errors import TableError
from trainers.ps.tables.storage import Storage


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a sparse table: keys (n,) int64, values (n, dim) float32, a (n, dim) float32 for each state,
    statistics (n, 3) float32 (show, click, unseen days) or None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    state: tuple[torch.Tensor, ...]
    statistics: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DenseRows:
    """A dense table: values (size,) float32, and a (size,) float32 for each state."""

    values: torch.Tensor
    state: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DenseCut:
    """A copy of a dense table as of its step."""

    rows: DenseRows
    step: int


class Cut:
    """Copy-on-write view of a sparse table as of the moment when `SparseTable.cut` was called.

    `rows` slots are to be walked from 0 up; `step` is the table's then. `read` may run in another thread
    than the table's. `close` belongs into the table's thread; leaving a `with` block closes too.
    """

    def __init__(
        self, storage: Storage, states: int, step: int, changed_only: bool, ended: Callable[[bool], None]
    ) -> None:
        self.rows, self.step = len(storage), step
        self._storage, self._states, self._changed_only, self._ended = storage, states, changed_only, ended
        self._images, self._image_of = _room_for(self.rows, storage.stride)
        self._open = True
        storage.begin_cut(self._images.words, self._image_of.words.view(np.uint32))
        self.expect(0)

    def expect(self, changes: int) -> None:
        """Up to so many rows are about to change: see to memory for their images. In the table's thread."""
        record = 8 * self._storage.stride
        taken = min(int(self._storage.rows.cut[TAKEN]) + changes, self.rows)
        self._images.expect(taken * record, self.rows * record)

    def read(self, start: int, stop: int) -> Rows:
        """Slots [start, stop) as of the cut; of a cut of changed rows only those, so perhaps fewer rows.

        Must go upwards: rows that were read are no longer kept. Raises TableError for a step back, a range
        outside of the cut, and after `close`.
        """
        rows = self._storage.rows
        if not self._open:
            raise TableError("this cut was closed and cannot be read any more")
        if not int(rows.cut[READ]) <= start <= stop <= self.rows:
            raise TableError(
                f"slots {start} to {stop} of a cut of {self.rows}, of which {int(rows.cut[READ])} were read"
            )
        dim, statistics = self._storage.dim, self._storage.statistics
        keys, values = np.empty(stop - start, np.int64), np.empty((stop - start, dim), np.float32)
        state = np.empty((self._states, stop - start, dim), np.float32)
        counts = np.empty((stop - start, statistics), np.float32)
        found = read(rows, start, stop, self._changed_only, keys, values, state, counts)
        rows.cut[READ] = stop
        return Rows(
            torch.from_numpy(keys[:found]),
            torch.from_numpy(values[:found]),
            tuple(torch.from_numpy(each[:found]) for each in state),
            torch.from_numpy(counts[:found]) if statistics else None,
        )

    def close(self, *, saved: bool = True) -> None:
        """End the cut and free its images. With `saved`, and if every row was read, a cut with `mark`
        makes all rows count as unchanged that have not changed since. Closing twice is allowed.
        """
        if self._open:
            self._open = False
            self._ended(saved and int(self._storage.rows.cut[READ]) == self.rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(saved=kind is None)


def _room_for(rows: int, stride: int) -> tuple[Arena, Arena]:
    """Address space for an image of every row, and for the number of each row's image."""
    sizes = (8 * rows * stride, 4 * rows)
    arenas = tuple(Arena(size if reservation() else 0) for size in sizes)
    for arena, size in zip(arenas, sizes, strict=True):
        arena.grow(size)
    return arenas[0], arenas[1]
