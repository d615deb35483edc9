"""Find processes that the kernel's OOM killer ended, and errors of GPUs.

The sources are the cgroup's counter and the kernel's log. Only root can read the log, or every user where
kernel.dmesg_restrict is 0. Without access, the log counts as empty. The module only reads.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MAX_RECORDS = 20_000
_KILLED = rb"Killed process (\d+) \("
_OF_PROGRAMS = {b"13", b"31", b"43", b"45", b"69"}
"""Errors caused by the program (a bad index, a foreign address) or by its end, and hardly ever by the GPU.

The source is NVIDIA, "Xid Errors".
"""
_GPU_ERROR = rb"^\d+,\d+,(\d+),[^;]*;NVRM: Xid \(([^)]*)\): (\d+)([^\n]*)"


class OomWatch:
    """Remembers the counter and the log position at the start, to separate later kills from earlier ones."""

    def __init__(self) -> None:
        self._counters = list(_counter_files())
        self._before = self._count()
        self._killed: set[int] = set()
        self._log = _open_log()
        if self._log is not None:
            os.lseek(self._log, 0, os.SEEK_END)

    def killed(self, pid: int) -> bool:
        """Return True if process `pid`, ended by a foreign SIGKILL, was killed for lack of memory.

        The kernel's log names pids and is certain. The counter only shows that some process of our cgroup was
        killed.
        """
        now = self._count()
        counted, self._before = now > self._before, now
        for record in _records(self._log):
            if found := re.search(_KILLED, record):
                self._killed.add(int(found[1]))
        return counted or pid in self._killed

    def _count(self) -> int:
        total = 0
        for file in self._counters:
            with suppress(OSError):
                counted = [line.split() for line in file.read_text().splitlines()]
                total += sum(int(words[1]) for words in counted if words[:1] == ["oom_kill"])
        return total


def _counter_files() -> list[Path]:
    with suppress(OSError):
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
    """Return the counter of this group, or of the closest parent with one, which counts all groups
    below it.
    """
    group = root / path.lstrip("/")
    while group.is_relative_to(root):
        if (group / name).exists():
            return [group / name]
        group = group.parent
    return []


def gpu_errors(since: float) -> list[str]:
    """Return the errors (Xid) of NVIDIA GPUs since a moment, in seconds since the epoch, each once.

    Errors that programs cause are left out.
    """
    booted = time.time() - time.monotonic()
    found: dict[str, None] = {}
    fd = _open_log()
    for record in _records(fd):
        error = re.search(_GPU_ERROR, record)
        if error is None or error[3] in _OF_PROGRAMS:
            continue
        if booted + int(error[1]) / 1e6 >= since:
            device, number, words = (each.decode("utf-8", "backslashreplace") for each in error.groups()[1:])
            found[f"GPU {device.removeprefix('PCI:')}: Xid {number}{words}"] = None
    if fd is not None:
        os.close(fd)
    return list(found)


def _open_log() -> int | None:
    with suppress(OSError):
        return os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return None


def _records(fd: int | None) -> Iterator[bytes]:
    """Yield the records that this descriptor has not read yet."""
    if fd is None:
        return
    with suppress(OSError):  # there is no other record
        for _ in range(_MAX_RECORDS):
            with suppress(BrokenPipeError):  # records were overwritten, and the next read gets a newer one
                yield os.read(fd, 8192)
