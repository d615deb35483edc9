"""Read the limits of control groups, version 1 and 2, on this process. The process's own group and all groups
around it count.

In a container, /proc/self/cgroup seems to name groups elsewhere. The mounted groups count then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fleetrun.aliases import Strings
from fleetrun.files import read_file

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class Groups:
    """The control groups of a process.

    MEMBERSHIP has a line for each hierarchy: `0::/path` for version 2, `4:memory:/path` for version 1.
    """

    def __init__(self) -> None:
        lines = read_file(MEMBERSHIP).splitlines()
        self._lines = [line.split(":", 2) for line in lines if line.count(":") > 1]

    def processors(self) -> float | None:
        """Return how many processors these groups allow at most, or None without a limit."""
        pairs = [read_file(group / "cpu.max").partition(" ")[::2] for group in self._groups("")]
        pairs += [
            (read_file(group / "cpu.cfs_quota_us"), read_file(group / "cpu.cfs_period_us"))
            for group in self._groups("cpu")
        ]
        found = [
            int(quota) / int(period)
            for quota, period in pairs
            if quota.isdecimal() and period.isdecimal() and int(period) > 0
        ]
        return min(found, default=None)

    def cores(self) -> int:
        """Return how many cores this process has. The count is limited by the CPU affinity and by the
        processor time that the groups allow.
        """
        quota, visible = self.processors(), len(os.sched_getaffinity(0))
        return visible if quota is None else max(1, min(visible, int(quota)))

    def memory(self) -> Iterator[tuple[int, int]]:
        """Yield each memory limit and how much of it is left, in bytes.

        The kernel reclaims file pages before it kills a process, so they count as free, as in MemAvailable.
        """
        for group in self._groups(""):
            yield from _left(
                group, "memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable")
            )
        for group in self._groups("memory"):
            yield from _left(
                group, "memory.limit_in_bytes", "memory.usage_in_bytes",
                ("total_active_file", "total_inactive_file"),
            )  # fmt: skip

    def tasks(self) -> Iterator[tuple[int, int]]:
        """Yield each limit on processes and threads, and how many are left."""
        for group in (*self._groups(""), *self._groups("pids")):
            yield from _left(group, "pids.max", "pids.current", ())

    def _groups(self, controller: str) -> Iterator[Path]:
        """Yield the groups of a controller, innermost first. Version 2 is mounted at the root or beside
        version 1.
        """
        for _, names, path in self._lines:
            if controller in names.split(","):
                for mount in [ROOT / controller] if controller else [ROOT, ROOT / "unified"]:
                    here = mount / path.lstrip("/")
                    yield from (each for each in (here, *here.parents) if each.is_relative_to(mount))


def _left(group: Path, limit: str, used: str, given_back: Strings) -> Iterator[tuple[int, int]]:
    most, taken = read_file(group / limit), read_file(group / used)
    if most.isdecimal() and taken.isdecimal():
        rows = (line.split() for line in read_file(group / "memory.stat").splitlines()) if given_back else ()
        free = sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in given_back)
        yield int(most), max(0, int(most) - max(0, int(taken) - free))
