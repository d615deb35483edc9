"""Stacks written into the logs of their containers, in one piece, below what stands there. A log that is no
file any more is left alone; a disk that is full too.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from fleetrun.stacks.showing import clean, stack
from fleetrun.stacks.taken import Taken

_FLAGS = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def write(taken: Sequence[Taken], why: str, now: float) -> int:
    """Each container's processes into its log; in how many that was done. `now`: seconds since the epoch."""
    logs: dict[str, list[Taken]] = {}
    for each in taken:
        logs.setdefault(each.target.log, []).append(each)
    return sum(_append(Path(log), _text(members, why, now)) for log, members in logs.items())


def _text(members: Sequence[Taken], why: str, now: float) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    lines = [f"--- fleetrun: {clean(why)}: the stacks of {members[0].target.title}, {stamp} ---"]
    for each in members:
        lines.append(clean(f"{each.title}, pid {each.pid}:"))
        lines += stack(each)
    return "\n".join([*lines, "--- fleetrun: end of the stacks ---", ""])


def _append(log: Path, text: str) -> bool:
    try:
        fd = os.open(log, _FLAGS)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return False
        data = (_newline(fd, found.st_size) + text).encode("utf-8", "backslashreplace")
        return os.write(fd, data) == len(data)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def _newline(fd: int, size: int) -> str:
    """What has to stand before the first line."""
    return "" if size == 0 or os.pread(fd, 1, size - 1) == b"\n" else "\n"
