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
        self._before = {number: signal.signal(number, _recorded) for number in numbers}

    def fileno(self) -> int:
        return self._read

    def read(self) -> bytes:
        """The numbers that came since the last call, one byte each, in order; empty when none did."""
        try:
            return os.read(self._read, 4096)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)


def _recorded(number: int, frame: object) -> None:
    """The wake-up descriptor has the number; the loop does the rest."""
