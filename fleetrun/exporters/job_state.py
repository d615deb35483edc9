"""Exchange messages between the launcher and the exporters, one JSON object per line. The exporter process
builds the state of the job from the messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from fleetrun.aliases import Document, Fields, Numbers
from fleetrun.decoding import read_object
from fleetrun.record.state import Process, State

Line = Document
"""The field `is` has the kind of the message: `begin`, `report`, `spent`, or `event` (of the event log)."""


def message(kind: str, fields: Fields) -> bytes:
    return json.dumps({"is": kind, **fields}, separators=(",", ":"), default=str).encode() + b"\n"


def read_message(line: bytes) -> Line | None:
    """Read a message. Return None if the line is not a message."""
    message = read_object(line)
    return message if message is not None and isinstance(message.get("is"), str) else None


# ---- The state of the job, in no particular export format

MOST_NAMES = 200
"""Most named values of one process. A script that invents names must not fill a disk."""


class ProcessState(Process):
    """One process of the job, with its reports since its start. `reported` is in seconds since the epoch."""

    def __init__(self, role: str, rank: int | None) -> None:
        super().__init__(role, rank)
        self._forget()

    def _forget(self) -> None:
        self.reported: float | None = None
        self.step: int | None = None
        self.samples: int | None = None
        self.rate: float | None = None
        self.loss: float | None = None
        self.activity: tuple[str, float | None, float | None] | None = None
        self.values: dict[str, float] = {}
        self.server: dict[str, float] = {}
        self.tables: dict[str, dict[str, float]] = {}

    def start(self, line: Fields) -> None:
        """Start a new process. Reports of its predecessor no longer count."""
        super().start(line)
        self._forget()

    def end(self, line: Fields) -> None:
        super().end(line)
        self.rate = self.activity = None

    def report(self, line: Line, time: float) -> None:
        """Handle a report. Fields that are missing in the report keep their values."""
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
    """Return the known values, and as many new ones as the limit allows."""
    room = MOST_NAMES - len(known)
    new = [name for name in values if name not in known]
    refused = set(new[max(0, room) :])
    return {name: value for name, value in values.items() if name not in refused}


def ranked(ready: Fields) -> list[Document]:
    """Return the processes of the event `ready`, without the pre-hook."""
    return [each for each in ready["containers"] if each["rank"] is not None]


class Job(State):
    """The state of this node's part of the job, with reports and counts of events."""

    process = ProcessState
    processes: dict[str, ProcessState]  # type: ignore[assignment]  # they are all made by `process`

    def __init__(self) -> None:
        super().__init__()
        self.facts: dict[str, str] = {}
        self.started: float | None = None
        self.spent: dict[str, float] = {}
        """Seconds of the job by kind."""
        self.failures = self.restarts = self.hangs = 0

    def take(self, line: Line, now: float) -> None:
        """Handle a message. Raises KeyError, TypeError or ValueError for a line that the launcher did not
        send.
        """
        kind = line["is"]
        if kind == "begin":
            self.facts, self.started = line["facts"], now
        elif kind == "report" and line["container"] in self.processes:
            self.processes[line["container"]].report(line, now)
        elif kind == "spent":
            self.spent = line["seconds"]
        elif kind == "event":
            self.handle(line)

    def on_ready(self, line: Fields) -> None:
        super().on_ready({**line, "containers": ranked(line)})

    def on_failed(self, line: Fields) -> None:
        super().on_failed(line)
        self.failures += 1
        self.restarts += bool(line["restart"])

    def on_hung(self, line: Fields) -> None:
        super().on_hung(line)
        self.hangs += 1
