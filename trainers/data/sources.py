"""Open files as streams of bytes: local and remote ones, gzipped ones, and through a pipe command.

A pipe command is one process for each file. Its standard input is the file as it is, and its standard output
is MultiSlot text. The command leads its own process group, which is killed at the end together with all
processes that the command has started.

An input that ends early is an error. Examples are a file that ends before its size, a gzip file without its
end, and a pipe command that fails anywhere in its pipeline.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import io
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import fsspec

from fleetrun.envs.channels import ERROR_FILE_VARIABLES
from trainers.data.multislot import Source
from trainers.errors import DataError

# ---- Pipe commands. The parser handles their text.

_PIPE_BYTES = 1 << 20
_LAST_WORDS = 10
_LAST_S = 1.0  # seconds to wait for words of processes that left the command's group
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
_CUT_BY_COMMAND = 128 + signal.SIGPIPE
"""A command of the pipeline closed its input early, as `head` does. This process always kills the command
before it closes the output.
"""


class PipeSource:
    """The output of `command` for one file, as a Source. It closes the open file `given`.

    Threads pass on the command's standard error, and write a file without a descriptor (a remote one) into
    the command. When `stop` (a descriptor) becomes readable, the text ends, and the command's exit code is
    ignored.
    """

    def __init__(self, command: str, name: str, given: IO[bytes], stop: int) -> None:
        self.name = f"{name} (through {command!r})"
        self._command = command
        self._file = name
        self._given = given
        self._stop = stop
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._problem: Exception | None = None
        """The reason why the file was not read to its end."""
        direct = _has_descriptor(given)
        try:
            self._process = subprocess.Popen(
                _shell_for(command),
                stdin=given if direct else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Without the launcher's error file: this process reports the command's failure, and a command
                # that is stopped early has not failed.
                env={name: value for name, value in os.environ.items() if name not in ERROR_FILE_VARIABLES},
                process_group=0,
            )
        except OSError as problem:
            given.close()
            raise DataError(f"pipe_command {command!r} cannot be started: {problem}") from problem
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        self._ended = os.pidfd_open(self._process.pid)
        os.set_blocking(self._out, False)
        with suppress(OSError):  # the size is more than this user may have, so it stays at 64 KiB
            fcntl.fcntl(self._out, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        work = [self._listen] if direct else [self._listen, self._feed]
        self._threads = [threading.Thread(target=each, daemon=True) for each in work]
        for thread in self._threads:
            thread.start()

    def readinto(self, buffer: memoryview) -> int:
        """Read the next bytes of the command's output, 0 at its end. Raises DataError if the command
        failed.

        The text ends with the command, even if a background process that it left still holds the pipe.
        """
        while self._stop not in (ready := _readable(self._out, self._ended, self._stop)):
            try:
                got = os.readv(self._out, [buffer])
            except BlockingIOError:
                if self._ended not in ready:
                    continue
                got = 0
            if not got:
                self._finish()
            return got
        return 0

    def close(self) -> None:
        """End the remaining processes of the command."""
        self._end_group()
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self._ended)
        self._given.close()

    def _end_group(self) -> int:
        """Kill the command and its children. Return its exit code."""
        if self._process.returncode is None:
            # The group id is free for reuse as soon as its leader is reaped, so the signal comes first.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            for thread in self._threads:
                thread.join(_LAST_S)
        return self._process.returncode

    def _listen(self) -> None:
        """Copy the command's standard error, and keep the last lines."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._words.append(line.decode("utf-8", "backslashreplace").removesuffix("\n"))
                sys.stderr.write(f"{self._words[-1]}\n")

    def _feed(self) -> None:
        """Write the file into the command, as far as the command reads it."""
        assert self._process.stdin is not None
        try:
            with suppress(BrokenPipeError), self._process.stdin as to:
                shutil.copyfileobj(self._given, to, _PIPE_BYTES)
        except (EOFError, OSError, ValueError) as problem:  # ValueError: it was closed meanwhile
            self._problem = problem

    def _finish(self) -> None:
        """Wait for the command after its output's end, and raise DataError if it or the file failed."""
        if self._stop in _readable(self._ended, self._stop):
            return
        code = self._end_group()
        if self._problem is not None:
            raise _unread(self._file, self._problem) from self._problem
        if code not in (0, _CUT_BY_COMMAND):
            raise DataError(self._failure(code))

    def _failure(self, code: int) -> str:
        lines = "".join(f"\n    {line}" for line in self._words)
        words = f"; its last lines:{lines}" if lines else "; it printed nothing on its standard error"
        return f"pipe_command {self._command!r} {_end_of(code)} on {self._file}{words}"


