"""Direct writes: a large file's content to the disk, past the page cache. Knows O_DIRECT of Linux; leaves
names and durability to `descriptors`.

The page cache wants new memory for every byte: that costs many times the processor time of a copy into a
block that is used again and again, and takes it from those that train.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 4096  # of addresses, places in the file and lengths: enough for every disk
_BLOCK = 8 << 20


class _Own(threading.local):
    """A block for each thread. Memory of the system's begins at a page."""

    def __init__(self) -> None:
        self.block: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, _BLOCK), np.uint8)


_own = _Own()


def write_direct(descriptor: int, content: Sequence[memoryview]) -> None:
    """Write everything to a new file; through the page cache where the file system wants that. Raises
    OSError; then any part may have been written.
    """
    _set_direct(descriptor, True)
    block, used = _own.block, 0
    for piece in content:
        left = np.frombuffer(piece, np.uint8)
        while len(left):
            count = min(len(left), _BLOCK - used)
            np.copyto(block[used : used + count], left[:count])  # unlike memoryviews, without the GIL
            left, used = left[count:], used + count
            if used == _BLOCK:
                _write(descriptor, block.data)
                used = 0
    whole = used // _ALIGNMENT * _ALIGNMENT
    _write(descriptor, block[:whole].data)
    _set_direct(descriptor, False)
    _write(descriptor, block[whole:used].data)


def _write(descriptor: int, block: memoryview) -> None:
    done = 0
    while done < len(block):
        try:
            done += os.write(descriptor, block[done:])
        except OSError as error:
            if error.errno != errno.EINVAL or not _set_direct(descriptor, False):
                raise


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Whether that changed anything: some file systems refuse O_DIRECT here, others at the first write."""
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    after = before | os.O_DIRECT if wanted else before & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, after)
    except OSError:
        return False
    return after != before
