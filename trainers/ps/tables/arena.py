"""Arena: one block of zeroed memory that grows in place. Knows the operating system's memory calls; leaves
what is in it to others.

A lot of address space is reserved at the start and costs nothing: memory comes page by page when it is first
written. So what is in it never moves. Where the system refuses such a reservation (`ulimit -v`,
vm.overcommit_memory=2), the block starts small and is copied to one of twice the size when it is full.
"""

from __future__ import annotations

import mmap
import os
import resource
from concurrent.futures import Future
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainers.ps.tables.errors import FullError
from trainers.ps.tables.touching import in_background

_NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python 3.11 does not name
_SMALL = 4 << 20  # bytes in pages of 4 KiB before larger ones: a small table shall stay small
_HUGE = 2 << 20  # bytes of a page there
_AHEAD = 32 << 20  # bytes
_FIRST = 1 << 20  # bytes of an arena without reservation
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@cache
def reservation() -> int:
    """Bytes of address space for one arena: as much as the machine has memory; 0 where that would be taken
    from others.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    try:
        strict = _OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        strict = False
    if strict or limit != resource.RLIM_INFINITY:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Arena:
    """`words` is the memory as int64. After `grow` it may be another array; old views keep the old memory.

    `reserve` bytes of address space are asked for; with 0, or when that is refused, the arena grows by
    copying.
    """

    words: NDArray[np.int64]

    def __init__(self, reserve: int) -> None:
        self._there = self._used = 0
        self._coming: Future[None] | None = None
        self._reserved = reserve > 0
        try:
            self._map(max(reserve, _FIRST), _NORESERVE if reserve else 0)
        except OSError:
            self._map(_FIRST, 0)
            self._reserved = False

    @property
    def size(self) -> int:
        """Bytes that may be used."""
        return self.words.nbytes

    def grow(self, size: int) -> None:
        """Make room for `size` bytes. Raises FullError."""
        if size <= self.size:
            return
        old = self.words
        try:
            self._map(max(size, 2 * self.size), 0)
        except OSError as error:
            raise FullError(
                f"no memory for {size >> 20} MiB of rows ({error}); start more servers, or shrink the table"
            ) from error
        self.words[: len(old)] = old

    def expect(self, size: int, scale: int | None = None) -> None:
        """The first `size` bytes are about to be in use: get memory for them and some more in the background,
        at most 32 MiB and an eighth of `scale` (of `size`, if not given). A large arena that grows steadily
        then finds its memory there. Not without reservation: a thread needs address space of its own.
        """
        begin, more = max(self._there, self._used), min((scale or size) // 8, _AHEAD)
        self._used = size
        if more < _HUGE or not self._reserved:
            return
        stop = min(size + more, self.size) // _HUGE * _HUGE
        if stop - begin >= _HUGE and (self._coming is None or self._coming.done()):
            self._coming = in_background(self.words, begin, stop)
            self._there = stop

    def give_back(self, size: int) -> None:
        """Return the memory behind the first `size` bytes to the system; it reads as zeros from now on."""
        self._there, self._used = min(self._there, size), size
        start = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < self.size:
            self._block.madvise(mmap.MADV_DONTNEED, start, self.size - start)

    def _map(self, size: int, flags: int) -> None:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
        if size > _SMALL:
            block.madvise(mmap.MADV_HUGEPAGE, _SMALL, size - _SMALL)
        self._block, self.words = block, np.frombuffer(block, np.int64)
