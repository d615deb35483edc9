"""Compile kernels that parse MultiSlot text into rows, and gather rows into batches.

The kernels work on arrays and run without the GIL. The text kernel reads whole lines. It stops before a
broken line, and before a float so close to the middle of two float32 values that double arithmetic cannot
decide. `read_line` of `multislot`, which is slow and exact, reads such a line.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainers.kernels.compiled import Floats, compiled

# ---- The kernel for MultiSlot text

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

# Results of `parse`.
DONE = 0  # every line is read
ROWS_FULL = 1  # all rows are used
VALUES_FULL = 2  # the space for values of slots of any length is used
LINE = 3  # the next line needs `read_line`

# Indices in `marks`, which holds the progress.
AT, ROWS, BAGS, WEIGHTS = 0, 1, 2, 3

_TAB, _NEWLINE, _RETURN, _SPACE = 9, 10, 13, 32
_PLUS, _MINUS, _DOT, _ZERO = 43, 45, 46, 48
_DIGITS = 19  # this many decimal digits always fit into 64 bits
_TENTH = np.uint64((2**64 - 1) // 10)  # 2^64 - 1 ends in 5
_POWERS = np.array([float(f"1e{e}") for e in range(61)])
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
_LARGEST = float(np.finfo(np.float32).max)
# A float32 keeps 24 of a double's 53 bits. If the 29 others are 1 << 28, the double is the middle of two
# float32.
_LOST_BITS, _MIDDLE, _DOUBT = (1 << 29) - 1, 1 << 28, 8


@compiled
def _whole(text: Bytes, at: int) -> tuple[Any, int, Any]:
    """Return (value wrapped to 64 bits, end, True if it is a whole number within 64 bits)."""
    negative = text[at] == _MINUS
    if negative or text[at] == _PLUS:
        at += 1
    value = np.uint64(0)
    start = at
    digit = np.uint64(text[at]) - np.uint64(_ZERO)
    while digit < np.uint64(10):
        if at - start >= _DIGITS and (value > _TENTH or (value == _TENTH and digit > np.uint64(5))):
            return 0, at, False
        value = value * np.uint64(10) + digit
        at += 1
        digit = np.uint64(text[at]) - np.uint64(_ZERO)
    if negative:
        return -np.int64(value), at, at > start and value <= np.uint64(1 << 63)
    return np.int64(value), at, at > start


@compiled
def _mantissa(text: Bytes, at: int) -> tuple[Any, int, int, int]:
    """Return (first digits as a whole number, power of ten, end, number of digits) of `12.34`."""
    value = np.uint64(0)
    power = 0
    seen = 0
    kept = 0
    fraction = False
    while True:
        byte = text[at]
        if byte == _DOT and not fraction:
            fraction = True
            at += 1
            continue
        digit = np.uint64(byte) - np.uint64(_ZERO)
        if digit > np.uint64(9):
            return value, power, at, seen
        seen += 1
        if kept < _DIGITS:
            value = value * np.uint64(10) + digit
            kept += 1 if value != np.uint64(0) else 0
            power -= 1 if fraction else 0
        else:
            power += 0 if fraction else 1
        at += 1


@compiled
def _exponent(text: Bytes, at: int) -> tuple[int, int, bool]:
    """Return (exponent, end, True if valid) of the text after a mantissa, which may be empty or `e-5`."""
    if text[at] != 69 and text[at] != 101:
        return 0, at, True
    at += 1
    negative = text[at] == _MINUS
    if negative or text[at] == _PLUS:
        at += 1
    start = at
    value = 0
    while _ZERO <= text[at] <= _ZERO + 9:
        value = min(value * 10 + text[at] - _ZERO, 100_000)
        at += 1
    return -value if negative else value, at, at > start


@compiled
def _float(text: Bytes, at: int) -> tuple[float, int, bool]:
    """Return (value, end, True if the value is certainly the float32 nearest to the text)."""
    negative = text[at] == _MINUS
    if negative or text[at] == _PLUS:
        at += 1
    whole, power, at, seen = _mantissa(text, at)
    exponent, at, good = _exponent(text, at)
    power += exponent
    value = np.float64(whole)
    if not good or seen == 0 or power > 60 or power < -60:
        return 0.0, at, good and seen > 0 and whole == 0
    if power < 0:
        value /= _POWERS[-power]
    elif power > 0:
        value *= _POWERS[power]
    if value != 0.0 and not (_SMALLEST_NORMAL <= value <= _LARGEST):
        return 0.0, at, False
    if power != 0 or whole > np.uint64(1 << 53):  # the double itself is rounded, by half a unit at each step
        lost = np.int64(np.float64(value).view(np.int64)) & _LOST_BITS
        if _MIDDLE - _DOUBT <= lost <= _MIDDLE + _DOUBT:
            return 0.0, at, False
    return -value if negative else value, at, True


@compiled
def _skip(text: Bytes, at: int) -> int:
    while text[at] == _SPACE or text[at] == _TAB:
        at += 1
    return at


@compiled
def _line_end(text: Bytes, at: int) -> int:
    """Return the start of the next line if only blanks remain in this one, else -1."""
    at = _skip(text, at)
    if text[at] == _RETURN:
        at += 1
    return at + 1 if text[at] == _NEWLINE else -1


@compiled
def _floats(text: Bytes, at: int, out: Floats) -> int:
    """Read len(out) floats. Return the end of the last one, or -1."""
    for i in range(len(out)):
        begin = _skip(text, at)
        value, end, good = _float(text, begin)
        if not good or begin == at or text[end] > _SPACE:
            return -1
        out[i] = value
        at = end
    return at


@compiled
def _wholes(text: Bytes, at: int, out: Int64s) -> int:
    """Read len(out) whole numbers. Return the end of the last one, or -1."""
    for i in range(len(out)):
        begin = _skip(text, at)
        value, end, good = _whole(text, begin)
        if not good or begin == at or text[end] > _SPACE:
            return -1
        out[i] = value
        at = end
    return at


@compiled
def _row(
    text: Bytes,
    at: int,
    kinds: Int64s,
    lengths: Int64s,
    dense: Floats,
    ids: Int64s,
    counts: Int32s,
    bags: Int64s,
    weights: Floats,
) -> tuple[int, int, int]:
    """Read one line into one row. Return (its end, or -1 if broken, -2 without space; ids read; floats
    read).
    """
    floats_at = ids_at = counts_at = bags_at = weights_at = 0
    for slot in range(len(kinds)):
        count, end, good = _whole(text, _skip(text, at))
        if not good or text[end] > _SPACE or count < 0 or (lengths[slot] >= 0 and count != lengths[slot]):
            return -1, 0, 0
        if kinds[slot] == 0:
            at = _floats(text, end, dense[floats_at : floats_at + count])
            floats_at += count
        elif kinds[slot] == 1:
            at = _wholes(text, end, ids[ids_at : ids_at + count])
            ids_at += count
        else:
            room = len(bags) - bags_at if kinds[slot] == 2 else len(weights) - weights_at
            if count > len(text) - end:
                return -1, 0, 0
            if count > room:
                return -2, 0, 0
            if kinds[slot] == 2:
                at = _wholes(text, end, bags[bags_at : bags_at + count])
                bags_at += count
            else:
                at = _floats(text, end, weights[weights_at : weights_at + count])
                weights_at += count
            counts[counts_at] = count
            counts_at += 1
        if at < 0:
            return -1, 0, 0
    return at, bags_at, weights_at


@compiled
def parse(
    text: Bytes,
    stop: int,
    kinds: Int64s,
    lengths: Int64s,
    dense: Floats,
    ids: Int64s,
    counts: Int32s,
    starts: Int64s,
    bags: Int64s,
    weights: Floats,
    marks: Int64s,
) -> int:
    """Parse the whole lines of text[marks[AT] : stop] into rows from marks[ROWS] on. The last byte is a
    newline.

    dense is (rows, D), ids (rows, I), and counts (rows, C) for the slots of any length. starts (rows + 1, 2)
    holds their first positions in bags and weights. Returns DONE, ROWS_FULL, VALUES_FULL or LINE. `marks`
    then points to the first unread line.
    """
    while marks[AT] < stop:
        row = marks[ROWS]
        if row >= len(dense):
            return ROWS_FULL
        at, more_bags, more_weights = _row(
            text, marks[AT], kinds, lengths, dense[row], ids[row], counts[row],
            bags[marks[BAGS] :], weights[marks[WEIGHTS] :],
        )  # fmt: skip
        if at == -2:
            return VALUES_FULL
        at = -1 if at < 0 else _line_end(text, at)
        if at < 0:
            return LINE
        marks[AT] = at
        marks[ROWS] += 1
        marks[BAGS] += more_bags
        marks[WEIGHTS] += more_weights
        starts[row + 1, 0] = marks[BAGS]
        starts[row + 1, 1] = marks[WEIGHTS]
    return DONE


# ---- Kernels that combine examples, for `store` and `exchange`


@compiled
def take_bags(
    counts: Int32s,
    columns: Int64s,
    rows: Int64s,
    values: Array,
    starts: Int64s,
    which: int,
    offsets: Int64s,
    out: Array,
) -> None:
    """Copy the values of these rows' bags, from example order to slot order.

    `offsets` (slots * n + 1,) has the start of each bag in `out`. starts[:, which] (all rows + 1,) is where
    each example's values start.
    """
    for i in range(len(rows)):
        at = starts[rows[i], which]
        for slot in range(len(columns)):
            to = offsets[slot * len(rows) + i]
            for j in range(counts[rows[i], columns[slot]]):
                out[to + j] = values[at + j]
            at += counts[rows[i], columns[slot]]


@compiled
def take_values(values: Array, starts: Int64s, which: int, rows: Int64s, out: Array) -> None:
    """Copy the values of these examples, one after the other. `starts[:, which]` holds the start of each
    example.
    """
    to = 0
    for i in range(len(rows)):
        for at in range(starts[rows[i], which], starts[rows[i] + 1, which]):
            out[to] = values[at]
            to += 1
