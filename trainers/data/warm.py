"""All kernels of the data sets, called once: what is not compiled on this machine yet is compiled, with a
word about it, before threads wait for it. Knows which kernels there are; leaves compiling to `compiled`.
"""

from __future__ import annotations

import functools

import numpy as np

from trainers.data import multislot_kernels
from trainers.data.exchange import take
from trainers.data.multislot import BrokenLines, Parser
from trainers.data.slots import Layout, Slot
from trainers.ps.kernels.compiled import cache_folder, compile_once


@functools.cache
def warm_up() -> None:
    """Once per process; takes some seconds on the first start on a machine, and then a fraction of one."""
    compile_once(cache_folder(multislot_kernels.parse), compile_data_kernels)


def compile_data_kernels() -> None:
    """An example of every kind of slot, all the way from text to a batch."""
    slots = [Slot("a", "float32"), Slot("b"), Slot("c", length=None), Slot("d", "float32", None)]
    parser = Parser(Layout.of(slots), 1, BrokenLines())
    for columns in parser.read(_OneLine()):
        columns.batch()
        columns.gather(np.zeros(1, dtype=np.int64))
        take(columns, np.zeros(1, dtype=np.int64))


class _OneLine:
    name = "one line"

    def __init__(self) -> None:
        self._text = b"1 0.5 1 7 1 8 1 0.5\n"

    def readinto(self, buffer: memoryview) -> int:
        got, self._text = len(self._text), b""
        buffer[:got] = b"1 0.5 1 7 1 8 1 0.5\n"[:got]
        return got
