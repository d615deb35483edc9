"""Recognises the kernel's OOM killer behind a SIGKILL: by the cgroup's counter, or by the kernel's log. Reads
only.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_MAX_RECORDS = 20_000


class OomWatch:
    """Remembers where counter and log stood at the start, to tell later kills from earlier ones."""

    def __init__(self) -> None:
        self._counters = list(_counter_files())
        self._before = self._count()
        self._log = KernelLog()

    def killed(self, pid: int) -> bool:
        """Whether process `pid`, ended by a SIGKILL that we did not send, was killed for lack of memory.

        The kernel's log names pids and is certain; the counter only says that some process of our cgroup was.
        """
        now = self._count()
        counted, self._before = now > self._before, now
        return counted or self._log.names(pid)

    def _count(self) -> int:
        total = 0
        for file in self._counters:
            with contextlib.suppress(OSError):
                counted = [line.split() for line in file.read_text().splitlines()]
                total += sum(int(words[1]) for words in counted if words[:1] == ["oom_kill"])
        return total


def _counter_files() -> list[Path]:
    with contextlib.suppress(OSError):
        found = []
        for line in Path("/proc/self/cgroup").read_text(errors="surrogateescape").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found += _nearest(Path("/sys/fs/cgroup"), path, "memory.events")
            elif "memory" in controllers.split(","):
                found += _nearest(Path("/sys/fs/cgroup/memory"), path, "memory.oom_control")
        return found
    return []


def _nearest(root: Path, path: str, name: str) -> list[Path]:
    """The counter of this group or of the closest one above that has it; it counts all that is below."""
    group = root / path.lstrip("/")
    while group.is_relative_to(root):
        if (group / name).exists():
            return [group / name]
        group = group.parent
    return []


class KernelLog:
    """What the kernel's log says of killed processes from now on. Readable by root, or by everyone where
    kernel.dmesg_restrict is 0; elsewhere it names no process.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._killed: set[int] = set()
        with contextlib.suppress(OSError):
            self._fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def names(self, pid: int) -> bool:
        """Whether a record since the start says that this process was killed."""
        for _ in range(_MAX_RECORDS):
            record = self._next()
            if record is None:
                break
            found = re.search(rb"Killed process (\d+) \(", record)
            if found:
                self._killed.add(int(found.group(1)))
        return pid in self._killed

    def _next(self) -> bytes | None:
        if self._fd is None:
            return None
        try:
            return os.read(self._fd, 8192)
        except BrokenPipeError:
            return b""  # records were overwritten before we read them: the next is there
        except OSError:
            return None
