"""Run the launcher under a guard process, and receive its signals. Both processes watch each other.

    shell -> guard (sub-reaper) -> launcher (sub-reaper, own process group) -> containers (own sessions)

The process that the user started becomes the guard and only waits. It forks the launcher before any large
import. The guard passes every signal on to the launcher. When the launcher ends for any reason, its orphans
become children of the guard. The guard kills them all, even children with their own session. If the guard
ends (SIGKILL), the launcher sees this through a pidfd and does the same. Both processes run without root. A
run from Python has a caller. When the caller ends, the guard ends the job as after SIGTERM.

The launcher has its own process group. Ctrl-C of the terminal therefore reaches it only once, through the
guard. In the launcher, a signal handler only writes the number to a file descriptor, and the loop decides.
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

# ---- Signals as numbers in a file descriptor, so that the loop can decide

# Signals that the kernel sends for the process's own actions, or that cannot be caught. They keep their
# default action.
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
_LAST_WORDS = 1.0  # seconds for a slow reader, after a request to end the job
_FOR_THE_JOB = PASSED_ON | JOB_CONTROL | {signal.SIGCHLD, signal.SIGIO}


def governed() -> set[int]:
    """Return the signals that fleetrun handles, which would otherwise end or stop it.

    Signals that were ignored at the start (nohup) are left out.
    """
    return {
        number for number in signal.valid_signals() - _NEVER if signal.getsignal(number) is not signal.SIG_IGN
    }


class Signals:
    """Collect the given signals for `read`. From its creation on, this is their only effect."""

    def __init__(self, numbers: set[int]) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._asked_to_end = False
        self._before = {number: signal.signal(number, _recorded) for number in numbers}

    def fileno(self) -> int:
        return self._read

    def read(self) -> bytes:
        """Return the numbers received since the last call, one byte each, in order."""
        try:
            numbers = os.read(self._read, 4096)
        except BlockingIOError:
            return b""
        self._asked_to_end |= any(number not in _FOR_THE_JOB for number in numbers)
        return numbers

    def only_endings(self) -> None:
        """Keep only signals that mean "end", after the job is over.

        If such a signal ended the job, SIGALRM follows after a moment.
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
    """Do nothing, because the wake-up descriptor has the number and the loop handles it."""


# ---- Guard and launcher


class Guard:
    """The guard as seen by its launcher. The descriptor becomes readable when the guard ends."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor

    @classmethod
    def of_this_process(cls, pid: int) -> Guard:
        """Return the guard. `pid` was this process's parent and may have died since."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return cls(pid, _readable())
        except OSError:  # runs cannot start here (`check_pidfds`), so this descriptor stays silent
            return cls(pid, os.pipe()[0])
        if os.getppid() != pid:  # it died before, and another process now has its pid
            os.close(descriptor)
            return cls(pid, _readable())
        return cls(pid, descriptor)

    def fileno(self) -> int:
        return self._descriptor

    @property
    def ended(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))


def _readable() -> int:
    """Return a descriptor that stays readable, the read end of a pipe without a writer."""
    read, write = os.pipe2(os.O_CLOEXEC)
    os.close(write)
    return read


CALLER_VARIABLE = "FLEETRUN_CALLER"
"""Set by a Python program that starts a job: its pid, a space, and an optional directory.

The directory holds data that the program passes to the processes.
"""


class Caller:
    """The Python program that started this job, which is the parent of the guard. The job ends with it."""

    def __init__(self, pid: int, folder: str) -> None:
        self._pid = pid
        self._folder = folder
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:  # inherited
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @classmethod
    def named(cls, environ: MutableMapping[str, str]) -> Caller | None:
        """Return the caller in the environment, and remove the variable, so that processes of the job do not
        inherit it.
        """
        pid, _, folder = environ.pop(CALLER_VARIABLE, "").partition(" ")
        return cls(int(pid), folder) if pid.isdecimal() else None

    def watch(self) -> None:
        """Request a SIGTERM for the end of the caller. The thread that started this process must live
        as long.
        """
        linux.die_with_parent(signal.SIGTERM)
        if self._ended:
            os.kill(os.getpid(), signal.SIGTERM)

    def clean_up(self) -> None:
        """Remove the caller's directory, if the caller ended before removing it."""
        if self._ended and self._folder:
            import shutil  # late, because few callers are killed

            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _ended(self) -> bool:
        return os.getppid() != self._pid


def guarded(work: Callable[[Signals, Guard], int]) -> int:
    """Run `work(signals, guard)` in a guarded process, and return its result, the exit code of both.

    The call returns only in the guard.
    """
    caller = Caller.named(os.environ)
    numbers = governed()
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # otherwise the kernel would reap the launcher without a notice
    linux.become_subreaper()
    signal.pthread_sigmask(
        signal.SIG_BLOCK, numbers | {signal.SIGCHLD}
    )  # keep every signal until its handler is installed
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
    if guard.ended:  # then the launcher does the guard's final work
        end_descendants(grace=0.0)
        linux.kill_cgroup(guard.pid)
        linux.remove_cgroup(guard.pid)
    os._exit(code)  # without interpreter teardown, which takes milliseconds to free unused memory


def flush() -> None:
    """Flush both standard streams, even if their reader has ended."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # a closed pipe, whose reader has ended


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
        # as the first process of a container, the guard also inherits processes of `kubectl exec`
        reap_adopted([launcher])
        pid, status = os.waitpid(launcher, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            continue
        if not os.WIFSTOPPED(status):
            return _ended(Exit(os.waitstatus_to_exitcode(status)), handed_on)
        if signal.SIGTSTP in handed_on:  # after Ctrl-Z the job has stopped, and now the command stops too
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
    """Return the codes that erase the launcher's status lines, from the cursor to the end of the terminal."""
    dumb = os.environ.get("TERM", "") in ("", "dumb")
    return "" if dumb or not sys.stderr.isatty() else "\r\x1b[K\x1b7\x1b[B\x1b[J\x1b8"
