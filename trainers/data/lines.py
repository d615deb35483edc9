"""One line of MultiSlot text, read slowly and exactly: what the kernel is not certain of comes here. Knows
the grammar and says what is wrong with a line; leaves files and line numbers to `multislot`.

A line is, for each slot in order, `n v1 .. vn`, separated by blanks. Whole numbers are 64-bit: from -2^63 to
2^64 - 1, where what is above 2^63 - 1 (unsigned ids) is wrapped: the int64 with the same 64 bits. Floats
become the nearest float32, ties to even; nan, infinities and what is beyond float32's range are refused.
"""

from __future__ import annotations

import decimal
import math
import re
from dataclasses import dataclass, field

import numpy as np

from trainers.data.slots import Kind, Layout, Slot

_WHOLE = re.compile(rb"[+-]?[0-9]+")
_FLOAT = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_BLANKS = re.compile(rb"[ \t]+")
_BEYOND = 2.0**128 - 2.0**103  # from here on a float32 would be infinite
_SHOWN = 40


class BrokenLine(Exception):
    """A line that is not MultiSlot text of these slots; the message says what was expected and what stood
    there.
    """

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}, found {found}")


@dataclass(slots=True)
class Example:
    """The values of one line, by kind; `counts` of the slots of any length, in order."""

    dense: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    bags: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


def read_line(line: bytes, layout: Layout) -> Example:
    """One line, with or without its end. Raises BrokenLine."""
    words = _Words(line)
    if not words.left:
        raise BrokenLine(f"{len(layout.slots)} slots", "an empty line")
    example = Example()
    for slot in layout.slots:
        count = _count(words, slot)
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
        raise BrokenLine(f"the end of the line after slot {layout.slots[-1].name!r}", _shown(words.next("")))
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


def _count(words: _Words, slot: Slot) -> int:
    word = words.next(f"the number of values of slot {slot.name!r}")
    if not _WHOLE.fullmatch(word) or word.startswith(b"-") or len(word) > 12:
        raise BrokenLine(f"the number of values of slot {slot.name!r}", _shown(word))
    count = int(word)
    if slot.length is not None and count != slot.length:
        raise BrokenLine(f"{slot.length} as the number of values of slot {slot.name!r}", _shown(word))
    return count


def _int64(word: bytes, what: str) -> int:
    digits = word.lstrip(b"+-").lstrip(b"0")
    if not _WHOLE.fullmatch(word):
        raise BrokenLine(f"{what}, a whole number", _shown(word))
    value = int(word) if len(digits) <= 20 else 2**64
    if not -(2**63) <= value < 2**64:
        raise BrokenLine(f"{what}, a whole number of 64 bits", _shown(word))
    return value if value < 2**63 else value - 2**64


def _float32(word: bytes, what: str) -> float:
    if not _FLOAT.fullmatch(word):
        raise BrokenLine(f"{what}, a finite number", _shown(word))
    value = float(word)
    if abs(value) >= _BEYOND:
        raise BrokenLine(f"{what}, a number within float32's range", _shown(word))
    return _nearest(word.decode(), value)


def _nearest(text: str, value: float) -> float:
    """The float32 nearest to `text`, whose nearest double is `value`.

    Rounding twice goes wrong only where the double is the very middle of two float32 values and the text is
    not.
    """
    near = np.float32(value)
    if float(near) == value:
        return value
    with np.errstate(over="ignore"):  # beyond the largest stands infinity
        other = np.nextafter(near, np.float32(math.copysign(math.inf, value - float(near))))
    middle = (float(near) + float(other)) / 2
    if value != middle:
        return float(near)
    exact = decimal.Decimal(text)
    if exact == decimal.Decimal(middle):
        return float(near)  # ties to even, which numpy did
    return float(max(near, other) if exact > decimal.Decimal(middle) else min(near, other))


def _shown(word: bytes) -> str:
    text = word.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
