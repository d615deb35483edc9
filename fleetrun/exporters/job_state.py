"""The messages from the launcher to the exporters, one JSON object per line, and the state of the job that
the exporter process builds from them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fleetrun.aliases import Document, Fields, Numbers, Texts
from fleetrun.envs.progress_report import Report
from fleetrun.record.journal import plain

Line = Document
"""The field `is` has its kind: `begin`, `report`, `spent`, or `event` (of the record)."""

_OF_REPORTS = ("step", "samples", "loss", "values", "server", "tables", "time")
"""Fields of a report that are sent as they are."""


def begin_message(facts: Texts, exporters: Sequence[tuple[str, str]]) -> bytes:
    """The first message: names and arguments of the exporters, and what job this is."""
    return _encoded({"is": "begin", "facts": dict(facts), "exporters": list(exporters)})


def event_message(event: Fields) -> bytes:
    """Encode a line of the record."""
    return _encoded({"is": "event", **plain(event)})


def report_message(container: str, report: Report, rate: float | None) -> bytes:
    """`rate` is in samples per second."""
    activity = report.activity
    return _encoded(
        {
            "is": "report",
            "container": container,
            "rate": rate,
            "activity": [activity.what, activity.done, activity.of] if activity is not None else None,
            **{name: getattr(report, name) for name in _OF_REPORTS},
        }
    )


def spent_message(seconds: Numbers) -> bytes:
    """Encode the seconds of the job so far, by what they were spent on."""
    return _encoded({"is": "spent", "seconds": dict(seconds)})


def read_message(line: bytes) -> Line | None:
    """None if the line is not a message."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("is"), str) else None


def _encoded(line: Line) -> bytes:
    return json.dumps(line, separators=(",", ":"), default=str).encode() + b"\n"


# ---- The state of the job, in no particular export format.

MOST_NAMES = 200
"""How many named values of one process are exported: a script that makes up names must not fill a disk."""


@dataclass(slots=True)
class ProcessState:
    """One process of the job over all its attempts, by its role and rank.

    `exits` counts by outcome: `ok`, `failed`, or `stopped` (by fleetrun). `started` and
    `reported` are seconds since the epoch.
    """

    role: str
    rank: int
    pid: int | None = None
    started: float | None = None
    starts: int = 0
    exits: Counter[str] = field(default_factory=Counter)
    reported: float | None = None
    step: int | None = None
    samples: int | None = None
    rate: float | None = None
    loss: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    activity: tuple[str, float | None, float | None] | None = None
    server: dict[str, float] = field(default_factory=dict)
    tables: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        return self.pid is not None

    def start(self, pid: int, time: float) -> None:
        """A new process: the reports of the one before it no longer count."""
        self.pid, self.started = pid, time
        self.starts += 1
        self.reported = self.step = self.samples = self.rate = self.loss = self.activity = None
        self.values, self.server, self.tables = {}, {}, {}

    def end(self, code: int, asked: int | None) -> None:
        self.pid = self.rate = self.activity = None
        self.exits["ok" if code == 0 else "stopped" if asked is not None else "failed"] += 1

    def report(self, line: Line, time: float) -> None:
        """Fields that the report leaves out keep their values."""
        self.reported = time
        for name in ("step", "samples", "loss"):
            if line[name] is not None:
                setattr(self, name, line[name])
        self.rate = line["rate"]
        activity = line["activity"]
        self.activity = (activity[0], activity[1], activity[2]) if activity else None
        self.values |= bounded(line["values"], self.values)
        self.server |= line["server"]
        self.tables |= line["tables"]


def bounded(values: Numbers, known: Mapping[str, object]) -> dict[str, float]:
    """The known values, and as many new ones as the limit allows."""
    room = MOST_NAMES - len(known)
    new = [name for name in values if name not in known]
    refused = set(new[max(0, room) :])
    return {name: value for name, value in values.items() if name not in refused}


def ranked(ready: Fields) -> list[Document]:
    """Return the processes of the event `ready`, without the one that runs before them."""
    return [each for each in ready["containers"] if each["rank"] is not None]


class Job:
    """The processes of this machine's part of the job, and counts of what happened to it."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        self.started: float | None = None
        self.processes: dict[str, ProcessState] = {}
        self.late: dict[int, float] = {}
        """Of the trainers of the whole job, where this machine has the first one."""
        self.spent: dict[str, float] = {}
        """Seconds of the job by what they went into."""
        self.failures = 0
        self.restarts = 0
        self.hangs = 0
        self.pods = 0

    def take(self, line: Line, now: float) -> None:
        """Raises KeyError, TypeError or ValueError for a line that this module did not make."""
        kind = line["is"]
        if kind == "begin":
            self.facts = {str(name): str(value) for name, value in line["facts"].items()}
            self.started = now
        elif kind == "report" and line["container"] in self.processes:
            self.processes[line["container"]].report(line, now)
        elif kind == "spent":
            self.spent = {str(kind): float(seconds) for kind, seconds in line["seconds"].items()}
        elif kind == "event":
            self._event(line)

    def _pod(self, line: Line) -> None:
        """A machine that joins again keeps the names of its containers; their ranks may change."""
        before = {(each.role, each.rank): each for each in self.processes.values()}
        self.pods += 1
        self.processes, self.late = {}, {}
        for each in ranked(line):
            key = (str(each["role"]), int(each["rank"]))
            self.processes[each["name"]] = before.get(key) or ProcessState(*key)

    def _event(self, line: Line) -> None:
        name = line["event"]
        process = self.processes.get(line.get("container") or "")
        if name == "ready":
            self._pod(line)
        elif name == "failed":
            self.failures += 1
            self.restarts += bool(line["restart"])
        elif name == "hung":
            self.hangs += 1
        elif name == "lateness":
            self.late = {int(each["rank"]): float(each["share"]) for each in line["late"]}
        elif name == "started" and process is not None:
            process.start(int(line["pid"]), float(line["time"]))
        elif name == "exited" and process is not None:
            process.end(int(line["code"]), line["asked"])
