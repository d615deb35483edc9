"""Examples as columns: a few large arrays instead of an object per value. Knows where each value is; leaves
reading them to the parser and their use to the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainers.data import columns_kernels as kernels
from trainers.data.batch import Bag, Batch
from trainers.data.slots import Kind, Layout

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """`dense` (n, D) float32 and `ids` (n, I) int64 of the slots of fixed length; `counts` (n, C) int32 of
    the slots of any length, whose values stand example by example in `bags` (int64) and `weights` (float32),
    those of example i from starts[i, 0] and starts[i, 1] on; `starts` (n + 1, 2).
    """

    layout: Layout
    dense: NDArray[np.float32]
    ids: Int64s
    counts: NDArray[np.int32]
    starts: Int64s
    bags: Int64s
    weights: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.dense)

    @classmethod
    def empty(cls, layout: Layout, rows: int, bags: int = 0, weights: int = 0) -> Columns:
        """Room for so many examples and values; nothing in it means anything yet but starts[0]."""
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
        """A view of the examples [start, stop)."""
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
        """How many values its bags and weights hold."""
        bags, weights = self.starts[-1] - self.starts[0]
        return int(bags), int(weights)

    @property
    def nbytes(self) -> int:
        """Bytes of its examples."""
        bags, weights = self.values
        fixed = self.dense.nbytes + self.ids.nbytes + self.counts.nbytes + self.starts.nbytes
        return fixed + 8 * bags + 4 * weights

    def batch(self) -> Batch:
        """All of it as one batch; slots of fixed length are views, without a copy."""
        every = np.arange(len(self) if self.layout.varying else 0)
        return self._batch(self.dense, self.ids, every)

    def gather(self, rows: Int64s) -> Batch:
        """A batch of these rows (n,), in this order."""
        dense = np.empty((len(rows), self.dense.shape[1]), dtype=np.float32)
        ids = np.empty((len(rows), self.ids.shape[1]), dtype=np.int64)
        kernels.take_rows(self.dense, rows, dense)
        kernels.take_rows(self.ids, rows, ids)
        return self._batch(dense, ids, rows)

    def _batch(self, dense: NDArray[np.float32], ids: Int64s, rows: Int64s) -> Batch:
        return Batch(
            layout=self.layout,
            dense=torch.from_numpy(dense),
            ids=torch.from_numpy(ids),
            bags=self._bags(Kind.BAG, rows),
            weights=self._bags(Kind.WEIGHTS, rows),
        )

    def _bags(self, kind: Kind, rows: Int64s) -> Bag | None:
        """The slots of this kind one after the other, out of values that stand example by example."""
        columns = self.layout.counted[kind]
        if not len(columns):
            return None
        source, which = (self.bags, 0) if kind is Kind.BAG else (self.weights, 1)
        offsets = np.empty(len(columns) * len(rows) + 1, dtype=np.int64)
        kernels.bag_offsets(self.counts, columns, rows, offsets)
        out = np.empty(offsets[-1], dtype=source.dtype)
        kernels.take_bags(self.counts, columns, rows, source, self.starts, which, offsets, out)
        return Bag(torch.from_numpy(out), torch.from_numpy(offsets))
