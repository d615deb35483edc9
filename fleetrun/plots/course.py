"""What a plot of a job shows, from its record: loss and speed of each process, thinned for drawing, the life
of each process, and what happened to the job. Pure: events in, values out; every value is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# ---- From the record of a launch to what a picture of it shows: the course of each process's loss and pace,
# the lives of all processes, and what befell the job. Pure: events in, values out; whatever they say is
# checked.

Event = Mapping[str, Any]
Who = tuple[str, int]
"""Role and rank."""

_ROLES = {"ps": "server"}  # as messages call them
_LONGEST = 40  # characters of a name
_LARGEST = 1e30  # what is larger is as good as infinite, and no axis has room for it
_FARTHEST = 1e11  # seconds since the epoch: what is later is no time


class Fate(StrEnum):
    """How a process ended, or that it has not."""

    OK = "ended well"
    FAILED = "failed"
    STOPPED = "stopped by fleetrun"
    RUNNING = "runs"
    UNKNOWN = "end not known"


@dataclass(frozen=True, slots=True)
class Life:
    """One attempt of a process. Times are seconds since the epoch."""

    begin: float
    end: float
    fate: Fate
    attempt: int = 0
    how: str = ""


@dataclass(slots=True)
class Curve:
    """What one process reported. Where an attempt ends a point is NaN, so that a line breaks there.

    `losses` may be NaN or infinite where the process said so: those times are in `broken`.
    """

    role: str
    rank: int
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    broken: list[float] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{_ROLES.get(self.role, self.role)} {self.rank}"

    def point(self, time: float, loss: float, pace: float, step: float) -> None:
        if self._first_of_attempt and math.isnan(self.paces[-1]):
            self.paces[-1] = pace  # nothing could be said of it then: it is the pace since
        self.times.append(time)
        self.losses.append(loss if abs(loss) < _LARGEST else math.nan)
        self.paces.append(pace)
        self.steps.append(step)

    @property
    def _first_of_attempt(self) -> bool:
        return bool(self.times) and not self._blank(-1) and (len(self.times) == 1 or self._blank(-2))

    def _blank(self, at: int) -> bool:
        return math.isnan(self.losses[at]) and math.isnan(self.paces[at]) and math.isnan(self.steps[at])

    def gap(self, time: float) -> None:
        if self.times and not self._blank(-1):
            self.point(time, math.nan, math.nan, math.nan)


@dataclass(slots=True)
class Course:
    """All of one launch. `restarts` and `hangs` are times, `code` is the exit code, where one is known."""

    begin: float
    end: float
    curves: dict[Who, Curve] = field(default_factory=dict)
    lives: dict[str, list[Life]] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    restarts: list[float] = field(default_factory=list)
    hangs: list[float] = field(default_factory=list)
    code: int | None = None
    reason: str = ""

    @property
    def paced(self) -> bool:
        """Whether anybody counted samples."""
        return any(not math.isnan(pace) for each in self.curves.values() for pace in each.paces)

    @property
    def lossy(self) -> bool:
        """Whether anybody reported a loss, a broken one included."""
        return any(
            each.broken or any(not math.isnan(loss) for loss in each.losses) for each in self.curves.values()
        )


def course(events: Iterable[Event], now: float | None = None) -> Course:
    """`now` is given while the job runs: what has not ended lasts until then."""
    reader = _Reader()
    for event in events:
        moment = _number(event.get("time"))
        if 0 <= moment < _FARTHEST:
            reader.take(event, moment)
    return reader.end(now)


class _Reader:
    def __init__(self) -> None:
        self.course = Course(math.inf, -math.inf)
        self._open: dict[str, tuple[float, int]] = {}

    def take(self, event: Event, moment: float) -> None:
        self.course.begin = min(self.course.begin, moment)
        self.course.end = max(self.course.end, moment)
        handler = _HANDLERS.get(str(event.get("event")))
        if handler is not None:
            handler(self, event, moment)

    def end(self, now: float | None) -> Course:
        course = self.course
        if math.isinf(course.begin):
            course.begin = course.end = now or 0.0
        if now is not None:
            course.end = max(course.end, now)
        fate = Fate.UNKNOWN if now is None else Fate.RUNNING
        for name, (begin, attempt) in self._open.items():
            self._lived(name, Life(begin, max(begin, course.end), fate, attempt))
        order = {name: number for number, name in enumerate(course.titles)}
        course.lives = dict(sorted(course.lives.items(), key=lambda each: order.get(each[0], -1)))
        return course

    def containers(self, event: Event, moment: float) -> None:
        """Of `launch` and `ready`: who there is, servers first."""
        said = event.get("containers")
        for each in said if isinstance(said, list) else ():
            if isinstance(each, dict) and isinstance(each.get("name"), str):
                role, rank = str(each.get("role")), each.get("rank")
                title = f"{_ROLES.get(role, role)} {rank}" if isinstance(rank, int) else each["name"]
                self.course.titles[each["name"]] = "".join(filter(str.isprintable, title))[:_LONGEST]
        if event["event"] == "ready" and _whole(event.get("attempt")):
            self.course.restarts.append(moment)

    def started(self, event: Event, moment: float) -> None:
        name = str(event.get("container"))
        if name in self._open:
            self._close(name, moment, Fate.UNKNOWN, "")
        self._open[name] = (moment, _whole(event.get("attempt")))
        who = self._who(event)
        if who in self.course.curves:
            self.course.curves[who].gap(moment)

    def exited(self, event: Event, moment: float) -> None:
        code = event.get("code")
        asked = event.get("asked") is not None
        fate = Fate.OK if code == 0 else Fate.STOPPED if asked else Fate.FAILED
        self._close(str(event.get("container")), moment, fate, str(event.get("how") or ""))

    def restarting(self, event: Event, moment: float) -> None:
        self.course.restarts.append(moment)

    def hung(self, event: Event, moment: float) -> None:
        self.course.hangs.append(moment)

    def over(self, event: Event, moment: float) -> None:
        code = event.get("code")
        self.course.code = code if isinstance(code, int) else None
        self.course.reason = str(event.get("reason") or "")

    def progress(self, event: Event, moment: float) -> None:
        who = self._who(event)
        if who is None:
            return
        curve = self.course.curves.setdefault(who, Curve(*who))
        loss = _number(event.get("loss"))
        curve.point(moment, loss, _positive(event.get("rate")), _positive(event.get("step")))
        if event.get("loss") is not None and not abs(loss) < _LARGEST:
            curve.broken.append(moment)

    def _who(self, event: Event) -> Who | None:
        """`trainer.0` is its name on this node, its rank stands beside."""
        role, rank = str(event.get("container")).rpartition(".")[0], event.get("rank")
        return (role, rank) if role and isinstance(rank, int) else None

    def _close(self, name: str, moment: float, fate: Fate, how: str) -> None:
        begun = self._open.pop(name, None)
        if begun is not None:
            self._lived(name, Life(begun[0], max(begun[0], moment), fate, begun[1], how))

    def _lived(self, name: str, life: Life) -> None:
        self.course.lives.setdefault(name, []).append(life)


_HANDLERS = {
    "launch": _Reader.containers,
    "ready": _Reader.containers,
    "started": _Reader.started,
    "exited": _Reader.exited,
    "restarting": _Reader.restarting,
    "hung": _Reader.hung,
    "over": _Reader.over,
    "progress": _Reader.progress,
}


def _number(said: object) -> float:
    """NaN for what is none."""
    if isinstance(said, bool) or not isinstance(said, int | float | str):
        return math.nan
    try:
        return float(said)
    except (ValueError, OverflowError):
        return math.nan


def _positive(said: object) -> float:
    number = _number(said)
    return number if 0 <= number < _LARGEST else math.nan


def _whole(said: object) -> int:
    return said if isinstance(said, int) and said >= 0 else 0


# ---- Curves of many points and of many processes, made fit for a picture: thinned, and summed up in their
# median. Pure.

_FEW = 12  # points of a curve


def thinned(curve: Curve, most: int) -> Curve:
    """A curve of about `most` points at most: the mean of neighbours. Gaps stay."""
    stride = math.ceil(len(curve.times) / most)
    if stride < 2:
        return curve
    thin = Curve(curve.role, curve.rank, broken=curve.broken)
    for start in range(0, len(curve.times), stride):
        piece = slice(start, start + stride)
        if any(map(_is_gap, curve.losses[piece], curve.paces[piece], curve.steps[piece])):
            thin.gap(curve.times[start])
        means = (_mean(each[piece]) for each in (curve.times, curve.losses, curve.paces, curve.steps))
        thin.point(*means)
    return thin


def middle(
    curves: Sequence[Curve], values: Sequence[Sequence[float]], bins: int
) -> tuple[list[float], list[float]]:
    """Times, and the median over curves of their means within each of so many equal spans of time; NaN where
    fewer than half of them have any.
    """
    times = [time for curve in curves for time in curve.times]
    if not times:
        return [], []
    begin, span = min(times), (max(times) - min(times)) / bins or 1.0
    cells: list[dict[int, list[float]]] = [{} for _ in range(bins + 1)]
    for number, (curve, ys) in enumerate(zip(curves, values, strict=True)):
        for time, y in zip(curve.times, ys, strict=True):
            if not math.isnan(y):
                cells[int((time - begin) / span)].setdefault(number, []).append(y)
    known = [[_mean(ys) for ys in cell.values()] for cell in cells]
    return (
        [begin + (number + 0.5) * span for number in range(len(cells))],
        [median(each) if len(each) > len(curves) / 2 else math.nan for each in known],
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(value / len(known) for value in known) if known else math.nan


def median(values: Sequence[float]) -> float:
    """Of those that are numbers; NaN of none."""
    ordered = sorted(value for value in values if not math.isnan(value))
    if not ordered:
        return math.nan
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def lonely(values: Sequence[float]) -> list[int]:
    """Where the points are that no line would show: between two gaps. All of them, where they are few."""
    there = [False, *(not math.isnan(value) for value in values), False]
    few = sum(there) < _FEW
    return [
        at - 1
        for at in range(1, len(there) - 1)
        if there[at] and (few or not (there[at - 1] or there[at + 1]))
    ]


def pace_of_steps(curve: Curve) -> list[float]:
    """Steps per second between a point and the one before it; NaN where that cannot be told."""
    paces = [math.nan]
    for number in range(1, len(curve.times)):
        steps = curve.steps[number] - curve.steps[number - 1]
        seconds = curve.times[number] - curve.times[number - 1]
        paces.append(steps / seconds if steps >= 0 and seconds > 0 else math.nan)
    return paces


def _is_gap(loss: float, pace: float, step: float) -> bool:
    return math.isnan(loss) and math.isnan(pace) and math.isnan(step)
