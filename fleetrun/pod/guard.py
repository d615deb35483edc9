"""The two processes around a launch, which watch each other so that nothing outlives either, and the signals
that reach the launcher.

    shell -> guard (sub-reaper) -> launcher (sub-reaper, own process group) -> containers (own sessions)

The process that the user started becomes the guard and only waits; a fork of it, taken before anything large
is imported, is the launcher. The guard hands on every signal that it gets. When the launcher is gone, for
whatever reason, its orphans become children of the guard, which kills them all, those with a session of their
own too. When the guard is gone (SIGKILL), the launcher sees it by pidfd and does the same. Neither needs
root. A launch from Python has a caller: when that is gone, the guard ends the job as if SIGTERM had come.

The launcher has a process group of its own, so that the terminal's Ctrl-C reaches it once, through the guard,
and not twice. There signals are numbers in a file descriptor: a handler only records, the loop decides.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, MutableMapping
from typing import NoReturn

from fleetrun.pod import linux
from fleetrun.pod.process import Exit, end_descendants, reap_adopted

# ---- Signals as numbers in a file descriptor: a handler only records, the loop decides

# What the kernel sends because of the process's own doing, or that cannot be caught: these keep their default
# action.
_NEVER = frozenset(
    {
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
        signal.SIGPIPE,
        signal.SIGXFSZ,
        signal.SIGTTOU,
        signal.SIGTTIN,
        signal.SIGURG,
        signal.SIGCHLD,
        signal.SIGIO,
        signal.SIGWINCH,
    }
)
PASSED_ON = frozenset({signal.SIGUSR1, signal.SIGUSR2})
JOB_CONTROL = frozenset({signal.SIGTSTP, signal.SIGCONT})
_LAST_WORDS = 1.0  # seconds for a slow reader, once the job was asked to end
_FOR_THE_JOB = PASSED_ON | JOB_CONTROL | {signal.SIGCHLD, signal.SIGIO}


def governed() -> set[int]:
    """The signals that fleetrun acts on: all that would end or stop it, except those it was told to ignore
    (nohup).
    """
    return {
        number for number in signal.valid_signals() - _NEVER if signal.getsignal(number) is not signal.SIG_IGN
    }


class Signals:
    """From its creation on, the given signals do nothing but arrive in `read`."""

    def __init__(self, numbers: set[int]) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._asked_to_end = False
        self._before = {number: signal.signal(number, _recorded) for number in numbers}

    def fileno(self) -> int:
        return self._read

    def read(self) -> bytes:
        """The numbers that came since the last call, one byte each, in order; empty when none did."""
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            return b""
        self._asked_to_end |= any(number not in _FOR_THE_JOB for number in numbers)
        return numbers

    def only_endings(self) -> None:
        """The job is over: from now on only what means "end" arrives here, and of what has come only that
        stays. If it was such a signal that ended the job, SIGALRM follows a moment later.
        """
        if self._asked_to_end:
            signal.setitimer(signal.ITIMER_REAL, _LAST_WORDS)
        for number in _FOR_THE_JOB & self._before.keys():
            signal.signal(number, signal.SIG_IGN if number in PASSED_ON | {signal.SIGIO} else signal.SIG_DFL)
        endings = bytes(number for number in self.read() if number not in _FOR_THE_JOB)
        if endings:
            os.write(self._write, endings)

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)


def _recorded(number: int, frame: object) -> None:
    """The wake-up descriptor has the number; the loop does the rest."""


# ---- Guard and launcher


class Guard:
    """The guard as its launcher knows it. The descriptor is readable once it is gone."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor

    @classmethod
    def of_this_process(cls, pid: int) -> Guard:
        """`pid` was this process's parent; it may have died since."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return cls(pid, _readable())
        except OSError:  # no launch begins here (`check_pidfds`): never readable
            return cls(pid, os.pipe()[0])
        if os.getppid() != pid:  # it died before, and that was the pid of another
            os.close(descriptor)
            return cls(pid, _readable())
        return cls(pid, descriptor)

    def fileno(self) -> int:
        return self._descriptor

    @property
    def gone(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))


def _readable() -> int:
    """A descriptor that stays readable: the read end of a pipe without a writer."""
    read, write = os.pipe2(os.O_CLOEXEC)
    os.close(write)
    return read


CALLER_VARIABLE = "FLEETRUN_CALLER"
"""Set by a Python program that launches a job: its pid, a space, and the folder (or nothing) with what it
gives to the processes.
"""


class Caller:
    """The Python program that launched this job, the parent of the guard. Its job ends with it."""

    def __init__(self, pid: int, folder: str) -> None:
        self._pid = pid
        self._folder = folder
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:  # inherited
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @classmethod
    def named(cls, environ: MutableMapping[str, str]) -> Caller | None:
        """The one in the environment, which no process of the job inherits."""
        pid, _, folder = environ.pop(CALLER_VARIABLE, "").partition(" ")
        return cls(int(pid), folder) if pid.isdecimal() else None

    def watch(self) -> None:
        """From now on SIGTERM comes when it is gone. The thread that started this process lives as long."""
        linux.die_with_parent(signal.SIGTERM)
        if self._gone:
            os.kill(os.getpid(), signal.SIGTERM)

    def clean_up(self) -> None:
        """Remove its folder, if it cannot do so any more."""
        if self._gone and self._folder:
            import shutil  # late: few callers are killed

            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _gone(self) -> bool:
        return os.getppid() != self._pid


def guarded(work: Callable[[Signals, Guard], int]) -> int:
    """Run `work(signals, guard)` in a guarded process; its result is the exit code of both.

    Returns in the guard only.
    """
    caller = Caller.named(os.environ)
    numbers = governed()
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # were it ignored, the kernel would reap the launcher without a notice
    linux.become_subreaper()
    signal.pthread_sigmask(
        signal.SIG_BLOCK, numbers | {signal.SIGCHLD}
    )  # none is lost before its handler is there
    guard = os.getpid()
    try:
        launcher = os.fork()
    except OSError as error:
        sys.stderr.write(
            f"fleetrun: error: cannot start: {error.strerror}\n"
            "  The limit on processes is reached: see `ulimit -u` or the cgroup's pids.max.\n"
        )
        return 125
    if launcher == 0:
        _launcher(work, numbers, guard)
    linux.set_comm("fleetrun-guard")
    if caller is not None:
        caller.watch()
    linux.enclose_in_cgroup(launcher)
    linux.remove_stale_cgroups()
    code = _guard(launcher, numbers)
    if caller is not None:
        caller.clean_up()
    return code


def _launcher(work: Callable[[Signals, Guard], int], numbers: set[int], parent: int) -> NoReturn:
    os.setpgid(0, 0)
    linux.become_subreaper()
    linux.set_comm("fleetrun")
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it writes to the terminal from the background
    guard = Guard.of_this_process(parent)
    signals = Signals(numbers | {signal.SIGCHLD, signal.SIGIO})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers | {signal.SIGCHLD})
    try:
        code = work(signals, guard)
    except BaseException:  # noqa: BLE001 - the last line of this process: nothing may get past it into the guard's code
        sys.excepthook(*sys.exc_info())
        code = 125
    flush()
    if guard.gone:  # then what it does at the end is to be done here
        end_descendants(grace=0.0)
        linux.kill_cgroup(guard.pid)
        linux.remove_cgroup(guard.pid)
    os._exit(code)  # no interpreter teardown: it costs milliseconds and there is nothing left to free


def flush() -> None:
    """Both standard streams; a reader that has gone is fine."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # a closed pipe: the reader is gone


