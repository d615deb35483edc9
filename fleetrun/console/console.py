"""The console of a run, and the outputs that it writes to.

Messages of fleetrun go to stderr, and output of the job's processes goes to stdout. `Console` formats whole
lines. `Sink` writes them without ever blocking the loop. A terminal stopped with Ctrl-S or a slow reader of a
pipe therefore delays neither the job nor its supervision.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from fleetrun.aliases import Callback, Environ
from fleetrun.console.text import wrapped
from fleetrun.pod.loop import WRITE, Loop

if TYPE_CHECKING:
    from fleetrun.console.status_text import StatusFields

_NARROW = 100  # columns
LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
_RED, _YELLOW, _RESET = "\033[31m", "\033[33m", "\033[0m"
_LABEL_COLOURS = tuple(f"\033[{code}m" for code in (36, 32, 35, 34, 33, 96, 92, 95, 94, 93))


Listener = Callable[[bytes], None]
Follower = tuple[Listener, bool]


class Output(Protocol):
    """A destination for lines: a `Sink`, or an object that writes to one."""

    @property
    def room(self) -> bool: ...
    def write(self, data: bytes) -> None: ...
    def attach(self, loop: Loop, emptied: Callback) -> None: ...
    def drain(self, interrupted: int) -> None: ...


class Console:
    """Formats lines and writes them to two outputs.

    `level` is the lowest level that is shown. `columns` is the width of the terminal at stderr, None if
    stderr is not a terminal.
    """

    def __init__(
        self,
        out: Output,
        err: Output,
        level: str = "INFO",
        *,
        colour: bool = False,
        columns: int | None = None,
    ) -> None:
        self.out = out
        self.err = err
        self._level = LEVELS[level]
        self._colour = colour
        self._columns = columns

    def attach(self, loop: Loop, room: Callback) -> None:
        """Let the loop write pending data from now on. `room` is called once stdout has taken everything."""
        self.out.attach(loop, room)
        if self.err is not self.out:
            self.err.attach(loop, lambda: None)

    def drain(self, interrupted: int) -> None:
        """Wait until everything is written, its reader has left, or `interrupted` becomes readable."""
        self.out.drain(interrupted)
        self.err.drain(interrupted)

    # The parts in which displays differ.

    shows_output = True
    """True if the output of the job's processes is shown."""
    shows_status = False
    """True if the console shows the state of the job, which `begin` provides."""

    @property
    def listener(self) -> Listener | None:
        """A function for every event of the event log, as a line of JSON without its newline.

        None if not wanted.
        """
        return None

    def begin(self, loop: Loop, status: Callable[[], StatusFields]) -> None:
        """Prepare for a pod that is about to run. From now on, `status` returns the state of the job."""

    def refresh(self) -> None:
        """Update the display, because the result of `status` has changed."""

    def end(self) -> None:
        """Finish the display. All processes have ended, and their output is shown."""

    def pause(self) -> None:
        """Give the terminal to the shell until `resume`, because Ctrl-Z is about to stop this process."""

    def resume(self) -> None: ...

    def follower(self, name: str, width: int, number: int, *, alone: bool) -> Follower:
        """Return a function that takes the output of a process, and True if it also takes unfinished lines.

        An unfinished line ends in a carriage return. The only process that is shown (`alone`) has no label.
        """
        label = b"" if alone else self.label(name, width, number)
        return partial(self.show, label), alone

    # Messages.

    def enabled(self, level: str) -> bool:
        """Return True if messages of this level are shown."""
        return LEVELS[level] >= self._level

    def debug(self, text: str) -> None:
        self._log("DEBUG", text)

    def info(self, text: str) -> None:
        self._log("INFO", text)

    def opening(self, text: str) -> None:
        """Print a line about the start of the job. The event `launch` holds the same facts."""
        self._log("INFO", text, timed=not self._narrow)

    def warning(self, text: str) -> None:
        self._log("WARNING", text, _YELLOW)

    def error(self, text: str) -> None:
        self._log("ERROR", text, _RED)

    def show(self, label: bytes, lines: bytes) -> None:
        """Print whole lines of a process, each after the label."""
        self.out.write(label + lines[:-1].replace(b"\n", b"\n" + label) + b"\n" if label else lines)

    def block(self, lines: Iterable[str], *, level: str = "INFO") -> None:
        """Print lines without a time stamp, such as tables and reports."""
        if self.enabled(level):
            self.err.write("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))

    def report(self, lines: Sequence[str]) -> None:
        """Print a failure report. Its last line, of any length, is the cause, where readers look first."""
        *above, cause = lines
        rows = [self.paint(row, _RED) for row in self._wrap(cause)]
        self.block([*above, *rows], level="ERROR")

    def _log(self, level: str, text: str, colour: str = "", *, timed: bool = True) -> None:
        if not self.enabled(level):
            return
        head = f"LAUNCH {level} " + (f"{self._stamp(time.time())} " if timed else "")
        lines = [piece for line in text.splitlines() or [""] for piece in self._wrap(head + line)]
        painted = [
            line.replace(f"LAUNCH {level}", self.paint(f"LAUNCH {level}", colour), 1) for line in lines
        ]
        self.err.write("".join(f"{line}\n" for line in painted).encode("utf-8", "surrogateescape"))

    def _stamp(self, now: float) -> str:
        moment = time.localtime(now)
        if self._narrow:
            return time.strftime("%H:%M:%S", moment)
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', moment)},{int(now % 1 * 1000):03d}"

    @property
    def _narrow(self) -> bool:
        """True for a terminal too narrow for the date.

        At 80 columns, even a time does not fit into the first lines.
        """
        return self.columns is not None and self.columns < _NARROW

    @property
    def columns(self) -> int | None:
        return self._columns

    def _wrap(self, line: str) -> list[str]:
        """Break long lines between words on a terminal."""
        return [line] if self.columns is None else wrapped(line, self.columns)

    def paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_RESET}" if self._colour and colour else text

    def label(self, name: str, width: int, number: int) -> bytes:
        """Return the label of a process, such as `trainer.1 | `."""
        return self.paint(f"{name:<{width}} |", _LABEL_COLOURS[number % len(_LABEL_COLOURS)]).encode() + b" "