def _readable(*descriptors: int) -> set[int]:
    """Wait until some of these descriptors are readable, or at their end. Return them."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, select.POLLIN)
    return {each for each, _ in poll.poll()}


def _shell_for(command: str) -> list[str]:
    """Return the arguments that run a command in bash, as Paddle does.

    A pipeline then fails if any of its commands fails. Without bash, a /bin/sh without `pipefail` refuses a
    pipeline by an error.
    """
    shell = shutil.which("bash") or "/bin/sh"
    pipefail = ["-o", "pipefail"] if shell != "/bin/sh" or "|" in command else []
    return [shell, *pipefail, "-c", command]


def _end_of(code: int) -> str:
    number = -code if code < 0 else code - 128  # how a shell reports its command's signal
    if number > 0 and number in set(signal.Signals):
        return f"was ended by {signal.Signals(number).name}"
    hint = {_NOT_FOUND: " (command not found)", _NOT_EXECUTABLE: " (not executable)"}.get(code, "")
    return f"ended with exit code {code}{hint}"


def _has_descriptor(stream: IO[bytes]) -> bool:
    try:
        return stream.fileno() >= 0
    except OSError:
        return False


# ---- Files as streams of bytes

AS_IT_IS = "cat"
"""The pipe command that needs no process."""
Readable = IO[bytes] | io.RawIOBase | io.BufferedIOBase


class FileSource:
    """An open file, as a Source."""

    def __init__(self, name: str, stream: Readable) -> None:
        self.name = name
        self._stream = cast(io.RawIOBase, stream)

    def readinto(self, buffer: memoryview) -> int:
        try:
            return self._stream.readinto(buffer) or 0
        except (EOFError, OSError, zlib.error) as problem:
            raise _unread(self.name, problem) from problem


class _WholeFile(io.RawIOBase):
    """An open file that raises EOFError if it ends before the size that it had when opened."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = cast(io.RawIOBase, stream)
        self.size: int | None = getattr(stream, "size", None)  # stores and named pipes may lack a size
        if _has_descriptor(stream) and stat.S_ISREG((found := os.fstat(stream.fileno())).st_mode):
            self.size = found.st_size
        self._read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        got = self._stream.readinto(buffer) or 0
        self._read += got
        if not got and len(buffer) and self.size is not None and self._read < self.size:
            raise EOFError(f"it ends after {self._read} of {self.size} bytes; copy the file again")
        return got

    def close(self) -> None:
        self._stream.close()
        super().close()


def check_files(paths: Sequence[str]) -> None:
    """Check that every local file exists before the first one is read.

    Raises DataError with the name of a file that is missing or is a directory. Remote files are checked when
    they are opened.
    """
    local = [path for path in paths if not _is_remote(path)]
    missing = [path for path in local if not Path(path).exists()]
    if missing:
        others = f" and {len(missing) - 1} more of {len(paths)} files" if len(missing) > 1 else ""
        raise DataError(f"{missing[0]}{others} in set_filelist does not exist")
    folders = [path for path in local if Path(path).is_dir()]
    if folders:
        raise DataError(f"{folders[0]} is a directory. Pass the files in it to set_filelist.")


@contextlib.contextmanager
def open_source(path: str, command: str, stop: int) -> Iterator[Source]:
    """Open one file as a Source, through `command` unless it is "cat".

    With "cat", files whose name ends in .gz are unzipped. `stop` is a descriptor that becomes readable to end
    the reading. Raises DataError with the name of the file.
    """
    stream = _open(path)
    if command.strip() != AS_IT_IS:
        given = stream if _has_descriptor(stream) else cast(IO[bytes], _WholeFile(stream))
        source = PipeSource(command, path, given, stop)
        with contextlib.closing(source):
            yield source
        return
    with contextlib.closing(_WholeFile(stream)) as whole:
        if not path.endswith(".gz"):
            yield FileSource(path, whole)
        elif whole.size == 0:
            raise _unread(path, EOFError("the file is empty, which is not valid gzip"))
        else:
            yield FileSource(path, gzip.GzipFile(fileobj=whole))


def _unread(name: str, problem: Exception) -> DataError:
    return DataError(f"{name} cannot be read to its end: {problem}")


def _is_remote(path: str) -> bool:
    return "://" in path


def _open(path: str) -> IO[bytes]:
    try:
        if _is_remote(path):
            return cast(IO[bytes], fsspec.open(path, "rb").open())
        return cast(IO[bytes], open(path, "rb", buffering=0))  # noqa: PTH123  # the caller closes it
    except (OSError, ImportError, ValueError) as problem:
        raise DataError(f"{path} cannot be opened: {problem}") from problem
