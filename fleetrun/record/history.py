"""Read the event log of a launch, whatever happened to its file: torn lines, foreign lines, a missing end.
The reader checks only the form of a line.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from fleetrun.decoding import number_in, read_object, whole_in
from fleetrun.files import open_plain
from fleetrun.frozen import frozen_by_name
from fleetrun.record.journal import SUFFIX, Event, objects_in

LONGEST_LINE = 4 << 20
_TAIL = 1 << 20  # bytes, more than the last event has
_NAME = re.compile(r"(?P<job>.+)\.(?P<pod>[a-z]{6})" + re.escape(SUFFIX), re.DOTALL)
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class UnreadableError(Exception):
    """The event log does not exist, or is not readable. The message gives the reason."""


@frozen_by_name
class Known:
    """A process of the job in the event log. `rank` is None for the pre-hook. `log` is next to the event log,
    even after a move of the directory.
    """

    name: str
    role: str
    rank: int | None
    index: int
    log: Path
    endpoint: str = ""


@frozen_by_name
class History:
    """The content of an event log.

    `damaged` counts lines that are not events. `owner` is the user ID of the file's owner. `running` is True
    while the launcher runs, and None if the file system cannot show this. `last_seen` is the time of the last
    skipped event.
    """

    path: Path
    job: str
    pod: str
    events: tuple[Event, ...]
    damaged: int
    owner: int
    running: bool | None
    last_seen: float = 0.0

    def all(self, *names: str) -> tuple[Event, ...]:
        """Return the events with these names, in order."""
        return tuple(each for each in self.events if each["event"] in names)

    def last(self, name: str) -> Event | None:
        return next((each for each in reversed(self.events) if each["event"] == name), None)

    @property
    def launch(self) -> Event:
        """The event `launch`. Empty if its line is lost."""
        return next(iter(self.all("launch")), {})

    @property
    def over(self) -> Event | None:
        """The event of the end. None if the job runs, or if its launcher was killed."""
        return self.last("over")

    @property
    def began(self) -> float | None:
        return self.events[0]["time"] if self.events else None

    @property
    def ended(self) -> float | None:
        """The time of the last event, or None while the job runs."""
        if self.over is not None:
            return float(self.over["time"])
        if self.running or not self.events:
            return None
        return max(float(self.events[-1]["time"]), self.last_seen)

    @property
    def containers(self) -> tuple[Known, ...]:
        """The processes of the newest pod."""
        for event in reversed(self.all("launch", "ready")):
            found = tuple(self._known(event))
            if found:
                return found
        return ()

    def _known(self, event: Event) -> Iterator[Known]:
        for each in objects_in(event, "containers"):
            name, role, log = each.get("name"), each.get("role"), each.get("log")
            if isinstance(name, str) and isinstance(role, str) and isinstance(log, str) and Path(log).name:
                yield Known(
                    name=name,
                    role=role,
                    rank=whole_in(each.get("rank")),
                    index=whole_in(each.get("index")) or 0,
                    log=self.path.parent / Path(log).name,
                    endpoint=str(each.get("endpoint") or ""),
                )


def read(path: Path) -> History:
    """Read the event log in `path`, without `progress` events, which make up most of a long log.

    `events_of` also returns `progress` events. Raises UnreadableError.
    """
    with _opened(path) as file:
        running = _is_written(file)  # before the reading: a job that ends meanwhile has then written its end
        events: list[Event] = []
        left_out = b""
        damaged = 0
        skips = _begins("progress")
        for line in _lines(file):
            if skips(line) is not None:  # the form of a journal's lines; other lines are parsed
                left_out = line
                continue
            event = parsed(line)
            if event is None:
                damaged += bool(line.strip())
            elif event["event"] != "progress":
                events.append(event)
        owner = os.fstat(file.fileno()).st_uid
    job, pod = names(path) or (path.name, "")
    last_seen = (parsed(left_out) or {"time": 0.0})["time"]
    return History(
        path=path,
        job=job,
        pod=pod,
        events=tuple(events),
        damaged=damaged,
        owner=owner,
        running=running,
        last_seen=float(last_seen),
    )


@frozen_by_name
class Glance:
    """The start and the end of an event log, for a list of launches.

    `launch` is empty if its line is lost. `over` and `progress` (of a trainer) are the last events of their
    kind, or None if the end of the file has no such event. `last_seen` is the time of the last event.
    """

    path: Path
    job: str
    pod: str
    running: bool | None
    launch: Event
    over: Event | None = None
    progress: Event | None = None
    last_seen: float = 0.0


def glance(path: Path, end: bool = True) -> Glance:
    """Read the two ends of an event log. Without `end`, read only the start. Raises UnreadableError."""
    with _opened(path) as file:
        running = _is_written(file)
        first = parsed(file.readline(LONGEST_LINE)) or {}
        job, pod = names(path) or (path.name, "")
        launch = first if first.get("event") == "launch" else {}
        found = Glance(path=path, job=job, pod=pod, running=running, launch=launch)
        if not end:
            return found
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        events = [event for line in file.read().split(b"\n") if (event := parsed(line)) is not None]
    last = {
        event["event"]: event
        for event in events
        if event["event"] == "over"
        or (event["event"] == "progress" and str(event.get("container")).startswith("trainer."))
    }
    last_seen = float((events or [{"time": 0.0}])[-1]["time"])
    return replace(found, over=last.get("over"), progress=last.get("progress"), last_seen=last_seen)


def events_of(path: Path) -> Iterator[Event]:
    """Yield all events, one after the other, because a long log has millions. Raises UnreadableError."""
    with _opened(path) as file:
        yield from (event for line in _lines(file) if (event := parsed(line)) is not None)


def records(log_dir: Path) -> list[Path]:
    """Return all event logs in a directory, newest first by the time of the last write."""
    try:
        with os.scandir(log_dir) as entries:
            files = [each for each in entries if _NAME.fullmatch(each.name)]
    except OSError:
        return []
    found = [(_changed(each), each.name) for each in files]
    return [log_dir / name for moment, name in sorted(found, reverse=True) if moment]


def _changed(entry: os.DirEntry[str]) -> float:
    """Return the time of the last change, or 0 if the file was deleted or is no regular file."""
    try:
        return entry.stat(follow_symlinks=False).st_mtime if entry.is_file(follow_symlinks=False) else 0.0
    except OSError:
        return 0.0


def names(path: Path) -> tuple[str, str] | None:
    """Return job and pod from the file's name."""
    match = _NAME.fullmatch(path.name)
    return (match["job"], match["pod"]) if match else None