class QuietConsole(Console):
    """A console that shows only errors."""

    shows_output = False


def wants_colour(environ: Environ, *outputs: int) -> bool:
    """Decide on colours by NO_COLOR, FORCE_COLOR and TERM=dumb.

    Otherwise return True if all descriptors are terminals.
    """
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    return bool(environ.get("FORCE_COLOR")) or all(map(os.isatty, outputs))


def terminal_columns() -> int | None:
    """Return the width of the terminal at stderr, at least 40 columns. Return None if stderr is not a
    terminal.
    """
    try:
        return max(40, os.get_terminal_size(2).columns)
    except OSError:
        return None


_ROOM = 1 << 20  # bytes
# When poll reports a pipe as writable, this many bytes fit without blocking, even on a blocking descriptor.
_CHUNK = select.PIPE_BUF


class Sink:
    """An output that never blocks the loop. Pending data waits in memory.

    Lines are written whole and in order. Memory is bounded, because callers check `room` before they read
    more of a log. Unread output stays safe in the log file.
    """

    def __init__(self, fd: int, other: Sink | None = None) -> None:
        """`other` prints one warning if output is lost."""
        self._other = other
        self._waiting = bytearray()
        self._loop: Loop | None = None
        self._armed = False
        self._emptied: Callback | None = None
        self.closed = False
        self._fd, self._nonblocking = _reopened(fd)

    def attach(self, loop: Loop, emptied: Callback) -> None:
        """Let the loop write pending data from now on. `emptied` is called once everything is written."""
        self._loop = loop
        self._emptied = emptied
        self._arm(bool(self._waiting) and not self.closed)

    @property
    def room(self) -> bool:
        """True while the caller may write more."""
        return len(self._waiting) < _ROOM

    @property
    def idle(self) -> bool:
        """True if everything is written."""
        return not self._waiting

    def write(self, data: bytes) -> None:
        if self.closed:
            return
        self._waiting += data
        if not self._armed:
            self._pump()

    def drain(self, interrupted: int) -> None:
        """Write everything, however slow the reader is.

        Stop early if the reader has left or `interrupted` becomes readable.
        """
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
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
        """Write one piece. Return True if any bytes were written."""
        size = len(self._waiting) if self._nonblocking else _CHUNK
        try:
            with memoryview(self._waiting) as view:
                written = os.write(self._fd, view[:size])
        except BlockingIOError:
            return False
        except OSError as error:
            self._waiting.clear()
            self.closed = error.errno in (errno.EPIPE, errno.EIO, errno.EBADF)
            if not self.closed and self._other is not None:
                self._other.write(f"LAUNCH WARNING stdout: {error.strerror}; see the log files\n".encode())
                self._other = None
            return False  # the disk is full, so this piece is lost, but the next may fit
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
    """Return a descriptor to write to, and True if writing to it never blocks.

    A terminal or pipe is opened again with O_NONBLOCK, because on the shared descriptor the flag would affect
    the shell too. Regular files never block. Sockets cannot be opened again, so data is written to them in
    small pieces when poll reports room.
    """
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd, True
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            return os.open(f"/proc/self/fd/{fd}", flags), True
    return fd, False


def sinks() -> tuple[Sink, Sink]:
    """Return the sinks of stdout and stderr.

    If both are the same file, they share one sink, so that lines cannot mix.
    """
    err = Sink(2)
    with suppress(OSError):
        if os.path.samestat(os.fstat(1), os.fstat(2)):
            return err, err
    return Sink(1, err), err
