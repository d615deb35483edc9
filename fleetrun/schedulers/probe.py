"""The probes of a Kubernetes pod: `python -m fleetrun.schedulers.probe live|ready`, with the answer as exit
code.

live: a launcher exists and is not stopped. ready: it runs at least one process of the job. The module imports
nothing else of fleetrun, because it runs every few seconds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_LAUNCHER = b"fleetrun"
_MARK = b"FLEETRUN_CONTAINER="
_STOPPED = b"TtZX"


def main(argv: list[str], proc: Path = Path("/proc")) -> int:
    """Return 0 for yes, 1 for no, 2 for an unknown question."""
    questions = {"live": live, "ready": ready}
    if len(argv) != 1 or argv[0] not in questions:
        sys.stderr.write("usage: python -m fleetrun.schedulers.probe live|ready\n")
        return 2
    return 0 if questions[argv[0]](proc) else 1


def live(proc: Path) -> bool:
    """Return True if a launcher exists and is not stopped."""
    for entry in _processes(proc):
        head, _, rest = _read(entry / "stat").rpartition(b") ")
        if head.partition(b"(")[2] == _LAUNCHER and rest[:1] not in _STOPPED:
            return True
    return False


def ready(proc: Path) -> bool:
    """Return True if a process of the job runs."""
    return any(
        any(variable.startswith(_MARK) for variable in _read(entry / "environ").split(b"\0"))
        for entry in _processes(proc)
    )


def _processes(proc: Path) -> Iterator[Path]:
    return (entry for entry in proc.iterdir() if entry.name.isdigit() and entry.name != str(os.getpid()))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return b""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
