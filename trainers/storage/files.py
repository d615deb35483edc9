"""Files of this machine: written whole and durable under their name, or not at all.

Knows POSIX and, for large files, O_DIRECT of Linux. Leaves formats, and folders on other machines, to others.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# ---- Direct writes: past the page cache, which would need new memory for every byte. That costs many times
# the processor time of a copy into a block that is reused, and takes it from training.

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


Buffer = bytes | bytearray | memoryview

_MOST_BUFFERS = 1024  # IOV_MAX of Linux
_LARGE = 1 << 20  # bytes of a file that goes past the page cache


def write_all(descriptor: int, content: Sequence[Buffer]) -> int:
    """Write everything at the descriptor's position, one call for up to 1024 pieces where the kernel takes
    them whole. Returns the number of bytes. Raises OSError; then any part may have been written.
    """
    waiting = _views(content)
    total = 0
    first = 0
    while first < len(waiting):
        written = os.writev(descriptor, waiting[first : first + _MOST_BUFFERS])
        total += written
        while first < len(waiting) and written >= len(waiting[first]):
            written -= len(waiting[first])
            first += 1
        if written:
            waiting[first] = waiting[first][written:]
    return total


def _views(content: Sequence[Buffer]) -> list[memoryview]:
    return [memoryview(piece).cast("B") for piece in content if len(piece)]


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable. Without this a file that was renamed may have its old name, or
    none, after a power failure.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: Sequence[Buffer]) -> None:
    """Whole and durable under its name, or not there: written aside, fsync, rename, fsync of the folder.

    A symbolic link in the way is not followed. Raises OSError.
    """
    aside = path.with_name(f".{path.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    descriptor = os.open(aside, flags, 0o666)
    try:
        try:
            if sum(map(len, views := _views(content))) < _LARGE:
                write_all(descriptor, views)
            else:
                write_direct(descriptor, views)
            # Before the rename: else the name could outlive a power failure and the content not.
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
