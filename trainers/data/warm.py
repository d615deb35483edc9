"""Call the kernels of the data sets once, so that compiling them does not delay threads later."""

from __future__ import annotations

import functools

import numpy as np

from trainers.data.exchange import take
from trainers.data.multislot import BrokenLines, Parser
from trainers.data.slots import Layout, Slot
from trainers.data.store import Columns


@functools.cache
def warm_up() -> None:
    """Compile the kernels that read text, once per process. Every slot uses the same ones."""
    _read(Slot("a"))


def use_columns() -> None:
    """Compile all kernels, from text to a batch, by an example with every kind of slot."""
    columns = _read(Slot("a", "float32"), Slot("b"), Slot("c", length=None), Slot("d", "float32", None))
    columns.batch()
    columns.gather(np.zeros(1, dtype=np.int64))
    take(columns, np.zeros(1, dtype=np.int64))


def _read(*slots: Slot) -> Columns:
    (columns,) = Parser(Layout.of(slots), 1, BrokenLines()).read(_OneLine(b"1 7 " * len(slots) + b"\n"))
    return columns


class _OneLine:
    name = "one line"

    def __init__(self, text: bytes) -> None:
        self._text = text

    def readinto(self, buffer: memoryview) -> int:
        text, self._text = self._text, b""
        buffer[: len(text)] = text
        return len(text)
