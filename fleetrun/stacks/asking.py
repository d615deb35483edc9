"""Asking a process for its own stacks: by the signal at which fleetrun's runtime has `faulthandler` write
them on stderr, which is the log. For where py-spy is not installed or may not look. Never sends the signal to
a process that would die of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from fleetrun.files import open_plain
from fleetrun.stacks.processes import belongs, blocking, catches, state_of, waits_for
from fleetrun.stacks.taken import Target
from fleetrun.stacks.traces import Thread, of_faulthandler

NUMBER = signal.SIGRTMIN + 12
"""The same as in `trainers/process/hooks.py`. SIGUSR1 and SIGUSR2 are the scripts'."""

_PATIENCE = 5.0  # seconds for the stacks to stand in the log
_SETTLED = 0.2  # seconds without another line: that was all
_PAUSE = 0.02
_MOST = 1 << 20  # bytes of a log that are searched for them


def can_ask(target: Target, pid: int) -> bool:
    """Whether that process is of this container and has a handler for the signal."""
    return state_of(pid) not in ("", "Z", "T", "t") and belongs(pid, target.mark) and catches(pid, NUMBER)


def ask(
    target: Target, pid: int, clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[Thread, ...]:  # fmt: skip
    """Its threads, read out of its log; none when it did not write them there in time. Blocks."""
    log = Path(target.log)
    begin, deaf = _size(log), blocking(pid, NUMBER)
    if begin is None or not _send(target, pid):
        return ()
    deadline = clock() + _PATIENCE
    size, since = begin, clock()
    while clock() < deadline:
        now = _size(log) or begin
        if now != size:
            size, since = now, clock()
        elif size > begin and clock() - since >= _SETTLED and _done(pid, deaf) and _threads(log, begin):
            break
        pause(_PAUSE)
    return _threads(log, begin)


def _done(pid: int, deaf: set[int]) -> bool:
    """Whether it has written all; a rest in the middle, for a slow disk, only looks like the end. The kernel
    blocks a signal in the thread that handles it, while those that were `deaf` before did that themselves.
    """
    return not waits_for(pid, NUMBER) and blocking(pid, NUMBER) <= deaf


def _send(target: Target, pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if can_ask(target, pid):  # once more: now the pid cannot become another's
            signal.pidfd_send_signal(pidfd, NUMBER)
            return True
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return False


def _size(log: Path) -> int | None:
    """None for what is no plain file: nothing is read from a FIFO."""
    with contextlib.suppress(OSError):
        return log.lstat().st_size if log.is_file() and not log.is_symlink() else None
    return None


def _threads(log: Path, begin: int) -> tuple[Thread, ...]:
    try:
        with os.fdopen(open_plain(log), "rb") as file:
            file.seek(begin)
            return of_faulthandler(file.read(_MOST).decode("utf-8", "replace"))
    except OSError:
        return ()
