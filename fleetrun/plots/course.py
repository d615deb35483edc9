"""The data of a plot, read from the event logs of a job.

The event log is not trusted, so every value is checked.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fleetrun.decoding import whole_in
from fleetrun.record.goodput import Event, Goodput
from fleetrun.record.history import History, events_of, number
from fleetrun.record.journal import objects_in

RoleAndRank = tuple[str, int]
"""Role and rank."""

LOSS, SAMPLES, STEPS, LATE = "loss", "samples per second", "steps per second", "waited for, %"
_ROLES = {"ps": "server"}  # names in messages
_OF_TABLES = {"rows": "rows", "pulled_keys_s": "keys pulled per second"}
_LONGEST = 40  # characters of a name
_LARGEST = 1e30  # larger values count as infinite
_OLDEST = 3600.0  # seconds; larger ages are not believed
_FARTHEST = 1e11  # seconds since the epoch; later times are invalid
_FEWEST = 3  # points of a speed, without the last, that are enough
_SHORTEST = 0.5  # seconds, the shortest span of a speed


class Life(NamedTuple):
    """One attempt of a process. Times are in seconds since the epoch."""

    begin: float
    end: float
    fate: str
    """`completed`, `failed`, `stopped by fleetrun`, `running` or `end not known`."""


Line = list[tuple[float, float]]
"""A number over time, in seconds since the epoch. NaN breaks the line. A value that a process reported as NaN
or infinite is infinite here.
"""
Lines = defaultdict[str, defaultdict[Any, Line]]


def process_title(role: str, rank: int) -> str:
    return f"{_ROLES.get(role, role)} {rank}"


class Course:
    """One run. `now` is given while the job runs, and running processes last until then.

    `others` are the event logs of the job's other nodes. Only their processes count, not their events of the
    job. Raises UnreadableError.
    """

    def __init__(self, history: History, now: float | None = None, others: Sequence[Path] = ()) -> None:
        self.begin, self.end = math.inf, now or 0.0
        self.curves: Lines = _lines()
        """Loss and speed, by the title of the panel, then by process."""
        self.values: Lines = _lines()
        """By the name of the value, then by process."""
        self.tables: Lines = _lines()
        """By the title of the panel, then by table, summed over all servers."""
        self.titles: dict[str, str] = {}
        """Titles of processes by their names, in the order of the launch."""
        self.lives: dict[str, list[Life]] = defaultdict(list)
        self._open: dict[str, float] = {}
        self._reports: dict[RoleAndRank, tuple[object, object]] = {}
        self._steps: dict[RoleAndRank, tuple[float, float]] = {}
        self._of_servers: dict[tuple[str, str], dict[RoleAndRank, float]] = defaultdict(dict)
        goodput = Goodput()
        for node, path in enumerate((history.path, *others)):
            for event in events_of(path):
                if _believed(event):
                    if not node:
                        goodput.take(event)
                    self._take(event, f"@{node}" if node else "")
        self.begin = min(self.begin, self.end)
        for name in list(self._open):
            self._close(name, self.end, "end not known" if now is None else "running")
        self.lives = {name: self.lives[name] for name in [*self.titles, *self.lives] if name in self.lives}
        self.spans = goodput.spans(now)
        """The use of the time."""
        self.seconds = goodput.seconds(now)
        """The use of the time in all."""
        events = [each for each in history.events if _believed(each)]
        self.hangs = [each["time"] for each in events if each["event"] == "hung"]
        """In seconds since the epoch."""
        self.restarts = [
            each["time"]
            for each in events
            if each["event"] == "restarting"
            or (each["event"] == "ready" and _positive(each.get("attempt")) > 0)
        ]
        """In seconds since the epoch."""
        late = {each["time"]: _shares(each) for each in events if each["event"] == "lateness"}
        for rank in {rank for shares in late.values() for rank in shares}:
            for time, shares in late.items():
                self.curves[LATE]["trainer", rank].append((time, 100 * shares.get(rank, 0.0)))

    def _take(self, event: Event, node: str) -> None:
        """Take an event of a process. Processes of all nodes have the same names."""
        at, name = float(event["time"]), f"{event.get('container')}{node}"
        self.begin, self.end = min(self.begin, at), max(self.end, at)
        role, rank = name.rpartition(".")[0], whole_in(event.get("rank"))
        match event["event"]:
            case "launch" | "ready":
                for each in objects_in(event, "containers"):
                    title, number = str(each.get("name")), whole_in(each.get("rank"))
                    shown = title if number is None else process_title(str(each.get("role")), number)
                    self.titles[title + node] = "".join(filter(str.isprintable, shown))[:_LONGEST]
            case "started":
                self._close(name, at, "end not known")
                self._open[name] = at
            case "exited":
                asked = event.get("asked") is not None
                fate = "completed" if event.get("code") == 0 else "stopped by fleetrun" if asked else "failed"
                self._close(name, at, fate)
        if role and rank is not None:
            self._follow((role, rank), event, at)

    def _close(self, name: str, at: float, fate: str) -> None:
        if name in self._open:
            begin = self._open.pop(name)
            self.lives[name].append(Life(begin, max(begin, at), fate))

    def _follow(self, key: RoleAndRank, event: Event, at: float) -> None:
        """Take an event of a process that has a rank, which counts over all nodes."""
        match event["event"]:
            case "started":
                self._steps.pop(key, None)
                for lines in (*self.curves.values(), *self.values.values()):
                    if key in lines:
                        lines[key].append((at, math.nan))
            case "exited":
                # the last report may come long after the last step
                for title, lines in self.curves.items():
                    if title in (SAMPLES, STEPS) and len(lines.get(key, ())) > _FEWEST:
                        lines[key].pop()
            case "progress":
                # the time of the report, which is earlier than the time of the event
                age = _positive(event.get("age"))
                self._progress(key, event, at if math.isnan(age) else at - min(age, _OLDEST))

    def _progress(self, key: RoleAndRank, event: Event, at: float) -> None:
        for name, value in _objects(event.get("values")):
            self.values[name][key].append((at, _number(value)))
        for table, numbers in _objects(event.get("tables")):
            for what, value in _objects(numbers):
                if what in _OF_TABLES and not math.isnan(rows := _positive(value)):
                    of_servers = self._of_servers[what, table]
                    of_servers[key] = rows
                    self.tables[_OF_TABLES[what]][table].append((at, math.fsum(of_servers.values())))
        loss, step = event.get("loss"), _positive(event.get("step"))
        before = self._reports.get(key, (math.nan, None))
        if step == before[0] and loss in (None, before[1]):
            return  # repeats the last report, as an activity or at the end
        self._reports[key] = step, loss
        if loss is not None:
            self.curves[LOSS][key].append((at, _number(loss)))
        if not math.isnan(rate := _positive(event.get("rate"))):
            self.curves[SAMPLES][key].append((at, rate))
        if not math.isnan(step):
            self._step(key, at, step)

    def _step(self, key: RoleAndRank, at: float, step: float) -> None:
        """Add the speed between reports of new steps that are at least half a second apart."""
        since, last = self._steps.get(key, (at, math.inf))
        if step < last:
            self.curves[STEPS][key].append((at, math.nan))
        elif step > last and at - since >= _SHORTEST:
            self.curves[STEPS][key].append((at, (step - last) / (at - since)))
        else:
            return
        self._steps[key] = at, step


def _believed(event: Event) -> bool:
    return 0 <= float(event["time"]) < _FARTHEST


def _shares(event: Event) -> dict[int, float]:
    """Return the share of the minute before in which others waited for each rank. Missing ranks: 0."""
    found = ((whole_in(each.get("rank")), _positive(each.get("share"))) for each in objects_in(event, "late"))
    return {rank: share for rank, share in found if rank is not None and rank >= 0 and share <= 1}


def _lines() -> Lines:
    return defaultdict(lambda: defaultdict(list))


def _objects(value: object) -> Sequence[tuple[str, object]]:
    return list(value.items()) if isinstance(value, Mapping) else []


def _number(value: object) -> float:
    """Convert to a number. Infinite if the value is not a number."""
    found = number(value)
    return found if found is not None and abs(found) < _LARGEST else math.inf


def _positive(value: object) -> float:
    """Convert to a number, or to NaN if the value is not a number from 0."""
    found = _number(value)
    return found if 0 <= found < _LARGEST else math.nan
