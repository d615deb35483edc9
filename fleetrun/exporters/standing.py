"""How a job stands, gathered from what the launcher says: every process, how often it started and ended, what
it reported last. Pure; knows no format in which it is exported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleetrun.exporters.lines import Line

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
