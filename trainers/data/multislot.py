"""MultiSlot text into columns: blocks of bytes in, whole batches of examples out. Knows lines and their
numbers, and what becomes of broken ones; leaves where the bytes come from to `sources`, and the digits to the
kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from trainers.data import multislot_kernels as kernels
from trainers.data.columns import Columns
from trainers.data.images import DataError
from trainers.data.lines import BrokenLine, Example, read_line
from trainers.data.slots import Kind, Layout

_BLOCK = 1 << 20
_LONGEST_LINE = 64 << 20
_ROWS = 4096  # examples read before batches are handed on, where a block has so many


class Source(Protocol):
    """A stream of bytes. `name` is for messages."""

    name: str

    def readinto(self, buffer: memoryview) -> int:
        """Fill the beginning of the buffer; how many bytes, 0 at the end."""
        ...


class BrokenLines:
    """How many lines were broken, and how many may be. Shared by all threads of one pass."""

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.count = 0
        self.first = ""

    def add(self, message: str) -> DataError | None:
        """Count one. The error to raise when it is one too many."""
        with self._lock:
            self.count += 1
            self.first = self.first or message
            if self.count <= self._limit:
                return None
        if not self._limit:
            return DataError(f"{message}. Mend the file, or set max_bad_lines to skip so many such lines")
        return DataError(
            f"{self.count} broken lines, and max_bad_lines is {self._limit}; the first: {self.first}; "
            f"the last: {message}"
        )


class Parser:
    """The reader of one thread: sources one after the other, batches across their borders."""

    def __init__(self, layout: Layout, batch_size: int, broken: BrokenLines) -> None:
        self._layout = layout
        self._batch = batch_size
        self._broken = broken
        self._room = max(1, _ROWS // batch_size) * batch_size
        self._columns = Columns.empty(layout, self._room)
        self._marks = np.zeros(4, dtype=np.int64)
        self._buffer = bytearray(_BLOCK)
        self._lines = 0
        self._more = 0  # room for the values of slots of any length

    def read(self, source: Source) -> Iterator[Columns]:
        """All of a source, as columns of whole batches; the examples that are left over wait for the next
        source, or `rest`. Raises DataError for broken lines.
        """
        self._lines = filled = 0
        while got := source.readinto(memoryview(self._buffer)[filled:]):
            end = self._buffer.rfind(b"\n", filled, filled + got) + 1
            filled += got
            if end:
                yield from self._block(source.name, end)
                self._buffer[: filled - end] = self._buffer[end:filled]
                filled -= end
            if filled == len(self._buffer):
                self._grow(source.name)
        if filled:  # the last line has no end
            self._buffer[filled : filled + 1] = b"\n"
            yield from self._block(source.name, filled + 1)

    @property
    def lines(self) -> int:
        """Lines read of the last source, broken ones included."""
        return self._lines

    def rest(self) -> Columns:
        """The examples that did not make up a batch."""
        return self._columns.rows(0, int(self._marks[kernels.ROWS]))

    def _grow(self, name: str) -> None:
        if len(self._buffer) >= _LONGEST_LINE:
            raise DataError(
                f"{name}:{self._lines + 1}: the line is longer than {_LONGEST_LINE >> 20} MiB; "
                "is this MultiSlot text?"
            )
        self._buffer = self._buffer + bytearray(len(self._buffer))

    def _block(self, name: str, end: int) -> Iterator[Columns]:
        """The whole lines of buffer[:end]."""
        text = np.frombuffer(self._buffer, dtype=np.uint8)
        marks = self._marks
        marks[kernels.AT] = 0
        while True:
            before = int(marks[kernels.ROWS])
            stopped = self._kernel(text, end)
            self._lines += int(marks[kernels.ROWS]) - before
            if stopped == kernels.DONE:
                break
            if stopped == kernels.ROWS_FULL:
                yield self._whole()
            elif stopped == kernels.VALUES_FULL:
                self._widen(end - int(marks[kernels.AT]))
            else:
                yield from self._slowly(name, end)
        if marks[kernels.ROWS] >= self._batch:
            yield self._whole()

    def _kernel(self, text: np.ndarray[tuple[int], np.dtype[np.uint8]], end: int) -> int:
        into = self._columns
        return kernels.parse(
            text, end, self._layout.kinds, self._layout.lengths, into.dense, into.ids, into.counts,
            into.starts, into.bags, into.weights, self._marks,
        )  # fmt: skip

    def _whole(self) -> Columns:
        """Hand on the whole batches."""
        rows = int(self._marks[kernels.ROWS])
        whole = self._columns.rows(0, rows // self._batch * self._batch)
        self._move(len(whole))
        return whole

    def _move(self, start: int) -> None:
        """Into new columns, from row `start` on: what was handed on is never written again."""
        left = self._columns.rows(start, int(self._marks[kernels.ROWS]))
        bags, weights = left.values
        widths = self._layout.widths
        self._columns = Columns.empty(
            self._layout,
            self._room,
            bags + self._more if widths[Kind.BAG] else 0,
            weights + self._more if widths[Kind.WEIGHTS] else 0,
        )
        self._columns.fill(0, [left])
        self._marks[kernels.ROWS :] = len(left), bags, weights

    def _widen(self, text: int) -> None:
        """Room for the values of so many bytes of text; each takes at least two."""
        self._more = text // 2
        self._move(0)

    def _slowly(self, name: str, end: int) -> Iterator[Columns]:
        """The line that the kernel left alone. Batches come only before an error."""
        at = int(self._marks[kernels.AT])
        stop = self._buffer.index(b"\n", at, end) + 1
        self._marks[kernels.AT] = stop
        self._lines += 1
        try:
            example = read_line(bytes(self._buffer[at:stop]), self._layout)
        except BrokenLine as problem:
            error = self._broken.add(f"{name}:{self._lines}: {problem}")
            if error is not None:
                yield self._whole()
                raise error from None
            return
        if len(example.bags) > len(self._columns.bags) - self._marks[kernels.BAGS] or (
            len(example.weights) > len(self._columns.weights) - self._marks[kernels.WEIGHTS]
        ):
            self._widen(end - at)
        self._put(example)

    def _put(self, example: Example) -> None:
        into = self._columns
        row, bags, weights = (int(mark) for mark in self._marks[kernels.ROWS :])
        into.dense[row], into.ids[row], into.counts[row] = example.dense, example.ids, example.counts
        into.bags[bags : bags + len(example.bags)] = example.bags
        into.weights[weights : weights + len(example.weights)] = example.weights
        self._marks[kernels.ROWS :] = row + 1, bags + len(example.bags), weights + len(example.weights)
        into.starts[row + 1] = self._marks[kernels.BAGS :]