def _guard(launcher: int, numbers: set[int]) -> int:
    handed_on: set[int] = set()
    while True:
        number = signal.sigwaitinfo(numbers | {signal.SIGCHLD}).si_signo
        if number != signal.SIGCHLD:
            handed_on.add(number)
            if number == signal.SIGCONT:
                handed_on.discard(signal.SIGTSTP)
            with contextlib.suppress(ProcessLookupError):
                os.kill(launcher, number)
            continue
        reap_adopted([launcher])  # as the first process of a container it gets those of `kubectl exec` too
        pid, status = os.waitpid(launcher, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            continue
        if not os.WIFSTOPPED(status):
            return _ended(Exit(os.waitstatus_to_exitcode(status)), handed_on)
        if signal.SIGTSTP in handed_on:  # Ctrl-Z: the job has stopped, now the command stops too
            handed_on.discard(signal.SIGTSTP)
            if signal.SIGCONT not in signal.sigpending():
                os.kill(os.getpid(), signal.SIGSTOP)


def _ended(exit: Exit, handed_on: set[int]) -> int:
    left = end_descendants(grace=0.0)
    linux.remove_cgroup(os.getpid())
    if exit.signal is None:
        return exit.code
    if exit.signal in handed_on:
        return exit.shell_code
    below = "1 process below it was" if left == 1 else f"{left} processes below it were"
    sys.stderr.write(f"{_clear()}fleetrun: error: the launcher {exit}; the {below} ended.\n")
    return 125


def _clear() -> str:
    """Erases what the launcher may have drawn, from the cursor to the end of a terminal, as it does."""
    dumb = os.environ.get("TERM", "") in ("", "dumb")
    return "" if dumb or not sys.stderr.isatty() else "\r\x1b[K\x1b7\x1b[B\x1b[J\x1b8"
