"""Run a helper process of the launcher, with a pipe of lines in each direction.

A companion is not a process of the job, so the job continues after it ends. Writes and reads do not block.
Lines that the companion does not read in time are dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

from fleetrun.aliases import Environ, ShowText
from fleetrun.decoding import read_object
from fleetrun.errors import SpawnError
from fleetrun.host.interpreter import helper_environment
from fleetrun.pod.loop import WRITE, Loop
from fleetrun.pod.process import Exit, Process
from fleetrun.proc import readable

_ROOM = 1 << 20  # bytes that wait for the companion at most
_LONGEST_LINE = 1 << 20  # bytes of an incomplete line from the companion
_PIECE = 1 << 16
_DEAF = 1.0  # seconds from SIGKILL to its end


def warning_message(text: str) -> bytes:
    """Return a companion's message to the launcher, a warning for the user."""
    return json.dumps({"warning": text}, separators=(",", ":")).encode() + b"\n"


_LOCK = threading.Lock()


def send_line(line: bytes) -> None:
    """Send a line to the launcher, from any thread of a companion."""
    with _LOCK, contextlib.suppress(OSError):  # the launcher has ended
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def read_warning(line: bytes) -> str | None:
    """Return the text of a warning, or None for other output."""
    text = (read_object(line) or {}).get("warning")
    return text if isinstance(text, str) else None


class CompanionOutput:
    """The output of a companion. `warn` receives its warnings. Its last other line explains its end."""

    def __init__(self, warn: ShowText) -> None:
        self._warn = warn
        self._last_line = ""

    def take(self, line: bytes) -> None:
        text = read_warning(line)
        if text is not None:
            self._warn(text)
        elif line.strip():
            self._last_line = line.decode(errors="replace").strip()

    def end(self, exit: Exit) -> str:
        """Return text such as `was killed by SIGSEGV: its last line`."""
        return f"{exit}: {self._last_line}" if self._last_line else str(exit)


class Companion:
    """A running helper process.

    `received` receives each line of its output, without the line end. `ended` receives its exit once, unless
    the companion was closed before. `companions` contains its pid while it runs, which protects it when
    fleetrun ends leftover processes. Raises LaunchError if it cannot start.
    """

    def __init__(
        self,
        loop: Loop,
        companions: set[int],
        argv: Sequence[str],
        env: Environ | None = None,
        *,
        received: Callable[[bytes], None],
        ended: Callable[[Exit], None],
        keep: Sequence[int] = (),
    ) -> None:
        self.lost = 0
        """Number of dropped lines."""
        self._loop = loop
        self._companions = companions
        self._received = received
        self._ended = ended
        self._waiting = bytearray()
        self._partial = b""
        self._armed = False
        self._process, self._in, self._out = _spawned(argv, env or helper_environment(), keep)
        self.pid = self._process.pid
        companions.add(self.pid)
        loop.add(self._out, self._read)
        loop.add(self._process.fileno(), self._process_ended)

    @property
    def exit(self) -> Exit | None:
        """The exit, or None while the companion runs."""
        return self._process.exit

    @property
    def alive(self) -> bool:
        return self.exit is None

    def write(self, line: bytes) -> None:
        """Send one line, which includes its end. The line arrives completely or not at all. After the end of
        the companion, nothing happens.
        """
        if self._in < 0:
            return
        if len(self._waiting) + len(line) > _ROOM:
            self.lost += 1
            return
        self._waiting += line
        if not self._armed:
            self._pump()

    def close_input(self) -> None:
        """Close the input. Waiting lines are dropped."""
        if self._in >= 0:
            self._arm(False)
            os.close(self._in)
            self._in = -1
            self._waiting.clear()

    def finish(self, patience: float, urgent: int | None = None) -> bool:
        """Let the companion read waiting lines and end by itself, and return True if it ended.

        The call blocks for at most `patience` seconds, and returns when `urgent` becomes readable. After
        False, you may call it again.
        """
        if not self.alive:
            return True
        deadline = time.monotonic() + patience
        while True:
            if not self._waiting:
                self.close_input()
            ready = self._ready(deadline, urgent)
            if self._in in ready:
                self._write_some()
            if self._out in ready:
                self._read()
            elif self._process.fileno() in ready:
                self._bury()
                return True
            if not ready or urgent in ready:
                return False

    def close(self, patience: float = 0.0, urgent: int | None = None) -> bool:
        """Finish as `finish` does, then kill a companion that is still running. `ended` is not called.

        You may call it twice. A companion in uninterruptible sleep (it waits for a disk) is left to the loop,
        which reaps it.
        """
        alone = self.finish(patience, urgent)
        if not alone:
            self._ended = lambda exit: None
            self._process.signal_group(signal.SIGKILL)
            if readable(self._process.fileno(), _DEAF):
                self._bury()
            else:
                self._let_go()
        return alone

    def _ready(self, deadline: float, urgent: int | None) -> set[int]:
        """Return the descriptors that are ready, or an empty set at the deadline."""
        poll = select.poll()
        for fd in (self._out, self._process.fileno(), -1 if urgent is None else urgent):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        if self._in >= 0:
            poll.register(self._in, select.POLLOUT)
        return {fd for fd, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)}

    def _pump(self) -> None:
        self._write_some()
        self._arm(bool(self._waiting) and self._in >= 0)

    def _write_some(self) -> None:
        try:
            with memoryview(self._waiting) as view:
                written = os.write(self._in, view)
        except BlockingIOError:
            return
        except OSError:  # it has stopped reading
            self.close_input()
            return
        del self._waiting[:written]

    def _arm(self, wanted: bool) -> None:
        if wanted and not self._armed:
            self._loop.add(self._in, self._pump, WRITE)
        elif self._armed and not wanted:
            self._loop.remove(self._in)
        self._armed = wanted

    def _read(self) -> None:
        """Read one piece of output."""
        try:
            data = os.read(self._out, _PIECE)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove(self._out)
            os.close(self._out)
            self._out = -1
            if self._partial:
                self._received(self._partial)
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[:_LONGEST_LINE]
        for line in lines:
            self._received(line)

    def _process_ended(self) -> None:
        if self._out >= 0:  # its last output
            self._read()
        self._ended(self._bury())

    def _let_go(self) -> None:
        """Close its pipes."""
        self.close_input()
        if self._out >= 0:
            self._loop.remove(self._out)
            os.close(self._out)
            self._out = -1

    def _bury(self) -> Exit:
        self._let_go()
        self._loop.remove(self._process.fileno())
        exit = self._process.reap(with_group=True)
        self._companions.discard(self.pid)
        return exit


def _spawned(argv: Sequence[str], env: Environ, keep: Sequence[int]) -> tuple[Process, int, int]:
    """Start the process. Return it, the descriptor to write to, and the descriptor to read from."""
    fds: list[int] = []
    try:
        fds += os.pipe2(os.O_CLOEXEC)
        fds += os.pipe2(os.O_CLOEXEC)
        theirs, write, read, output = fds
        os.set_blocking(write, False)
        os.set_blocking(read, False)
        process = Process.spawn(argv, env, output, stdin=theirs, keep=keep)
    except BaseException as error:
        _close(fds)
        if isinstance(error, OSError):
            raise SpawnError(f"cannot start {argv[0]}: {error.strerror}") from None
        raise
    _close((theirs, output))
    return process, write, read


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
