"""Processes of this machine as the kernel shows them: the only reader of `/proc/<pid>/stat` (proc(5)), and
whether a descriptor, as that of a process, is readable.
"""

from __future__ import annotations

import select
from pathlib import Path

from fleetrun.values import frozen_by_name


@frozen_by_name
class Stat:
    """`state` is the letter of `ps`. `ticks` of processor in user and kernel mode, `started` in ticks since
    the machine was started, `resident` memory in pages. `exit`: the wait status of one that has ended.
    """

    pid: int
    name: str
    state: str
    parent: int
    ticks: int
    started: int
    resident: int
    exit: int


def readable(fd: int, within: float = 0.0) -> bool:
    """Whether it is, or becomes so within these seconds (less than 0: without a limit). The descriptor of a
    process is readable once that has ended.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within * 1000))


def read_stat(pid: int | str, proc: Path = Path("/proc")) -> Stat:
    """Of a pid, or of `self`. Raises ProcessLookupError when there is no such process."""
    try:
        # The name may hold spaces and parentheses; it ends at the last one.
        head, _, tail = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")
        number, _, name = head.partition(" (")
        fields = tail.split()
        return Stat(
            pid=int(number),
            name=name,
            state=fields[0],
            parent=int(fields[1]),
            ticks=int(fields[11]) + int(fields[12]),
            started=int(fields[19]),
            resident=int(fields[21]),
            exit=int(fields[49]),
        )
    except (OSError, IndexError, ValueError):
        raise ProcessLookupError(f"there is no process {pid}") from None
