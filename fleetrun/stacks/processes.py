"""Read the kernel's facts about a process: its state, its name, its children, and the signals that it
handles. A process that has ended looks like an unknown process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fleetrun.envs.channels import CONTAINER_VARIABLE
from fleetrun.files import read_file
from fleetrun.pod.process import children_of, with_all_below
from fleetrun.proc import read_stat

MOST_BELOW = 16
"""Most Python processes read below one process of the job, because dozens of data loaders look alike."""

_HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"compile_worker")

STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting in the kernel (a disk, a network file system, a driver), uninterruptible",
    "T": "stopped by a signal; `kill -CONT` continues it",
    "t": "stopped by a debugger",
    "Z": "ended",
    "X": "ended",
}


def state_of(pid: int) -> str:
    """Return the state letter that `ps` shows, or "" if the process does not exist."""
    try:
        return read_stat(pid).state
    except ProcessLookupError:
        return ""


def age_of(pid: int) -> float | None:
    """Return the seconds since the process started, or None if it does not exist."""
    with suppress(OSError):
        up = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, up - read_stat(pid).started / os.sysconf("SC_CLK_TCK"))
    return None


def command_of(pid: int) -> str:
    """Return the kernel's name of the process, or "" if the process does not exist."""
    return read_file(Path(f"/proc/{pid}/comm"))


def is_python(pid: int) -> bool:
    """Return True if the program of the process is Python."""
    with suppress(OSError):
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    return False


def belongs(pid: int, mark: str) -> bool:
    """Return True if it was started within the process of the job with that mark.

    The check is needed because pids are reused.
    """
    with suppress(OSError):
        variable = f"{CONTAINER_VARIABLE}={mark}".encode()
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def catches(pid: int, number: int) -> bool:
    """Return True if it has a handler for that signal, so that the signal does not end it."""
    return _has(number, pid, "SigCgt:")


def waits_for(pid: int, number: int) -> bool:
    """Return True if that signal was sent to it and has not reached a handler yet."""
    return _has(number, pid, "SigPnd:", "ShdPnd:")


def _has(number: int, pid: int, *names: str) -> bool:
    return any(mask >> (number - 1) & 1 for _, mask in _masks(pid, *names))


def blocking(pid: int, number: int) -> set[int]:
    """Return its threads that currently block the signal, as threads do that are handling it."""
    return {thread for thread, mask in _masks(pid, "SigBlk:") if mask >> (number - 1) & 1}


def _masks(pid: int, *names: str) -> Iterator[tuple[int, int]]:
    """Yield each thread with its signal mask."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return
    for task in tasks:
        with suppress(OSError, ValueError):  # the thread ends meanwhile
            for line in (task / "status").read_text(errors="replace").splitlines():
                if line.startswith(names):
                    yield int(task.name), int(line.split()[1], 16)


def python_below(pid: int) -> list[int]:
    """Return the Python processes below it that work for the script, nearest first."""
    return [each for each in with_all_below(children_of(pid)) if is_python(each) and not _helper(each)]


def _helper(pid: int) -> bool:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return any(each in words for each in _HELPERS)
    return False
