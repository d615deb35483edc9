"""A pipe command: one process for one file, its standard input the file as it is, its standard output
MultiSlot text. Knows processes and pipes; leaves the text to the parser.

The command is the leader of a process group of its own, which is killed at the end: what it started goes with
it, and a command that is not wanted any more does not have to notice.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
from collections import deque
from typing import IO

from trainers.data.images import DataError
from trainers.lastwords import FILE_VARIABLES

_PIPE_BYTES = 1 << 20
_LAST_WORDS = 10
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


class PipeSource:
    """What `command` makes of a file: a Source. `given` is the open file, which this closes.

    A given file without a descriptor of its own (a remote one) is pumped into the command as it takes it.
    When `stop` (a descriptor) becomes readable, the text ends and how the command ended no longer matters.
    """

    def __init__(self, command: str, name: str, given: IO[bytes], stop: int) -> None:
        self.name = f"{name} (through {command!r})"
        self._command = command
        self._file = name
        self._given = given
        self._stop = stop
        self._stopped = False
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._half_line = b""
        self._pending = memoryview(b"")
        direct = _has_descriptor(given)
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=given if direct else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(),
                bufsize=0,
                process_group=0,
            )
        except OSError as problem:
            given.close()
            raise DataError(f"pipe_command {command!r} cannot be started: {problem}") from problem
        self._watch(direct)

    def _watch(self, direct: bool) -> None:
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        self._out, self._err = process.stdout.fileno(), process.stderr.fileno()
        self._in = -1 if direct or process.stdin is None else process.stdin.fileno()
        self._ended = os.pidfd_open(process.pid)
        self._poll = select.poll()
        for descriptor in (self._out, self._err, self._ended, self._stop):
            self._poll.register(descriptor, select.POLLIN)
        os.set_blocking(self._out, False)
        os.set_blocking(self._err, False)
        if self._in >= 0:
            os.set_blocking(self._in, False)
            self._poll.register(self._in, select.POLLOUT)
        with contextlib.suppress(OSError):  # more than this user may have: it stays at 64 KiB
            fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def readinto(self, buffer: memoryview) -> int:
        """The next bytes of the command's output; 0 at its end. Raises DataError when the command failed."""
        got = -1
        while got < 0:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            self._attend(ready)
            if self._stopped:
                return 0
            if self._out in ready or self._ended in ready:
                got = self._read(buffer, over=self._ended in ready)
        if not got:
            self._finish()
        return got

    def close(self) -> None:
        """End whatever is left of the command."""
        if self._process.returncode is None:
            self._end_group()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        os.close(self._ended)
        self._given.close()

    def _end_group(self) -> int:
        """Kill the command and what it started; its exit code."""
        # The group's number is free for others as soon as its leader is reaped, so the signal comes before.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def _attend(self, ready: set[int]) -> None:
        """Everything but the output."""
        self._stopped = self._stop in ready
        if self._err in ready:
            self._listen()
        if self._in in ready and not self._stopped:
            self._pump()

    def _listen(self) -> None:
        """Hand on what the command says on its standard error, and keep the last lines."""
        while True:
            try:
                said = os.read(self._err, 1 << 16)
            except BlockingIOError:
                return
            if not said:
                with contextlib.suppress(KeyError):
                    self._poll.unregister(self._err)
            *lines, self._half_line = (self._half_line + said).split(b"\n")
            if not said and self._half_line:
                lines, self._half_line = [self._half_line], b""
            for line in lines:
                self._words.append(line.decode("utf-8", "backslashreplace"))
                sys.stderr.write(f"{self._words[-1]}\n")
            if not said:
                return

    def _read(self, buffer: memoryview, *, over: bool) -> int:
        """What is in the pipe: 0 at its end, -1 when there is nothing yet. The text is over when the command
        is, though something that it left running in the background may still hold the pipe.
        """
        try:
            return os.readv(self._out, [buffer])
        except BlockingIOError:
            return 0 if over else -1

    def _pump(self) -> None:
        """Give the command as much of the file as it takes now."""
        if not self._pending:
            self._pending = memoryview(self._given.read(_PIPE_BYTES))
        try:
            written = os.write(self._in, self._pending) if self._pending else 0
        except BrokenPipeError:  # it has seen enough
            written = 0
        except BlockingIOError:
            return
        self._pending = self._pending[written:]
        if not written:
            self._poll.unregister(self._in)
            self._in = -1
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _finish(self) -> None:
        """Wait for the command after its output's end, and raise DataError when it failed."""
        self._poll.unregister(self._out)
        ready: set[int] = set()
        while self._ended not in ready and not self._stopped:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            self._attend(ready)
        if self._stopped:
            return
        self._listen()
        code = self._end_group()
        if code:
            raise DataError(self._failure(code))

    def _failure(self, code: int) -> str:
        said = "".join(f"\n    {line}" for line in self._words)
        words = f"; its last words:{said}" if said else "; it said nothing on its standard error"
        return f"pipe_command {self._command!r} {_end_of(code)} on {self._file}{words}"


def _end_of(code: int) -> str:
    number = -code if code < 0 else code - 128  # a shell tells of its command's signal so
    if number > 0 and number in set(signal.Signals):
        return f"was ended by {signal.Signals(number).name}"
    hint = {_NOT_FOUND: " (command not found)", _NOT_EXECUTABLE: " (not executable)"}.get(code, "")
    return f"ended with exit code {code}{hint}"


def _environment() -> dict[str, str]:
    """Without the launcher's error file: this process reports the command's failure, and a command that is
    stopped early has not failed.
    """
    return {name: value for name, value in os.environ.items() if name not in FILE_VARIABLES}


def _has_descriptor(stream: IO[bytes]) -> bool:
    try:
        return stream.fileno() >= 0
    except OSError:
        return False
