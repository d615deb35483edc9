"""Reads the record of a launch back, whatever became of its file: torn lines, foreign lines, no end. Judges
nothing that a line says beyond its form.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from fleetrun.frozen import frozen_by_name
from fleetrun.record.journal import SUFFIX, Event, objects_in

LONGEST_LINE = 4 << 20
_TAIL = 1 << 20  # bytes, more than the last event has
_NAME = re.compile(r"(?P<job>.+)\.(?P<pod>[a-z]{6})" + re.escape(SUFFIX), re.DOTALL)
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class UnreadableError(Exception):
    """There is no record, or it is not readable; the message says which."""


@frozen_by_name
class Known:
    """A process of the job as the record knows it. `rank` is None for the pre-hook. `log` is next to
    the record, wherever that was moved to.
    """

    name: str
    role: str
    rank: int | None
    index: int
    log: Path
    endpoint: str = ""


@frozen_by_name
class History:
    """What the record says. `damaged` counts lines that are not events, `owner` is the uid of the file.
    `running`: whether its launcher runs; None where the file system cannot tell. `heard`: when the last of
    the events that were left out was written.
    """

    path: Path
    job: str
    pod: str
    events: tuple[Event, ...]
    damaged: int
    owner: int
    running: bool | None
    heard: float = 0.0

    def all(self, *names: str) -> tuple[Event, ...]:
        """Events of these names, in their order."""
        return tuple(each for each in self.events if each["event"] in names)

    def last(self, name: str) -> Event | None:
        return next((each for each in reversed(self.events) if each["event"] == name), None)

    @property
    def launch(self) -> Event:
        """Empty when its line is lost."""
        return next(iter(self.all("launch")), {})

    @property
    def over(self) -> Event | None:
        """How it ended. None: it runs, or its launcher was killed."""
        return self.last("over")

    @property
    def began(self) -> float | None:
        return self.events[0]["time"] if self.events else None

    @property
    def ended(self) -> float | None:
        """The time of its last event; None while it runs."""
        if self.over is not None:
            return float(self.over["time"])
        if self.running or not self.events:
            return None
        return max(float(self.events[-1]["time"]), self.heard)

    @property
    def containers(self) -> tuple[Known, ...]:
        """Those of the newest pod."""
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
                    rank=_whole(each.get("rank")),
                    index=_whole(each.get("index")) or 0,
                    log=self.path.parent / Path(log).name,
                    endpoint=str(each.get("endpoint") or ""),
                )


def read(path: Path) -> History:
    """The record in `path`, without `progress`, which makes most of a long one: `events_of` has that too.

    Raises UnreadableError.
    """
    with _opened(path) as file:
        running = _is_written(file)  # before it is read: what ends in between has said how
        events: list[Event] = []
        left_out = b""
        damaged = 0
        skips = _begins("progress")
        for line in _lines(file):
            if skips(line) is not None:  # as a journal writes it; others are parsed
                left_out = line
                continue
            event = parsed(line)
            if event is None:
                damaged += bool(line.strip())
            elif event["event"] != "progress":
                events.append(event)
        owner = os.fstat(file.fileno()).st_uid
    job, pod = names(path) or (path.name, "")
    heard = (parsed(left_out) or {"time": 0.0})["time"]
    return History(
        path=path,
        job=job,
        pod=pod,
        events=tuple(events),
        damaged=damaged,
        owner=owner,
        running=running,
        heard=float(heard),
    )


@frozen_by_name
class Glance:
    """The two ends of a record: what a list of launches shows. `launch` is empty when its line is lost;
    `over` and `progress` (of a trainer) are the last of their kind, None where there is none near the end.
    `heard` is the time of the last event.
    """

    path: Path
    job: str
    pod: str
    running: bool | None
    launch: Event
    over: Event | None = None
    progress: Event | None = None
    heard: float = 0.0


def glance(path: Path, end: bool = True) -> Glance:
    """Without `end` the beginning only. Raises UnreadableError."""
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
    heard = float((events or [{"time": 0.0}])[-1]["time"])
    return replace(found, over=last.get("over"), progress=last.get("progress"), heard=heard)


def events_of(path: Path) -> Iterator[Event]:
    """All of a record, one after the other: a long one has millions. Raises UnreadableError."""
    with _opened(path) as file:
        yield from (event for line in _lines(file) if (event := parsed(line)) is not None)


def records(log_dir: Path) -> list[Path]:
    """All records in a folder, the newest first: by the last word in them."""
    try:
        with os.scandir(log_dir) as entries:
            files = [each for each in entries if _NAME.fullmatch(each.name)]
    except OSError:
        return []
    found = [(_changed(each), each.name) for each in files]
    return [log_dir / name for moment, name in sorted(found, reverse=True) if moment]


def _changed(entry: os.DirEntry[str]) -> float:
    """Its time of change; 0 when it is not a file, or was deleted."""
    try:
        return entry.stat(follow_symlinks=False).st_mtime if entry.is_file(follow_symlinks=False) else 0.0
    except OSError:
        return 0.0


def names(path: Path) -> tuple[str, str] | None:
    """Job and pod, by the file's name."""
    match = _NAME.fullmatch(path.name)
    return (match["job"], match["pod"]) if match else None


def parsed(line: bytes) -> Event | None:
    """The event of a line, if it is one."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    moment = number(event.get("time"))
    return event if moment is not None and abs(moment) < 1e12 else None


def was_stopped(over: Event) -> bool:
    """Whether its user ended the job: by Ctrl-C, `fleetrun stop` or a signal, with no failure before."""
    return over.get("code") in (129, 130, 143) and not over.get("report")


def number(value: Any) -> float | None:
    """As the journal writes numbers, those that JSON does not have too."""
    if isinstance(value, str):
        return _NUMBERS.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _opened(path: Path) -> IO[bytes]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnreadableError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnreadableError(f"{path} is not a file")
    return os.fdopen(fd, "rb")


def is_running(path: Path) -> bool:
    """Whether the launcher that writes this record is there. Without locks: whether it has said no end."""
    try:
        with _opened(path) as file:
            running = _is_written(file)
            return running if running is not None else not says_its_end(file)
    except UnreadableError:
        return False


def says_its_end(file: IO[bytes]) -> bool:
    """Whether a record closes with how the launch ended. Looks at no more than its end."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    over = _begins("over")
    return any(over(line) is not None for line in file.read().split(b"\n"))


def _begins(event: str) -> Callable[[bytes], object]:
    """Tells lines of a journal that are this event, without parsing them."""
    return re.compile(rf'\{{"time": [-0-9.e]+, "event": "{event}"'.encode()).match


def _is_written(file: IO[bytes]) -> bool | None:
    """A launcher holds the lock while it runs. Readers take a shared lock, so they do not mistake each other
    for a launcher.
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
    """One that is too long comes in pieces, of which none is an event."""
    while line := file.readline(LONGEST_LINE):
        yield line
