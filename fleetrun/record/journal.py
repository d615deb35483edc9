"""Write the event log of a launch on one node. `history` and `log_lines` read its two files.

`log/<job>.<pod>.events.jsonl` gets every event as one JSON object per line. `.marks` next to it gets the
sizes of the log files over time, which give the lines of the logs a time.

Marks are written only while logs grow. A job writes ten marks per second for a long time, and fewer later:

    # trainer.0 trainer.1       the names that the numbers below stand for
    rest 0.01                   seconds without a look before the following marks
    1795332112.98 0:4096 1:310  the lengths of these logs at this moment
    1795332150.02 0-1048576     --log_rotate removed this many bytes from the head of this log
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fleetrun.aliases import Clock, Document, Fields
from fleetrun.files import ask_for_writes, open_plain
from fleetrun.pod.loop import Loop, Timer

# ---- A file of whole lines on a disk that may be full


class Appender:
    """A file that only its owner can read, and that grows by whole lines. While it is open, it holds a file
    lock, which shows readers that a launcher writes the file.
    """

    def __init__(self, path: Path) -> None:
        self._fd = _opened(path)
        self._locked = self._fd >= 0 and self._lock()
        self._torn = False
        self.written = 0

    def append(self, line: bytes) -> bool:
        """Append a line. Return True if the whole line and its end are in the file.

        If a full disk cuts a line short, the next line starts after a newline, so the torn part stays a
        separate line.
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
        """Close the file. You may call it twice. Later lines are dropped."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _lock(self) -> bool:
        """Try to get the lock. A reader may hold it for a moment, and some file systems have no locks."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False


def _opened(path: Path) -> int:
    """Return a descriptor that appends to a regular file, or -1. Never blocks on a FIFO."""
    try:
        return open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
    except OSError:
        return -1


# ---- The event log

Event = Document
"""`time` (seconds since the epoch), `event` (its name), and the fields in docs/reference/events.md."""


def objects_in(fields: Fields, name: str) -> list[Document]:
    """Return the objects in a list of an event or an answer, which may have any form."""
    found = fields.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


SUFFIX = ".events.jsonl"


def journal_path(log_dir: Path, job_id: str, pod: str) -> Path:
    return log_dir / f"{job_id}.{pod}{SUFFIX}"


class Journal:
    """The writer of an event log. Events that cannot be written are dropped and counted, because a full disk
    must not end a job.
    """

    def __init__(self, path: Path, wall: Clock = time.time) -> None:
        self.path = path
        self._wall = wall
        self._listeners: list[Callable[[Event], None]] = []
        self._file = Appender(path)
        self._lost = 0

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Call `listener` with every following event, even if the event could not be written."""
        self._listeners.append(listener)

    def write(self, event: str, **fields: object) -> None:
        """Append an event. Fields are JSON values. Numbers that JSON lacks become "nan", "inf" or "-inf"."""
        line = {"time": round(self._wall(), 3), "event": event, **fields}
        if self._lost:
            lost = {"time": line["time"], "event": "lost", "events": self._lost}
            self._lost = 0 if self._file.append(encoded(lost)) else self._lost
        self._lost += not self._file.append(encoded(line))
        for listener in self._listeners:
            listener(line)

    def close(self) -> None:
        """Close the file. You may call it twice. Later events reach only the listeners."""
        self._file.close()


def encoded(event: Event) -> bytes:
    """Return an event as one line, without the newline."""
    try:
        text = json.dumps(event, ensure_ascii=False, allow_nan=False, default=str)
    except ValueError:
        text = json.dumps(plain(event), ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace")


def plain(value: object) -> Any:
    """Replace numbers that JSON lacks with strings: `nan`, `inf`, `-inf`."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


# ---- Sizes of the log files over time

MARKS_SUFFIX = ".marks"


def marks_path(log_dir: Path, job_id: str, pod: str) -> Path:
    return log_dir / f"{job_id}.{pod}{MARKS_SUFFIX}"


REST = 1.0  # seconds between two looks at logs that always grow
SHORT = 0.01  # the same for logs that grow now and then
_MARKS, _LOOKS = 100.0, 200.0  # at first, after short rests; then this many per second:
_MARKS_A_SECOND, _LOOKS_A_SECOND = 10.0, 20.0
_LONGEST_REST = 64.0
_ENOUGH = 8 << 20  # bytes, after which the rest doubles, so that a job of weeks does not fill a disk


class Marks:
    """The marks of the logs of one pod's processes, by name. Call `handle_write` at each SIGIO, as for a
    `Watch`.
    """

    def __init__(
        self,
        path: Path,
        loop: Loop,
        wall: Clock = time.time,
        ask: Callable[[int], bool] = ask_for_writes,
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
        self._written_rest = 0.0
        """The rest in the last line of the file."""
        self._since = SHORT
        """The longest time since the last look."""
        self._marks, self._looks, self._counted = _MARKS, _LOOKS, loop.clock()
        self._timer = Timer()

    def start(self, logs: Mapping[str, Path]) -> None:
        """Start with these logs, by process name, as soon as they exist. The next pods have the same logs."""
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

    def handle_write(self) -> None:
        """Handle a write in the log directory, to a log or to another file."""
        if self._folder >= 0 and not self._timer.pending:
            self._mark(range(len(self._logs)))
            self._rest_a_while()

    def handle(self, event: Fields) -> None:
        """Handle an event of the log: the end of a process is the time of its last line."""
        if event.get("event") == "exited" and event.get("container") in self._names:
            self._mark([self._names.index(event["container"])])

    def cut(self, log: Path, by: int) -> None:
        """Record that this log lost `by` bytes at its head."""
        if by and str(log) in self._logs:
            number = self._logs.index(str(log))
            self._sizes[number] -= by
            self._write(f"{self._wall():.2f} {number}-{by}", self._since)

    def close(self) -> None:
        """Close after the last write. You may call it twice."""
        if self._folder < 0:
            return
        self._mark(range(len(self._logs)))
        os.close(self._folder)
        self._folder = -1
        self._timer.cancel()
        if self._file is not None:
            self._file.close()

    def _look(self) -> None:
        """Request a signal, then check the logs. In this order, no write is missed."""
        will_notify = self._ask_kernel(self._folder)
        if self._mark(range(len(self._logs))):
            self._rest_a_while()
        elif not will_notify:
            self._since = self._rest
            self._timer = self._loop.after(self._rest, self._look)
        else:
            self._since = SHORT  # the kernel signals immediately

    def _rest_a_while(self) -> None:
        """Rest for a short time, or longer after many recent looks or marks."""
        now = self._loop.clock()
        passed, self._counted = now - self._counted, now
        self._marks = min(_MARKS, self._marks + passed * _MARKS_A_SECOND / self._rest)
        self._looks = min(_LOOKS, self._looks + passed * _LOOKS_A_SECOND)
        self._since = self._rest
        if self._marks >= 1 and self._looks >= 1:
            self._looks -= 1
            self._since = SHORT
        self._timer = self._loop.after(self._since, self._look)

    def _mark(self, numbers: Iterable[int]) -> bool:
        """Record the logs whose size has changed. Return True if any size has changed."""
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
        if rest != self._written_rest:
            self._written_rest = rest
            self._file.append(f"rest {rest:g}".encode())
        self._file.append(line.encode())
        self._rest = min(_LONGEST_REST, REST * 2.0 ** (self._file.written // _ENOUGH))
