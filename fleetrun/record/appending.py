"""A file that gets whole lines at its end, on a disk that may be full. Knows nothing of what they say."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path


class Appender:
    """Readable by its owner only. As long as it is open it holds the file's lock; by that a reader knows."""

    def __init__(self, path: Path) -> None:
        self._fd = _opened(path)
        self._locked = self._fd >= 0 and self._lock()
        self._torn = False
        self.written = 0

    def append(self, line: bytes) -> bool:
        """Whether all of it, and the end of the line, is in the file now. What a full disk tears off stays a
        line of its own.
        """
        if self._fd < 0:
            return False
        self._locked = self._locked or self._lock()
        data = b"\n" * self._torn + line + b"\n"
        try:
            written = os.write(self._fd, data)
        except OSError:
            return False
        self.written += written
        self._torn = written < len(data) if written else self._torn
        return written == len(data)

    def close(self) -> None:
        """May be called twice; after it nothing is written."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _lock(self) -> bool:
        """A reader may hold it for a moment; a file system may have none."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False


def _opened(path: Path) -> int:
    """A descriptor that appends to a regular file, or -1. Waits for nobody (a FIFO's reader)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError:
        return -1
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return -1
    return fd
