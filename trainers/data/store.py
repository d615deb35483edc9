"""Keep examples in memory as columns, in a few large arrays that grow without being copied."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

from fleetrun.frozen import frozen
from trainers.data import kernels
from trainers.data.kernels import Array, Int32s, Int64s
from trainers.data.slots import Bag, Batch, Kind, Layout
from trainers.errors import UsageError
from trainers.kernels.compiled import Floats

# ---- Examples as columns


@frozen(eq=False)
class Columns:
    """Examples as a few large arrays.

    `dense` (n, D) float32 and `ids` (n, I) int64 hold the slots of fixed length. `counts` (n, C) int32 is for
    the slots of any length. Their values are stored example by example in `bags` (int64) and `weights`
    (float32). Example i starts at starts[i, 0] and starts[i, 1]. `starts` is (n + 1, 2).
    """

    layout: Layout
    dense: Floats
    ids: Int64s
    counts: Int32s
    starts: Int64s
    bags: Int64s
    weights: Floats

    def __len__(self) -> int:
        return len(self.dense)

    @classmethod
    def empty(cls, layout: Layout, rows: int, bags: int = 0, weights: int = 0) -> Columns:
        """Allocate columns for this many examples and values. Only starts[0] is initialised."""
        starts = np.empty((rows + 1, 2), dtype=np.int64)
        starts[0] = 0
        return cls(
            layout,
            np.empty((rows, layout.widths[Kind.DENSE]), dtype=np.float32),
            np.empty((rows, layout.widths[Kind.IDS]), dtype=np.int64),
            np.empty((rows, layout.varying), dtype=np.int32),
            starts,
            np.empty(bags, dtype=np.int64),
            np.empty(weights, dtype=np.float32),
        )

    def rows(self, start: int, stop: int) -> Columns:
        """Return a view of the examples [start, stop)."""
        part = slice(start, stop)
        return Columns(
            self.layout, self.dense[part], self.ids[part], self.counts[part],
            self.starts[start : stop + 1], self.bags, self.weights,
        )  # fmt: skip

    def fill(self, start: int, others: list[Columns]) -> None:
        """Copy these examples, one after the other, to `start` and the rows after it."""
        for other in others:
            stop = start + len(other)
            self.dense[start:stop] = other.dense
            self.ids[start:stop] = other.ids
            self.counts[start:stop] = other.counts
            self.starts[start + 1 : stop + 1] = other.starts[1:] - other.starts[0] + self.starts[start]
            for mine, values, kind in ((self.bags, other.bags, 0), (self.weights, other.weights, 1)):
                into = slice(self.starts[start, kind], self.starts[stop, kind])
                mine[into] = values[other.starts[0, kind] : other.starts[-1, kind]]
            start = stop

    @property
    def values(self) -> tuple[int, int]:
        """The number of values in its bags and weights."""
        bags, weights = self.starts[-1] - self.starts[0]
        return int(bags), int(weights)

    @property
    def nbytes(self) -> int:
        """The bytes of its examples."""
        bags, weights = self.values
        fixed = self.dense.nbytes + self.ids.nbytes + self.counts.nbytes + self.starts.nbytes
        return fixed + 8 * bags + 4 * weights

    def batch(self) -> Batch:
        """Return all examples as one batch. Slots of fixed length are views, without a copy."""
        every = np.arange(len(self) if self.layout.varying else 0)
        return self._batch(self.dense, self.ids, every)

    def gather(self, rows: Int64s) -> Batch:
        """Return a batch of these rows (n,), in this order."""
        return self._batch(self.dense.take(rows, axis=0), self.ids.take(rows, axis=0), rows)

    def _batch(self, dense: Floats, ids: Int64s, rows: Int64s) -> Batch:
        return Batch(
            layout=self.layout,
            dense=torch.from_numpy(dense),
            ids=torch.from_numpy(ids),
            bags=self._bags(Kind.BAG, rows),
            weights=self._bags(Kind.WEIGHTS, rows),
        )

    def _bags(self, kind: Kind, rows: Int64s) -> Bag | None:
        """Return the slots of this kind one after the other, from values stored example by example."""
        columns = self.layout.counted[kind]
        if not len(columns):
            return None
        source, which = (self.bags, 0) if kind is Kind.BAG else (self.weights, 1)
        offsets = np.zeros(len(columns) * len(rows) + 1, dtype=np.int64)
        np.cumsum(self.counts[rows][:, columns].T, out=offsets[1:])
        out = np.empty(offsets[-1], dtype=source.dtype)
        kernels.take_bags(self.counts, columns, rows, source, self.starts, which, offsets, out)
        return Bag(torch.from_numpy(out), torch.from_numpy(offsets))


# ---- Columns that grow without being copied

_GROWTH = 1.25


class GrowingArray:
    """Rows of one shape that can be added at the end and freed at the front.

    Growing moves the pages without a copy (mremap). Memory is used only as rows arrive.
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

    def extend(self, rows: Array) -> None:
        """Add rows (n, width)."""
        wanted = (self._rows + len(rows)) * self._row
        if wanted > len(self._map):
            self._grow(wanted)
        first = self._rows
        self._rows += len(rows)
        self.view()[first:] = rows

    def view(self) -> Array:
        """Return all rows (n, width), without a copy. While a view exists, the array cannot grow."""
        flat = np.frombuffer(self._map, self._type, self._rows * self._width)
        return flat.reshape(self._rows, self._width)

    def forget(self, rows: int) -> None:
        """Free the memory of the first rows, which then read as zeros."""
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
                "Examples cannot be added during a pass over the data set. Finish or close the pass first."
            ) from problem


class Store:
    """All examples of a data set, in order of arrival."""

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
        """Return all examples, without a copy."""
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
        """Free the memory of the first `rows` examples. Do not read them again."""
        bags, weights = self._starts.view()[rows]
        for array in (self._dense, self._ids, self._counts):
            array.forget(rows)
        self._bags.forget(int(bags))
        self._weights.forget(int(weights))
