"""Touching: memory that is asked from the system before it is written. Knows a thread; leaves when and how
much to the arena.

The system clears a page when it is first touched. On a virtual machine its host may have to find one first:
then this takes longer than anything else that happens to a new row, up to 3 ms per MiB.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray

from trainers.ps.kernels.touching import touch_pages


def in_background(words: NDArray[np.int64], start: int, stop: int) -> Future[None]:
    """Touch bytes [start, stop), in one thread for all; others may read and write them meanwhile."""
    return _thread().submit(touch_pages, words, start // 8, stop // 8)


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "memory")
