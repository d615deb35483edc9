"""Waits for a launcher and its guard to be gone, and asks by signal those that do not answer. Knows processes
and no job.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path


class Watched:
    """A launcher and the guard that is its parent, from a moment at which both ran. A pid that is not there
    is over already.
    """

    def __init__(self, launcher: int) -> None:
        self._pidfds: list[int] = []
        for pid in (launcher, guard_of(launcher)):
            if pid > 1:
                with contextlib.suppress(OSError):
                    self._pidfds.append(os.pidfd_open(pid))

    def wait(self) -> None:
        """Until both are gone: the guard ends what the launcher left."""
        for fd in self._pidfds:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll()

    def ending(self) -> bool:
        """Whether one of them is gone since: the other follows."""
        return any(_readable(fd) for fd in self._pidfds)

    def over(self) -> bool:
        return all(_readable(fd) for fd in self._pidfds)

    def close(self) -> None:
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds.clear()


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def guard_of(launcher: int) -> int:
    """The parent of this process, if it is a guard; else 0."""
    try:
        parent = int(Path(f"/proc/{launcher}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        name = Path(f"/proc/{parent}/comm").read_text(errors="replace").strip()
    except (OSError, ValueError, IndexError):
        return 0
    return parent if name == "fleetrun-guard" else 0


def ask_by_signal(launcher: int, now: bool) -> bool:
    """End a launcher that cannot be asked; False when it cannot be reached. It is continued if it is stopped.

    By SIGTERM to the guard, which hands it on. `now`: by SIGKILL to the launcher, and the guard kills what
    that leaves. The first signal may be the end of both before the second is sent.
    """
    with contextlib.ExitStack() as stack:
        try:
            it = _held(launcher, stack)  # before its guard is looked for: from here on the pid is no other's
            guard = guard_of(launcher)
            if guard <= 1:
                return False
            its_guard = _held(guard, stack)
            signal.pidfd_send_signal(it if now else its_guard, signal.SIGKILL if now else signal.SIGTERM)
        except OSError:
            return False
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(its_guard, signal.SIGCONT)
        return True


def _held(pid: int, stack: contextlib.ExitStack) -> int:
    """A pidfd as long as the stack lasts."""
    pidfd = os.pidfd_open(pid)
    stack.callback(os.close, pidfd)
    return pidfd
