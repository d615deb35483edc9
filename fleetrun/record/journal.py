"""Writing the record of a launch on one machine: everything that happens, one JSON object a line, appended to
`log/<job>.<pod>.events.jsonl`; and in `.marks` next to it the sizes of the log files over time, which give
their lines a time. `history` and `log_lines` read them.

Marks are written only while logs grow: ten a second for long, later in a long job fewer:

    # trainer.0 trainer.1        the names that the numbers below stand for
    rest 0.01                    for how many seconds there was no look before the marks that follow
    1795332112.98 0:4096 1:310   at that moment these logs were so long
    1795332150.02 0-1048576      --log_rotate took so many bytes out of the head of this one
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fleetrun.aliases import Clock, Document, Fields
from fleetrun.files import ask_for_writes
from fleetrun.pod.loop import Loop, Timer

# ---- A file of whole lines on a disk that may be full


class Appender:
    """Readable by its owner only. While it is open it holds the file's lock, which shows readers that it is
    being written.
    """

    def __init__(self, path: Path) -> None:
        self._fd = _opened(path)
        self._locked = self._fd >= 0 and self._lock()
        self._torn = False
        self.written = 0

    def append(self, line: bytes) -> bool:
        """Whether all of it, and the end of the line, is in the file now. What a full disk tears off stays a
        line of its own.
        """
        if self._fd < 0:
            return False
        self._locked = self._locked or self._lock()
        data = b"\n" * self._torn + line + b"\n"
        try:
            written = os.write(self._fd, data)
        except OSError:
            return False
        self.written += written
        self._torn = written < len(data) if written else self._torn
        return written == len(data)

    def close(self) -> None:
        """May be called twice; after it nothing is written."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _lock(self) -> bool:
        """A reader may hold it for a moment; a file system may have none."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False


def _opened(path: Path) -> int:
    """A descriptor that appends to a regular file, or -1. Never blocks (on a FIFO without a reader)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError:
        return -1
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return -1
    return fd


# ---- The record

Event = Document
"""`time` (seconds since the epoch), `event` (its name), and what belongs to it: docs/reference/events.md."""


def objects_in(fields: Fields, name: str) -> list[Document]:
    """The objects in a list of an event or an answer, which may have any form."""
    found = fields.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


SUFFIX = ".events.jsonl"


def journal_path(log_dir: Path, job_id: str, pod: str) -> Path:
    return log_dir / f"{job_id}.{pod}{SUFFIX}"


class Journal:
    """Appends whole lines. What cannot be written is let go and counted: a full disk ends no job."""

    def __init__(self, path: Path, wall: Clock = time.time) -> None:
        self.path = path
        self._wall = wall
        self._listeners: list[Callable[[Event], None]] = []
        self._file = Appender(path)
        self._lost = 0

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """From now on called with every event, whether it could be written or not."""
        self._listeners.append(listener)

    def write(self, event: str, **fields: Any) -> None:
        """Fields are JSON values; numbers that JSON does not have become "nan", "inf", "-inf"."""
        said = {"time": round(self._wall(), 3), "event": event, **fields}
        if self._lost:
            lost = {"time": said["time"], "event": "lost", "events": self._lost}
            self._lost = 0 if self._file.append(encoded(lost)) else self._lost
        self._lost += not self._file.append(encoded(said))
        for listener in self._listeners:
            listener(said)

    def close(self) -> None:
        """May be called twice; what is written after it reaches listeners only."""
        self._file.close()


