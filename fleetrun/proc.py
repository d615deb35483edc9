"""Read the processes of this node from the kernel. This is the only reader of `/proc/<pid>/stat`
(proc(5)).
"""

from __future__ import annotations

import select
from pathlib import Path

from fleetrun.values import frozen_by_name


@frozen_by_name
class Stat:
    """The status of a process."""

    pid: int
    name: str
    state: str  # the letter of `ps`
    parent: int
    ticks: int  # processor time in user and kernel mode, in clock ticks
    started: int  # clock ticks since the node booted
    resident: int  # resident memory, in pages
    exit: int  # the wait status of a process that has ended


def readable(fd: int, within: float = 0.0) -> bool:
    """Return True if the descriptor becomes readable within `within` seconds (less than 0: without a limit).

    The descriptor of a process becomes readable when the process has ended.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within * 1000))


def read_stat(pid: int | str, proc: Path = Path("/proc")) -> Stat:
    """Read the status of a pid, or of `self`. Raises ProcessLookupError if the process does not exist."""
    try:
        # The name may hold spaces and parentheses. It ends at the last parenthesis.
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
        raise ProcessLookupError(f"process {pid} does not exist") from None
