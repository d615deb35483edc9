"""Parse MultiSlot text from blocks of bytes into whole batches of examples.

A line is, for each slot in order, `n v1 .. vn`, separated by blanks. Whole numbers have 64 bits, from -2^63
to 2^64 - 1. Numbers above 2^63 - 1 (unsigned ids) are wrapped to the int64 with the same bits. Floats become
the nearest float32, ties to even. NaN, infinities and numbers beyond float32's range are refused.

The kernel reads most lines. `read_line` reads lines that the kernel leaves, slowly and exactly, and describes
the error of a broken one. `sources` provides the bytes.
"""

from __future__ import annotations

import decimal
import math
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from trainers.data import kernels
from trainers.data.slots import Kind, Layout, Slot
from trainers.data.store import Columns
from trainers.errors import DataError

# ---- One line of MultiSlot text, read slowly and exactly

_WHOLE = re.compile(rb"[+-]?[0-9]+")
_FLOAT = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_BLANKS = re.compile(rb"[ \t]+")
_BEYOND = 2.0**128 - 2.0**103  # from here on a float32 would be infinite
_SHOWN = 40


class BrokenLine(Exception):
    """A line that is not MultiSlot text of these slots. The message has the expected and the found text."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}, found {found}")


@dataclass(slots=True)
class Example:
    """The values of one line, by kind. `counts` are for the slots of any length, in order."""

    dense: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    bags: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


def read_line(line: bytes, layout: Layout) -> Example:
    """Read one line, with or without its end. Raises BrokenLine."""
    words = _Words(line)
    if not words.left:
        raise BrokenLine(f"{len(layout.slots)} slots", "an empty line")
    example = Example()
    for slot in layout.slots:
        count = _count_of(words, slot)
        for number in range(1, count + 1):
            what = f"value {number} of {count} of slot {slot.name!r}"
            if slot.kind in (Kind.DENSE, Kind.WEIGHTS):
                value = _float32(words.next(f"{what}, a number"), what)
                (example.dense if slot.kind is Kind.DENSE else example.weights).append(value)
            else:
                whole = _int64(words.next(f"{what}, a whole number"), what)
                (example.ids if slot.kind is Kind.IDS else example.bags).append(whole)
        if slot.length is None:
            example.counts.append(count)
    if words.left:
        raise BrokenLine(
            f"the end of the line after slot {layout.slots[-1].name!r}", _shown_word(words.next(""))
        )
    return example


class _Words:
    """The words of a line, one after the other."""

    def __init__(self, line: bytes) -> None:
        text = line.removesuffix(b"\n").removesuffix(b"\r").strip(b" \t")
        self._words = _BLANKS.split(text) if text else []
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._words) - self._at

    def next(self, expected: str) -> bytes:
        if not self.left:
            raise BrokenLine(expected, "the end of the line")
        self._at += 1
        return self._words[self._at - 1]


def _count_of(words: _Words, slot: Slot) -> int:
    word = words.next(f"the number of values of slot {slot.name!r}")
    if not _WHOLE.fullmatch(word) or word.startswith(b"-") or len(word) > 12:
        raise BrokenLine(f"the number of values of slot {slot.name!r}", _shown_word(word))
    count = int(word)
    if slot.length is not None and count != slot.length:
        raise BrokenLine(f"{slot.length} as the number of values of slot {slot.name!r}", _shown_word(word))
    return count


def _int64(word: bytes, what: str) -> int:
    digits = word.lstrip(b"+-").lstrip(b"0")
    if not _WHOLE.fullmatch(word):
        raise BrokenLine(f"{what}, a whole number", _shown_word(word))
    value = int(word) if len(digits) <= 20 else 2**64
    if not -(2**63) <= value < 2**64:
        raise BrokenLine(f"{what}, a whole number of 64 bits", _shown_word(word))
    return value if value < 2**63 else value - 2**64


def _float32(word: bytes, what: str) -> float:
    if not _FLOAT.fullmatch(word):
        raise BrokenLine(f"{what}, a finite number", _shown_word(word))
    value = float(word)
    if abs(value) >= _BEYOND:
        raise BrokenLine(f"{what}, a number within float32's range", _shown_word(word))
    return _nearest(word.decode(), value)


def _nearest(text: str, value: float) -> float:
    """Return the float32 nearest to `text`, whose nearest double is `value`.

    Rounding twice is wrong only if the double is the exact middle of two float32 values and the text is not.
    """
    near = np.float32(value)
    if float(near) == value:
        return value
    with np.errstate(over="ignore"):  # beyond the largest value lies infinity
        other = np.nextafter(near, np.float32(math.copysign(math.inf, value - float(near))))
    middle = (float(near) + float(other)) / 2
    if value != middle:
        return float(near)
    exact = decimal.Decimal(text)
    if exact == decimal.Decimal(middle):
        return float(near)  # ties to even, which numpy did
    return float(max(near, other) if exact > decimal.Decimal(middle) else min(near, other))


def _shown_word(word: bytes) -> str:
    text = word.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


# ---- Blocks of bytes into columns

_BLOCK = 1 << 20
_LONGEST_LINE = 64 << 20
_ROWS = 4096  # examples that are passed on together, if a block has as many


class Source(Protocol):
    """A stream of bytes. `name` is for messages."""

    name: str

    def readinto(self, buffer: memoryview) -> int:
        """Fill the start of the buffer. Return the number of bytes, 0 at the end."""


class BrokenLines:
    """Counts broken lines up to a limit. All threads of one pass share it."""

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.count = 0
        self.first = ""

    def add(self, message: str) -> DataError | None:
        """Count one broken line. Return an error if the limit is exceeded."""
        with self._lock:
            self.count += 1
            self.first = self.first or message
            if self.count <= self._limit:
                return None
        if not self._limit:
            return DataError(f"{message}. Fix the file, or set max_bad_lines to skip this many broken lines.")
        return DataError(
            f"{self.count} lines are broken, but max_bad_lines is {self._limit}. First: {self.first}. Last: "
            f"{message}."
        )


class Parser:
    """The reader of one thread, which reads sources one after the other.

    Batches may span sources. `most` examples are passed on together, if that is more than a batch.
    """

    def __init__(self, layout: Layout, batch_size: int, broken: BrokenLines, *, most: int = _ROWS) -> None:
        self._layout = layout
        self._batch = batch_size
        self._broken = broken
        self._room = max(1, most // batch_size) * batch_size
        self._columns = Columns.empty(layout, self._room)
        self._marks = np.zeros(4, dtype=np.int64)
        self._buffer = bytearray(_BLOCK)
        self.lines = 0
        """The lines read from the last source, broken ones included."""
        self._passed = 0  # bytes of the source before the buffer
        self._more = 0  # space for the values of slots of any length

    def read(self, source: Source) -> Iterator[Columns]:
        """Read a whole source, and yield columns of whole batches.

        The remaining examples wait for the next source, or for `rest`. Raises DataError for broken lines.
        """
        self.lines = self._passed = filled = 0
        while got := source.readinto(memoryview(self._buffer)[filled:]):
            end = self._buffer.rfind(b"\n", filled, filled + got) + 1
            filled += got
            if end:
                yield from self._block(source.name, end)
                self._buffer[: filled - end] = self._buffer[end:filled]
                filled -= end
                self._passed += end
                self._marks[kernels.AT] = 0
            if filled == len(self._buffer):
                self._grow(source.name)
        if filled:  # the last line lacks its end
            self._buffer[filled : filled + 1] = b"\n"
            yield from self._block(source.name, filled + 1)

    @property
    def offset(self) -> int:
        """Byte offset in the source of the line after the last yielded examples.

        It lies behind the end of a source whose last line lacks its end.
        """
        return self._passed + int(self._marks[kernels.AT])

    def rest(self) -> Columns:
        """Return the examples that did not fill a batch."""
        return self._columns.rows(0, int(self._marks[kernels.ROWS]))

    def _grow(self, name: str) -> None:
        if len(self._buffer) >= _LONGEST_LINE:
            raise DataError(
                f"{name}:{self.lines + 1}: the line is longer than {_LONGEST_LINE >> 20} MiB. Is it "
                "MultiSlot text?"
            )
        self._buffer = self._buffer + bytearray(len(self._buffer))

    def _block(self, name: str, end: int) -> Iterator[Columns]:
        """Read the whole lines of buffer[:end]."""
        text = np.frombuffer(self._buffer, dtype=np.uint8)
        marks = self._marks
        marks[kernels.AT] = 0
        while True:
            before = int(marks[kernels.ROWS])
            stopped = self._kernel(text, end)
            self.lines += int(marks[kernels.ROWS]) - before
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
        """Return the whole batches."""
        rows = int(self._marks[kernels.ROWS])
        whole = self._columns.rows(0, rows // self._batch * self._batch)
        self._move(len(whole))
        return whole

    def _move(self, start: int) -> None:
        """Move the rows from `start` on into new columns, because yielded columns must not change."""
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
        """Make space for the values of `text` bytes. Each value takes at least two bytes."""
        self._more = text // 2
        self._move(0)

    def _slowly(self, name: str, end: int) -> Iterator[Columns]:
        """Read the line that the kernel left. Batches are yielded only before an error."""
        at = int(self._marks[kernels.AT])
        stop = self._buffer.index(b"\n", at, end) + 1
        self._marks[kernels.AT] = stop
        self.lines += 1
        try:
            example = read_line(bytes(self._buffer[at:stop]), self._layout)
        except BrokenLine as problem:
            error = self._broken.add(f"{name}:{self.lines}: {problem}")
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
