"""Signals as numbers in a file descriptor: a handler only records, whoever reads them decides."""

from __future__ import annotations

import os
import signal

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