def parsed(line: bytes) -> Event | None:
    """Return the event of a line, or None if the line is malformed."""
    event = read_object(line)
    if event is None or not isinstance(event.get("event"), str):
        return None
    moment = number(event.get("time"))
    return event if moment is not None and abs(moment) < 1e12 else None


def was_stopped(over: Event) -> bool:
    """Return True if the user ended the job: by Ctrl-C, `fleetrun stop` or a signal, without an earlier
    failure.
    """
    return over.get("code") in (129, 130, 143) and not over.get("report")


def number(value: object) -> float | None:
    """Read a number in the form of the journal, which includes numbers that JSON lacks."""
    if isinstance(value, str):
        return _NUMBERS.get(value)
    found = number_in(value)
    return None if found is None else float(found)


def _opened(path: Path) -> IO[bytes]:
    try:
        return os.fdopen(open_plain(path), "rb")
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from None


def is_running(path: Path) -> bool:
    """Return True if the launcher that writes this event log runs. Without file locks, return True if the log
    has no end.
    """
    try:
        with _opened(path) as file:
            running = _is_written(file)
            return running if running is not None else not has_end(file)
    except UnreadableError:
        return False


def has_end(file: IO[bytes]) -> bool:
    """Return True if the event log has the event of the end. Reads only the last part of the file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    over = _begins("over")
    return any(over(line) is not None for line in file.read().split(b"\n"))


def _begins(event: str) -> Callable[[bytes], object]:
    """Return a function that recognizes a journal's line of this event without parsing it."""
    return re.compile(rf'\{{"time": [-0-9.e]+, "event": "{event}"'.encode()).match


def _is_written(file: IO[bytes]) -> bool | None:
    """Return True while a launcher holds the lock, and None without file locks.

    Readers take a shared lock, so no reader mistakes another reader for a launcher.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines. A line that is too long comes in pieces, and no piece is an event."""
    while line := file.readline(LONGEST_LINE):
        yield line
