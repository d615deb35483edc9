"""Files in a folder where scripts may have put anything by now: a pipe, a link to a device, a folder. Opened
and written without waiting for whoever is at the other end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_plain(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of a regular file. Raises OSError, also for what is there and is none."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "Not a file")
    if flags & os.O_ACCMODE != os.O_RDONLY:
        os.set_blocking(fd, True)  # who inherits it did not ask for the other
    return fd


def write_anew(path: Path, text: str) -> None:
    """In place of whatever is there, and whole at once. Raises OSError."""
    aside = path.with_suffix(".new")
    aside.unlink(missing_ok=True)
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    aside.replace(path)
