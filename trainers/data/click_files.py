"""Write click logs as text, in Criteo's tab-separated lines or in MultiSlot lines.

`clicks` makes the rows. The module converts whole columns at a time. Every field is a matrix of bytes, with
one row per line, padded with zero bytes. The matrices side by side hold all lines. Removing the zero bytes
leaves the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainers.data.clicks import DENSE, MISSING, SLOTS, Clicks, scaled
from trainers.data.slots import Slot

ID_SLOTS = tuple(f"C{slot + 1}" for slot in range(SLOTS))
CLICK_SLOTS = (
    Slot("dense_input", "float32", DENSE),
    *(Slot(name) for name in ID_SLOTS),
    Slot("label", "float32"),
)
"""The slots of a MultiSlot line in order: 13 floats, 26 slots of one id, one label."""

Bytes = npt.NDArray[np.uint8]
_ROWS_AT_ONCE = 8192  # about 8 MB of text


def write_tsv(clicks: Clicks, paths: Sequence[Path]) -> None:
    """Write lines in Criteo's layout, with rows distributed over `paths` in order and in equal parts.

    A line has a label, 13 integers, and 26 categories of 8 hexadecimal digits. Missing values are empty.
    """
    _write(clicks, paths, _tsv_fields)


def write_slots(clicks: Clicks, paths: Sequence[Path]) -> None:
    """Write MultiSlot lines, with rows distributed over `paths` in order and in equal parts.

    A line has `n v1 .. vn` for each of CLICK_SLOTS: 13 floats in [0, 1], then `1 id` 26 times (id 0 means
    missing), then `1 label`. Floats have the shortest form that reads back as the same float32.
    """
    _write(clicks, paths, _slot_fields)


def _write(clicks: Clicks, paths: Sequence[Path], columns: Callable[[Clicks], Iterator[Bytes]]) -> None:
    cuts = [len(clicks) * part // len(paths) for part in range(len(paths) + 1)]
    for path, (first, last) in zip(paths, pairwise(cuts), strict=True):
        with path.open("wb") as file:
            for start in range(first, last, _ROWS_AT_ONCE):
                lines = np.hstack(list(columns(_rows(clicks, start, min(start + _ROWS_AT_ONCE, last)))))
                file.write(lines[lines != 0].tobytes())


def _rows(clicks: Clicks, start: int, stop: int) -> Clicks:
    return Clicks(**{each.name: getattr(clicks, each.name)[start:stop] for each in fields(clicks)})


def _tsv_fields(clicks: Clicks) -> Iterator[Bytes]:
    rows = len(clicks)
    yield _label(clicks)
    for feature in range(DENSE):
        yield _constant(b"\t", rows)
        yield _distinct(clicks.counts[:, feature], lambda count: "" if count == MISSING else str(count))
    for slot in range(SLOTS):
        yield _constant(b"\t", rows)
        yield _hexadecimal(clicks.categories[:, slot]) * (clicks.ids[:, slot, None] != 0)
    yield _constant(b"\n", rows)


def _slot_fields(clicks: Clicks) -> Iterator[Bytes]:
    rows = len(clicks)
    values = scaled(clicks.counts)
    yield _constant(b"13", rows)
    for feature in range(DENSE):
        yield _constant(b" ", rows)
        yield _distinct(values[:, feature], lambda value: str(value).removesuffix(".0"))
    for slot in range(SLOTS):
        yield _constant(b" 1 ", rows)
        yield _decimal(clicks.ids[:, slot])
    yield _constant(b" 1 ", rows)
    yield _label(clicks)
    yield _constant(b"\n", rows)


def _constant(text: bytes, rows: int) -> Bytes:
    return np.broadcast_to(np.frombuffer(text, np.uint8), (rows, len(text)))


def _label(clicks: Clicks) -> Bytes:
    return (clicks.labels[:, None] + ord("0")).astype(np.uint8)


def _distinct(values: npt.NDArray[np.generic], text: Callable[[np.generic], str]) -> Bytes:
    """Return the values as text, where each distinct value is formatted once."""
    different, place = np.unique(values, return_inverse=True)
    texts = np.array([text(value) for value in different], dtype=np.bytes_)
    return texts[place].view(np.uint8).reshape(len(values), -1)


def _hexadecimal(words: npt.NDArray[np.uint32]) -> Bytes:
    """Return (rows, 8) bytes, always 8 digits per number."""
    return np.frombuffer(words.astype(">u4").tobytes().hex().encode(), np.uint8).reshape(-1, 8)


def _decimal(numbers: npt.NDArray[np.int64]) -> Bytes:
    """Return (rows, 20) bytes of numbers that are not negative."""
    return numbers.astype("S20").view(np.uint8).reshape(-1, 20)
