"""Recognises the kernel's OOM killer behind a SIGKILL: by the cgroup's counter, or by the kernel's log. Reads
only.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from fleetrun.pod.kernel_log import KernelLog


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
