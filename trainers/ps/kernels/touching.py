"""Touching: pages of memory, so that the system provides them."""

from __future__ import annotations

from trainers.ps.kernels.compiled import Keys, Scalar, compiled
from trainers.ps.kernels.memory import touch

_PAGE = 4096 // 8  # words of the smallest pages; of larger ones this touches every part


@compiled
def touch_pages(words: Keys, start: Scalar, stop: Scalar) -> None:
    """Words [start, stop) get memory and stay as they are, whatever others do with them meanwhile."""
    for place in range(start, stop, _PAGE):
        touch(words, place)
