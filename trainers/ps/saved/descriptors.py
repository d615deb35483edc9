"""File descriptors: whole writes and folders made durable. Knows POSIX; leaves formats to others, and the
way past the page cache to `direct`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainers.ps.saved.direct import write_direct

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
