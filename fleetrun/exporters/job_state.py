"""What the launcher sends to the exporter, one JSON object a line, and the state of the job that the exporter
builds from it. Pure; standard library only.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleetrun.pod.spec import PodSpec
from fleetrun.progress.reports import Report

# ---- What the launcher says to the process that exports: one JSON object a line. Both directions; standard
# library only.

Line = dict[str, Any]
"""`is` tells what it is: `begin`, `pod`, `report`, or `event` (of the record)."""

_EVENTS = {
    "started": ("container", "pid", "attempt"),
    "exited": ("container", "pid", "attempt", "code", "asked"),
    "failed": ("container", "restart"),
    "hung": ("containers",),
    "over": ("code",),
}
"""Events of the record that are of interest here, and what of them."""


def begin_message(**how: Any) -> bytes:
    """The first line: what to export, and where to."""
    return _encoded({"is": "begin", **how})


def pod_message(spec: PodSpec) -> bytes:
    """Whose processes are next."""
    containers = [{"name": each.name, "role": str(each.role), "rank": each.rank} for each in spec.containers]
    return _encoded({"is": "pod", "containers": containers})


def event_message(said: Mapping[str, Any]) -> bytes | None:
    """None for an event that nobody exports."""
    fields = _EVENTS.get(said["event"])
    if fields is None:
        return None
    kept = {name: said.get(name) for name in ("time", *fields)}
    return _encoded({"is": "event", "event": said["event"], **kept})


def report_message(container: str, said: Report, rate: float | None) -> bytes:
    """`rate` is in samples per second."""
    activity = said.activity
    return _encoded(
        {
            "is": "report",
            "container": container,
            "step": said.step,
            "samples": said.samples,
            "loss": said.loss,
            "values": dict(said.values),
            "rate": rate,
            "activity": [activity.what, activity.done, activity.of] if activity is not None else None,
            "time": said.time,
        }
    )


def read_message(line: bytes) -> Line | None:
    """None for what is no line of this kind."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and isinstance(said.get("is"), str) else None


def warning_message(text: str) -> bytes:
    """The other direction: something that the user should know."""
    return _encoded({"warning": text})


def read_warning(line: bytes) -> str | None:
    """The text of a warning; None for other output."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    text = said.get("warning") if isinstance(said, dict) else None
    return text if isinstance(text, str) else None


def _encoded(line: Line) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


# ---- How a job stands, gathered from what the launcher says: every process, how often it started and ended,
# what it reported last. Pure; knows no format in which it is exported.

MOST_NAMES = 200
"""Names of values of one process that are exported; a script that invents names must not fill a disk."""


@dataclass(slots=True)
class Standing:
    """One process of the job over all its attempts, by its role and rank.

    `exits` counts by outcome: `ok`, `failed`, or `stopped` (fleetrun had asked for it). `started` and
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

    @property
    def up(self) -> bool:
        return self.pid is not None

    def begins(self, pid: int, time: float) -> None:
        """A new process: what the one before it said is over."""
        self.pid, self.started = pid, time
        self.starts += 1
        self.reported = self.step = self.samples = self.rate = self.loss = self.activity = None
        self.values = {}

    def ends(self, code: int, asked: int | None) -> None:
        self.pid = self.rate = self.activity = None
        self.exits["ok" if code == 0 else "stopped" if asked is not None else "failed"] += 1

    def reports(self, line: Line, time: float) -> None:
        """What the report leaves out is as it was."""
        self.reported = time
        self.step = self.step if line["step"] is None else line["step"]
        self.samples = self.samples if line["samples"] is None else line["samples"]
        self.loss = self.loss if line["loss"] is None else line["loss"]
        self.rate = line["rate"]
        what = line["activity"]
        self.activity = (what[0], what[1], what[2]) if what else None
        self.values |= bounded(line["values"], self.values)


def bounded(values: Mapping[str, float], known: Mapping[str, object]) -> dict[str, float]:
    """Those that are known, and of the new ones as many as there is room for."""
    room = MOST_NAMES - len(known)
    new = [name for name in values if name not in known]
    refused = set(new[max(0, room) :])
    return {name: value for name, value in values.items() if name not in refused}


class Job:
    """All processes of this machine's part of the job, and what befell it."""

    def __init__(self) -> None:
        self.facts: dict[str, str] = {}
        self.started: float | None = None
        self.processes: dict[str, Standing] = {}
        self.failures = 0
        self.restarts = 0
        self.hangs = 0
        self.pods = 0

    def take(self, line: Line, now: float) -> None:
        """Raises KeyError, TypeError or ValueError for what is not as `lines` makes it."""
        kind = line["is"]
        if kind == "begin":
            self.facts = {str(name): str(value) for name, value in line["facts"].items()}
            self.started = now
        elif kind == "pod":
            self._pod(line)
        elif kind == "report" and line["container"] in self.processes:
            self.processes[line["container"]].reports(line, now)
        elif kind == "event":
            self._event(line)

    def _pod(self, line: Line) -> None:
        """The names of containers stay, their ranks may be others on a machine that joined again."""
        before = {(each.role, each.rank): each for each in self.processes.values()}
        self.pods += 1
        self.processes = {}
        for each in line["containers"]:
            key = (str(each["role"]), int(each["rank"]))
            self.processes[each["name"]] = before.get(key) or Standing(*key)

    def _event(self, line: Line) -> None:
        name = line["event"]
        process = self.processes.get(line.get("container") or "")
        if name == "failed":
            self.failures += 1
            self.restarts += bool(line["restart"])
        elif name == "hung":
            self.hangs += 1
        elif name == "started" and process is not None:
            process.begins(int(line["pid"]), float(line["time"]))
        elif name == "exited" and process is not None:
            process.ends(int(line["code"]), line["asked"])


# ---- Which numbers of a report belong into an event file, and at which step. Pure.

LOSS = "loss"
RATE = "throughput/samples_per_second"


@dataclass(frozen=True, slots=True)
class Point:
    """Numbers of one step by their tags. `again`: the process begins anew, later steps of before are void."""

    step: int
    scalars: dict[str, float]
    again: bool


class Scalars:
    """Of one process over all its attempts. A number is written once for a step, unless it changes."""

    def __init__(self) -> None:
        self.refused = False
        """Whether there were too many names."""
        self._again = True
        self._count = 0
        self._written: dict[str, tuple[int, float]] = {}

    def begins(self) -> None:
        """Another attempt. Its steps may be those of the one before."""
        self._again = True
        self._count = 0
        self._written = dict.fromkeys(self._written, (-1, 0.0))

    def take(self, line: Line) -> Point | None:
        """None when it says nothing new. Reports without a step are counted."""
        self._count += 1
        step = int(line["step"]) if line["step"] is not None else self._count
        found = self._named(line)
        new = {tag: value for tag, value in found.items() if self._written.get(tag) != (step, value)}
        if not new:
            return None
        self._written |= {tag: (step, value) for tag, value in new.items()}
        again, self._again = self._again, False
        return Point(step, new, again)

    def _named(self, line: Line) -> dict[str, float]:
        values = bounded(line["values"], {name: None for name in self._written if name not in (LOSS, RATE)})
        self.refused |= len(values) < len(line["values"])
        if line["loss"] is not None:
            values[LOSS] = line["loss"]
        known = self._written.get(RATE)
        stands = line["step"] is not None and known is not None and known[0] == line["step"]
        if line["rate"] is not None and not stands:  # it changes by the clock while a step takes its time
            values[RATE] = line["rate"]
        return values
