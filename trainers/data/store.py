"""Examples in memory: columns that grow without being copied. Knows anonymous memory; leaves what the
examples are to `columns`, and whose they are to the data set.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainers.data.columns import Columns
from trainers.data.slots import Kind, Layout
from trainers.errors import UsageError

_GROWTH = 1.25


class GrowingArray:
    """Rows of one shape that can be added at the end and given back at the front.

    Growing moves the pages and copies nothing (mremap); memory is touched only as rows come.
    """

    def __init__(self, dtype: type[np.generic], width: int) -> None:
        self._type = np.dtype(dtype)
        self._width = width
        self._row = self._type.itemsize * width
        self._rows = 0
        self._freed = 0
        self._map = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without large pages
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def extend(self, rows: NDArray[Any]) -> None:
        """Add rows (n, width)."""
        wanted = (self._rows + len(rows)) * self._row
        if wanted > len(self._map):
            self._grow(wanted)
        first = self._rows
        self._rows += len(rows)
        self.view()[first:] = rows

    def view(self) -> NDArray[Any]:
        """All rows (n, width), without a copy. While a view lives, the array cannot grow."""
        flat = np.frombuffer(self._map, self._type, self._rows * self._width)
        return flat.reshape(self._rows, self._width)

    def forget(self, rows: int) -> None:
        """Give back the memory of the first rows; they read as zeros then."""
        end = rows * self._row // mmap.PAGESIZE * mmap.PAGESIZE
        if end > self._freed:
            self._map.madvise(mmap.MADV_DONTNEED, self._freed, end - self._freed)
            self._freed = end

    def _grow(self, wanted: int) -> None:
        size = int(max(wanted, len(self._map) * _GROWTH))
        try:
            self._map.resize(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        except BufferError as problem:
            raise UsageError(
                "examples cannot be added while a pass over the data set is open; finish or close it first"
            ) from problem


class Store:
    """All examples of a data set, in the order in which they came."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._dense = GrowingArray(np.float32, layout.widths[Kind.DENSE])
        self._ids = GrowingArray(np.int64, layout.widths[Kind.IDS])
        self._counts = GrowingArray(np.int32, layout.varying)
        self._starts = GrowingArray(np.int64, 2)
        self._bags = GrowingArray(np.int64, 1)
        self._weights = GrowingArray(np.float32, 1)
        self._starts.extend(np.zeros((1, 2), dtype=np.int64))
        self._rows = self._freed = 0

    def __len__(self) -> int:
        return self._rows

    def extend(self, columns: Columns) -> None:
        """Add examples at the end."""
        bags, weights = columns.values
        first = columns.starts[0]
        last = self._starts.view()[-1].copy()
        self._dense.extend(columns.dense)
        self._ids.extend(columns.ids)
        self._counts.extend(columns.counts)
        self._starts.extend(columns.starts[1:] - first + last)
        self._bags.extend(columns.bags[first[0] : first[0] + bags, None])
        self._weights.extend(columns.weights[first[1] : first[1] + weights, None])
        self._rows += len(columns)

    def columns(self) -> Columns:
        """All examples, without a copy."""
        return Columns(
            self._layout,
            self._dense.view(),
            self._ids.view(),
            self._counts.view(),
            self._starts.view(),
            self._bags.view()[:, 0],
            self._weights.view()[:, 0],
        )

    def forget(self, rows: int) -> None:
        """Give back the memory of the first `rows` examples; nobody may read them any more."""
        bags, weights = self._starts.view()[rows]
        for array in (self._dense, self._ids, self._counts):
            array.forget(rows)
        self._bags.forget(int(bags))
        self._weights.forget(int(weights))