def encoded(event: Event) -> bytes:
    """One line, without its end."""
    try:
        text = json.dumps(event, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(plain(event), ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace")


def plain(value: Any) -> Any:
    """What JSON does not have as a number, as a string: `nan`, `inf`, `-inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


# ---- Sizes of the log files over time

MARKS_SUFFIX = ".marks"


def marks_path(log_dir: Path, job_id: str, pod: str) -> Path:
    return log_dir / f"{job_id}.{pod}{MARKS_SUFFIX}"


REST = 1.0  # seconds between two looks at logs that grow all the time
SHORT = 0.01  # the same at those that grow now and then
_MARKS, _LOOKS = 100.0, 200.0  # so many after short rests at once, and of each so many a second for long
_MARKS_A_SECOND, _LOOKS_A_SECOND = 10.0, 20.0
_LONGEST_REST = 64.0
_ENOUGH = 8 << 20  # bytes, after which the rest doubles: a job of weeks must not fill a disk with this


class Marks:
    """Of the logs of one pod's containers, by name. Woken like a `Watch`: call `told` at each SIGIO."""

    def __init__(
        self,
        path: Path,
        loop: Loop,
        wall: Clock = time.time,
        ask: Callable[[int], None] = ask_for_writes,
    ) -> None:
        self._path = path
        self._loop = loop
        self._wall = wall
        self._ask_kernel = ask
        self._names: list[str] = []
        self._logs: list[str] = []
        self._sizes: list[int] = []
        self._file: Appender | None = None
        self._folder = -1
        self._rest = REST
        self._told_rest = 0.0
        """That the last line of the file says."""
        self._since = SHORT
        """The longest time since the last look."""
        self._marks, self._looks, self._counted = _MARKS, _LOOKS, loop.clock()
        self._timer = Timer()

    def start(self, logs: Mapping[str, Path]) -> None:
        """Once these logs are there, by the names of their containers. The next pods have the same."""
        if self._names:
            return
        self._names = list(logs)
        self._logs = [str(each) for each in logs.values()]
        self._sizes = [0] * len(self._logs)
        try:
            self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        self._look()

    def told(self) -> None:
        """Something in the log directory was written to: a log, or another file there."""
        if self._folder >= 0 and not self._timer.pending:
            self._mark(range(len(self._logs)))
            self._rest_a_while()

    def heard(self, event: Fields) -> None:
        """An event of the record: the end of a process is the time of its last line."""
        if event.get("event") == "exited" and event.get("container") in self._names:
            self._mark([self._names.index(event["container"])])

    def cut(self, log: Path, by: int) -> None:
        """This log lost so many bytes at its head."""
        if by and str(log) in self._logs:
            number = self._logs.index(str(log))
            self._sizes[number] -= by
            self._write(f"{self._wall():.2f} {number}-{by}", self._since)

    def close(self) -> None:
        """After the last write. May be called twice."""
        if self._folder < 0:
            return
        self._mark(range(len(self._logs)))
        os.close(self._folder)
        self._folder = -1
        self._timer.cancel()
        if self._file is not None:
            self._file.close()

    def _look(self) -> None:
        """Ask for news, then see what is there already: in this order, so that no write falls between."""
        will_tell = self._ask()
        if self._mark(range(len(self._logs))):
            self._rest_a_while()
        elif not will_tell:
            self._since = self._rest
            self._timer = self._loop.after(self._rest, self._look)
        else:
            self._since = SHORT  # the kernel tells at once

    def _rest_a_while(self) -> None:
        """A short while, unless there were many looks, or marks, of late."""
        now = self._loop.clock()
        passed, self._counted = now - self._counted, now
        self._marks = min(_MARKS, self._marks + passed * _MARKS_A_SECOND / self._rest)
        self._looks = min(_LOOKS, self._looks + passed * _LOOKS_A_SECOND)
        self._since = self._rest
        if self._marks >= 1 and self._looks >= 1:
            self._looks -= 1
            self._since = SHORT
        self._timer = self._loop.after(self._since, self._look)

    def _ask(self) -> bool:
        try:
            self._ask_kernel(self._folder)
        except OSError:
            return False
        return True

    def _mark(self, numbers: Iterable[int]) -> bool:
        """Write down which of them have changed their size; whether any has."""
        changed = []
        for number in numbers:
            try:
                size = os.stat(self._logs[number]).st_size  # noqa: PTH116  (a Path would take three times as long)
            except OSError:
                continue
            if size != self._sizes[number]:
                self._sizes[number] = size
                changed.append(f"{number}:{size}")
        if changed:
            self._marks -= 1
            self._write(f"{self._wall():.2f} {' '.join(changed)}", self._since)
        return bool(changed)

    def _write(self, line: str, rest: float) -> None:
        if self._file is None:
            self._file = Appender(self._path)
            self._file.append(f"# {' '.join(self._names)}".encode())
        if rest != self._told_rest:
            self._told_rest = rest
            self._file.append(f"rest {rest:g}".encode())
        self._file.append(line.encode())
        self._rest = min(_LONGEST_REST, REST * 2.0 ** (self._file.written // _ENOUGH))
