"""Measure goodput: the part of a job's time that went into steps that count, and the causes of all other
time.

This module is pure: it reads events of the event log and returns seconds by kind. The results are the same
during a job and long after it.

The module follows the first trainer of this node, because all trainers share its steps:

    launch     started      joining  joined    first step                    it ends     too few  started
      | waiting, | imports    | ren-   | set-up    | steps, done again,        | restart | waiting |
      | start-up |            | dezvous|           | checkpoints, a hang       |         |         |

All time between two reports belongs to the steps between them. If an earlier attempt had already made these
steps, they are done again. Work of the script between steps (data, evaluation) is therefore part of the
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple

from fleetrun.aliases import Document, Fields
from fleetrun.decoding import number_in, whole_in
from fleetrun.record.journal import objects_in

Event = Fields
_STALL = 10.0
_UNUSUAL = 20.0
"""A job makes no progress if it makes no step for this many seconds, and this many times its longest step."""


class Kind(StrEnum):
    """The use of a span of time."""

    STEPS = "steps"
    WAITING = "waiting for nodes"
    START = "start-up"
    IMPORTS = "imports"
    RENDEZVOUS = "rendezvous"
    SETUP = "set-up"
    CHECKPOINTS = "checkpoints"
    AGAIN = "steps done again"
    HANGS = "hangs"
    STALL = "no progress"
    RESTARTS = "restarts"
    END = "after the last step"


class Span(NamedTuple):
    """A span of time of one kind. Times are in seconds since the epoch."""

    kind: Kind
    begin: float
    end: float


class Goodput:
    """The goodput of one launch. `best` is the last step of earlier launches of the same training."""

    def __init__(self, best: int | None = None) -> None:
        self.best = best
        """The last step of all attempts."""
        self._spans: list[Span] = []
        self._seconds: dict[Kind, float] = {}
        self._kind = Kind.START
        self._since = math.inf
        """The end of the time that the ledger has. Infinite until the first event."""
        self._followed: str | None = None
        self._step: int | None = None
        """The last step of the attempt."""
        self._saves: list[tuple[float, float]] = []
        """The end and the seconds of each save since the end of the ledger."""
        self._longest = 0.0
        """The longest time between two steps."""
        self._stops = False
        """True if no process starts again."""
        self._over = False

    def take(self, event: Event) -> None:
        """Handle the next event of the log. Damaged or unknown lines are skipped."""
        time = number_in(event.get("time"))
        name = event.get("event")
        if time is None or self._over:
            return
        if math.isinf(self._since):
            self._since = time
        if name == "launch":
            self._kind = Kind.WAITING if _several(event.get("nnodes")) else Kind.START
        elif name == "ready":
            self._ready(event, time)
        elif name == "node" and event.get("present") is not None:
            self._until(time, self._kind)
            self._kind = Kind.WAITING
        elif name == "hung":
            self._until(time, Kind.HANGS)
            self._stops = event.get("restart") is False
            self._kind = Kind.END if self._stops else Kind.RESTARTS
        elif name in ("ending", "paused"):
            kind = self._now(time)
            self._until(time, Kind.END if kind is Kind.STEPS else kind)
            self._kind, self._stops = Kind.END, True
        elif name == "over":
            self._until(time, Kind.END if self._kind is Kind.STEPS else self._kind)
            self._over = True
        elif event.get("container") == self._followed and self._followed is not None:
            self._of_followed(str(name), event, time)

    def _ready(self, event: Event, time: float) -> None:
        named = objects_in(event, "containers")
        trainers = (str(each.get("name")) for each in named if each.get("role") == "trainer")
        self._followed = next(trainers, None)
        self._until(time, self._kind)
        self._stops = False

    def _of_followed(self, name: str, event: Event, time: float) -> None:
        if name == "started":
            self._until(time, self._kind)
            self._kind, self._step, self._saves = Kind.START, None, []
        elif name == "joined":
            begin, end = number_in(event.get("joining")), number_in(event.get("joined"))
            if begin is not None and end is not None and self._kind is Kind.START:
                self._until(min(begin, time), Kind.IMPORTS)
                self._until(min(end, time), Kind.RENDEZVOUS)
                self._kind = Kind.SETUP
        elif name == "progress":
            step = whole_in(event.get("step"))
            if step is not None:
                self._stepped(step, time - (number_in(event.get("age")) or 0.0))
        elif name == "activity" and self._kind is Kind.STEPS and _saves(event.get("what")):
            self._saves.append((time, number_in(event.get("seconds")) or 0.0))
        elif name == "exited":
            by_itself = event.get("asked") is None  # a process that stops for a restart may also exit with 0
            ends = self._stops or (event.get("code") == 0 and by_itself)
            after = Kind.END if ends else Kind.RESTARTS
            if self._kind is Kind.STEPS:
                self._until_saved(time)
            self._until(time, after if self._kind is Kind.STEPS else self._kind)
            self._kind = after

    def _stepped(self, step: int, time: float) -> None:
        """Record that the attempt has reached at least this step."""
        if self._step is None:
            self._until(time, self._kind)
        elif step > self._step:
            self._until_saved(time)
            seconds = max(0.0, time - self._since)
            self._longest = max(self._longest, seconds)
            known = self._step if self.best is None else max(self._step, self.best)
            new = max(0, step - known) / (step - self._step)
            self._until(self._since + seconds * (1 - new), Kind.AGAIN)
            self._until(time, Kind.STEPS)
        else:
            return
        self._kind, self._step = Kind.STEPS, step
        self.best = step if self.best is None else max(self.best, step)

    def _until_saved(self, time: float) -> None:
        """Add the saves that ended by `time` to the ledger first."""
        saved = sum(seconds for over, seconds in self._saves if over <= time)
        self._saves = [each for each in self._saves if each[0] > time]
        if saved:
            self._until(min(time, self._since + saved), Kind.CHECKPOINTS)

    def _until(self, time: float, kind: Kind) -> None:
        if time <= self._since:
            return
        if self._spans and self._spans[-1].kind is kind:
            self._spans[-1] = self._spans[-1]._replace(end=time)
        else:
            self._spans.append(Span(kind, self._since, time))
        self._seconds[kind] = self._seconds.get(kind, 0.0) + time - self._since
        self._since = time

    def _now(self, time: float) -> Kind:
        """Return the kind of the time since the last entry of the ledger."""
        stalls = time - self._since > max(_STALL, _UNUSUAL * self._longest)
        return Kind.STALL if stalls and self._kind is Kind.STEPS else self._kind

    # ---- the results

    def spans(self, now: float | None = None) -> list[Span]:
        """Return the spans in order. The last span continues until `now`, if the job runs."""
        return self._spans + self._unfinished(now)

    def seconds(self, now: float | None = None) -> dict[Kind, float]:
        """Return the seconds by kind, in the order of `Kind`."""
        found = dict(self._seconds)
        for kind, begin, end in self._unfinished(now):
            found[kind] = found.get(kind, 0.0) + end - begin
        return {kind: found[kind] for kind in Kind if kind in found}

    def _unfinished(self, now: float | None) -> list[Span]:
        """Return the span from the end of the ledger until `now`, if the job runs."""
        if now is None or self._over or now <= self._since:
            return []
        return [Span(self._now(now), self._since, now)]


def share(seconds: Mapping[Kind, float]) -> float | None:
    """Return the part of the time that went into steps that count, or None without a reported step."""
    whole = sum(seconds.values())
    return seconds[Kind.STEPS] / whole if whole > 0 and seconds.get(Kind.STEPS) else None


def goodput_fields(seconds: Mapping[Kind, float]) -> Document:
    """Return the goodput as fields for another program."""
    part = share(seconds)
    return {
        "share": None if part is None else round(part, 4),
        "seconds": {str(kind): round(time, 3) for kind, time in seconds.items()},
    }


def read_fields(fields: object) -> dict[Kind, float]:
    """Read the seconds of `goodput_fields`. Kinds of a later version are ignored."""
    given = fields.get("seconds") if isinstance(fields, Mapping) else None
    found = given if isinstance(given, Mapping) else {}
    numbers = {kind: number_in(found.get(str(kind))) for kind in Kind}
    return {kind: time for kind, time in numbers.items() if time is not None}


def sentence(seconds: Mapping[Kind, float], describe: Callable[[float], str]) -> str:
    """Return `97.1 %; lost: 41 s imports, 12 s steps done again`, or an empty text without a reported step.

    `describe` formats a duration. Kinds with less than a second, or less than a hundredth of all time, are
    omitted.
    """
    part, whole = share(seconds), sum(seconds.values())
    if part is None:
        return ""
    lost = sorted(((time, kind) for kind, time in seconds.items() if kind is not Kind.STEPS), reverse=True)
    losses = ", ".join(f"{describe(time)} {kind}" for time, kind in lost if time >= min(1.0, 0.01 * whole))
    return f"{100 * part:.1f} %{f'; lost: {losses}' if losses else ''}"


def _several(nnodes: object) -> bool:
    return isinstance(nnodes, list) and bool(nnodes) and nnodes[-1] != 1


def _saves(what: object) -> bool:
    return isinstance(what, str) and what.startswith(("saving", "waiting for the checkpoint"))
