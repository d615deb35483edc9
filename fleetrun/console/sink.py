"""An output that never blocks the loop: what cannot be written now waits, and whoever produces it is told to
wait too.

A terminal that was stopped with Ctrl-S or a pipe whose reader is slow must delay neither the job nor the
watch over it. Lines go out whole and in order. What waits is bounded by asking `room` before reading more of
a log: the log file is the buffer, so nothing is lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
from collections.abc import Callable

from fleetrun.pod.loop import WRITE, Loop

_ROOM = 1 << 20
# Less than a pipe's atomic size: when poll says writable, so much goes in without blocking even on a blocking
# descriptor.
_CHUNK = select.PIPE_BUF


class Sink:
    def __init__(self, fd: int) -> None:
        self._waiting = bytearray()
        self._loop: Loop | None = None
        self._armed = False
        self._emptied: Callable[[], None] | None = None
        self.closed = False
        self._fd, self._nonblocking = _reopened(fd)

    def attach(self, loop: Loop, emptied: Callable[[], None]) -> None:
        """From now on the loop writes what has to wait, and `emptied` is called when all of it is out."""
        self._loop = loop
        self._emptied = emptied
        self._arm(bool(self._waiting) and not self.closed)

    @property
    def room(self) -> bool:
        """Whether more may be written without piling up."""
        return len(self._waiting) < _ROOM

    @property
    def idle(self) -> bool:
        """Whether everything has gone out."""
        return not self._waiting

    def write(self, data: bytes) -> None:
        if self.closed:
            return
        self._waiting += data
        if not self._armed:
            self._pump()

    def drain(self, interrupted: int | None = None) -> None:
        """Write everything, waiting for the reader as long as it takes: until it is gone, or `interrupted` is
        readable.
        """
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        if interrupted is not None:
            poll.register(interrupted, select.POLLIN)
        while self._waiting and not self.closed:
            if self._writable():
                self._write_some()
            if self._waiting and not self.closed and any(fd == interrupted for fd, _ in poll.poll()):
                return

    def _pump(self) -> None:
        while self._waiting and not self.closed and self._writable():
            if not self._write_some():
                break
        self._arm(bool(self._waiting) and not self.closed)

    def _writable(self) -> bool:
        if self._nonblocking:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(0))

    def _write_some(self) -> bool:
        """Whether anything went out."""
        size = len(self._waiting) if self._nonblocking else _CHUNK
        try:
            with memoryview(self._waiting) as view:
                written = os.write(self._fd, view[:size])
        except BlockingIOError:
            return False
        except OSError as error:
            self._waiting.clear()
            self.closed = error.errno in (errno.EPIPE, errno.EIO, errno.EBADF)
            return False  # a full disk: this piece is lost, the next may fit
        del self._waiting[:written]
        return True

    def _arm(self, wanted: bool) -> None:
        if wanted == self._armed or self._loop is None:
            return
        if wanted:
            self._loop.add(self._fd, self._pump, WRITE)
        else:
            self._loop.remove(self._fd)
        self._armed = wanted
        if not wanted and self._emptied is not None:
            self._emptied()


def _reopened(fd: int) -> tuple[int, bool]:
    """A descriptor of our own with O_NONBLOCK, so that the flag does not reach the shell that shares the old
    one.

    Regular files never block; sockets cannot be opened again, and are written to in small pieces when poll
    says so.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd, True
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{fd}", flags), True
    return fd, False


def sinks() -> tuple[Sink, Sink]:
    """For stdout and stderr: one and the same where both are one file, so that their lines cannot mix."""
    out = Sink(1)
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(1), os.fstat(2)):
            return out, out
    return out, Sink(2)
