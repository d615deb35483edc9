"""Other processes as /proc shows them: who descends from whom, who carries a mark, what they used; and an end
to them. A process that has ended is not an error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


def pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int, besides: Iterable[int] = ()) -> list[int]:
    """All processes below `pid`, without those in `besides` and what is below them."""
    skipped = set(besides)
    found: list[int] = []
    wave = [pid]
    while wave:
        wave = [child for parent in wave for child in children(parent) if child not in skipped]
        found += wave
    return found


def cpu_seconds(pid: int) -> float:
    """What its threads have used: by the scheduler's nanoseconds, or in ticks where those are not kept."""
    with contextlib.suppress(OSError):
        tasks = list((_PROC / str(pid) / "task").iterdir())
        used = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
        if used:
            return used / 1e9
    with contextlib.suppress(OSError):
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    return 0.0


def peak_rss_mb(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / 1024
    return 0.0


def carries(pid: int, mark: bytes) -> bool:
    """Whether a live process has `mark` ("NAME=value") in its environment; a zombie has none."""
    try:
        return mark in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def carriers(mark: bytes) -> list[int]:
    pids = (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    return [pid for pid in pids if pid != os.getpid() and carries(pid, mark)]


def kill_carriers(mark: bytes, timeout: float = 10.0) -> None:
    """SIGKILL every process with `mark` until there is none. By pidfd, so that a reused id is not hit."""
    deadline = time.monotonic() + timeout
    while (found := carriers(mark)) and time.monotonic() < deadline:
        for pid in found:
            fd = pidfd(pid)
            if fd is None:
                continue
            if carries(pid, mark):
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        time.sleep(0.01)
