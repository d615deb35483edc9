"""Read Criteo's click logs as MultiSlot text, as a pipe_command. It runs from any directory.

    dataset.init(use_var=slots, pipe_command="python -m trainers.examples.criteo_reader", batch_size=512)

A line of the logs is a label, 13 whole numbers and 26 categories of up to 8 hexadecimal digits, separated by
tabs. All fields except the label may be missing. It becomes `dense_input` (13 floats), `C1` .. `C26` (an id
each) and `label`.

Most numbers and categories of a line occur in earlier lines, so the text of each is made once and then looked
up. This is several times as fast as a `trainers.data.generator.MultiSlotDataGenerator`, which is easier to
write.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import getitem

DENSE, CATEGORIES = 13, 26
FIELDS = 1 + DENSE + CATEGORIES
# The usual constants for this data. A value becomes (value - least) / difference.
LEAST = (0, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
DIFFERENCE = (20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50)
_64_BITS = (1 << 64) - 1


def mixed(value: int) -> int:
    """Apply SplitMix64's finisher (Steele, Lea and Flood, 2014), one to one, with random-looking 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _64_BITS
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _64_BITS
    return value ^ (value >> 31)


def whole(text: str | bytes, base: int = 10) -> int:
    """Return a number of the logs. Raises ValueError for `1_0`, ` 1` and `0xf`, which `int` accepts."""
    if re.fullmatch("-?[0-9a-fA-F]+", text if isinstance(text, str) else text.decode()) is None:
        raise ValueError(f"{text!r} is not a whole number of base {base}")
    return int(text, base)


def label_of(text: str | bytes) -> int:
    """Return 0 or 1."""
    if (found := whole(text)) not in (0, 1):
        raise ValueError(f"the label is {found}; it must be 0 or 1")
    return found


def category_id(slot: int, text: str | bytes) -> int:
    """Return an id of 63 bits for a category of slot 0 to 25, or 0 if it is missing.

    Ids are equal in every process, unlike the results of Python's hash().
    """
    return mixed(whole(text, 16) ^ (slot + 1 << 33)) >> 1 if text else 0


def normal(column: int, text: str | bytes) -> float:
    """Return a number of column 0 to 12, scaled to about 0 to 1, or 0 if it is missing."""
    return (whole(text) - LEAST[column]) / DIFFERENCE[column] if text else 0.0


class _Texts(dict[bytes, bytes]):
    """Maps a field to its text, made at the first access. Too many entries clear the whole map."""

    MOST = 50_000

    def __init__(self, make: Callable[[bytes], str]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, field: bytes) -> bytes:
        if len(self) >= self.MOST:
            self.clear()
        text = self[field] = self._make(field).encode()
        return text


def _tables() -> list[_Texts]:
    """Return one map for each field of a line, in its order."""

    def dense(column: int) -> _Texts:
        before = "" if column else f"{DENSE} "
        return _Texts(lambda field: f"{before}{normal(column, field)}")

    def category(slot: int) -> _Texts:
        return _Texts(lambda field: f"1 {category_id(slot, field)}")

    label = _Texts(lambda field: f"1 {label_of(field)}")
    return [label, *map(dense, range(DENSE)), *map(category, range(CATEGORIES))]


def texts(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the MultiSlot text of each line, without its end."""
    tables = _tables()
    for number, line in enumerate(lines, start=1):
        fields = line.rstrip(b"\r\n").split(b"\t")
        if len(fields) != FIELDS:
            raise ValueError(f"line {number} has {len(fields)} fields; Criteo's logs have {FIELDS}")
        label, *values = map(getitem, tables, fields)
        values.append(label)
        yield b" ".join(values)


def run_from_stdin() -> None:
    """Convert standard input to standard output."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # avoids a traceback if the reader closes the pipe early
    lines = os.fdopen(0, "rb", buffering=1 << 20, closefd=False)
    texts_left = texts(lines)
    while some := list(islice(texts_left, 500)):
        sys.stdout.buffer.write(b"\n".join(some) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    run_from_stdin()
