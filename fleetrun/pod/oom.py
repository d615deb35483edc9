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
    """Remembers the counters at the start, so that later kills can be told from earlier ones."""

    def __init__(self) -> None:
        self._counters = list(_counter_files())
        self._before = self._count()

    def killed(self, pid: int) -> bool:
        """Whether process `pid`, ended by a SIGKILL that we did not send, was killed for lack of memory.

        The kernel's log names pids and is certain; the counter tells only that somebody in our cgroup was.
        """
        now = self._count()
        counted, self._before = now > self._before, now
        return counted or _in_kernel_log(pid)

    def _count(self) -> int:
        total = 0
        for file in self._counters:
            with contextlib.suppress(OSError):
                found = re.search(r"^oom_kill (\d+)", file.read_text(), re.MULTILINE)
                total += int(found.group(1)) if found else 0
        return total


def _counter_files() -> list[Path]:
    with contextlib.suppress(OSError):
        found = []
        for line in Path("/proc/self/cgroup").read_text().splitlines():
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


def _in_kernel_log(pid: int) -> bool:
    """Readable by root, or by everyone where kernel.dmesg_restrict is 0."""
    pattern = re.compile(rb"Killed process %d \(" % pid)
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        for _ in range(_MAX_RECORDS):
            try:
                if pattern.search(os.read(fd, 8192)):
                    return True
            except BrokenPipeError:
                continue  # a record was overwritten while we read: the next is there
            except OSError:
                return False
    finally:
        os.close(fd)
    return False
