"""Two processes that watch each other, so that nothing outlives either.

    shell -> guard (sub-reaper) -> launcher (sub-reaper, own process group) -> containers (own sessions)

The process that the person started becomes the guard and does nothing but wait; a fork of it, taken before
anything large is imported, is the launcher. Whatever signal the guard gets it hands on. When the launcher is
gone, for whatever reason, its orphans become children of the guard, which kills them all, those with a
session of their own too. When the guard is gone (SIGKILL), the launcher sees it by pidfd and does the same.
Neither needs root.

The launcher has a process group of its own so that the terminal's Ctrl-C reaches it once, through the guard,
and not twice.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from fleetrun.pod import cgroup, linux
from fleetrun.pod.process import end_descendants
from fleetrun.pod.signals import Signals, governed
from fleetrun.pod.status import Exit


def guarded(work: Callable[[Signals, int], int]) -> int:
    """Run `work(signals, guard_pidfd)` in a guarded process; its result is the exit code of both.

    Returns in the guard only. `guard_pidfd` is readable once the guard is gone.
    """
    numbers = governed()
    linux.become_subreaper()
    signal.pthread_sigmask(
        signal.SIG_BLOCK, numbers | {signal.SIGCHLD}
    )  # none is lost before its handler is there
    guard = os.getpid()
    launcher = os.fork()
    if launcher == 0:
        _launcher(work, numbers, guard)
    linux.set_comm("fleetrun-guard")
    cgroup.enclose(launcher)
    return _guard(launcher, numbers)


def _launcher(work: Callable[[Signals, int], int], numbers: set[int], guard: int) -> NoReturn:
    os.setpgid(0, 0)
    linux.become_subreaper()
    linux.set_comm("fleetrun")
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it writes to the terminal from the background
    guard_pidfd = os.pidfd_open(guard) if os.getppid() == guard else os.open("/dev/null", os.O_RDONLY)
    signals = Signals(numbers | {signal.SIGCHLD, signal.SIGIO})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers | {signal.SIGCHLD})
    try:
        code = work(signals, guard_pidfd)
    except BaseException:  # noqa: BLE001 - the last line of this process: nothing may get past it into the guard's code
        sys.excepthook(*sys.exc_info())
        code = 125
    flush()
    os._exit(code)  # no interpreter teardown: it costs milliseconds and there is nothing left to free


def flush() -> None:
    """Both standard streams; a reader that has gone is fine."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # a closed pipe: nobody reads any more


def _guard(launcher: int, numbers: set[int]) -> int:
    handed_on: set[int] = set()
    while True:
        number = signal.sigwaitinfo(numbers | {signal.SIGCHLD}).si_signo
        if number != signal.SIGCHLD:
            handed_on.add(number)
            os.kill(launcher, number)
            continue
        pid, status = os.waitpid(launcher, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            continue
        if not os.WIFSTOPPED(status):
            return _ended(Exit(os.waitstatus_to_exitcode(status)), handed_on)
        if signal.SIGTSTP in handed_on:  # Ctrl-Z: the job has stopped, now the command stops too
            handed_on.discard(signal.SIGTSTP)
            os.kill(os.getpid(), signal.SIGSTOP)


def _ended(exit: Exit, handed_on: set[int]) -> int:
    left = end_descendants(grace=0.0)
    cgroup.remove(os.getpid())
    if exit.signal is None:
        return exit.code
    if exit.signal in handed_on:
        return exit.shell_code
    sys.stderr.write(f"fleetrun: error: the launcher {exit}; the {left} processes below it were ended.\n")
    return 125
