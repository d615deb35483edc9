"""The data of a plot, read from the event log of a job.

The data covers loss and speed of each process, named values and tables, running times of processes, and
events of the job. Curves are thinned for drawing. The event log is not trusted, so every value is checked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fleetrun.frozen import frozen
from fleetrun.record import history
from fleetrun.record.goodput import Event, Goodput, Span
from fleetrun.record.journal import objects_in

RoleAndRank = tuple[str, int]
"""Role and rank."""

_ROLES = {"ps": "server"}  # names in messages
_OF_TABLES = {
    "rows": "rows",
    "pulled_keys_s": "keys pulled per second",
}
_LONGEST = 40  # characters of a name
_LARGEST = 1e30  # larger values count as infinite
_MOST_RANKS = 1 << 16
_SPARED = 3  # fewest reports of an attempt, without its last report, that show a pace
_OLDEST = 3600.0  # seconds; larger ages are not believed
_FARTHEST = 1e11  # seconds since the epoch; later times are invalid


class Fate(StrEnum):
    """The end of a process, or its state if it has not ended."""

    OK = "completed"
    FAILED = "failed"
    STOPPED = "stopped by fleetrun"
    RUNNING = "running"
    UNKNOWN = "end not known"


@frozen
class Life:
    """One attempt of a process. Times are in seconds since the epoch."""

    begin: float
    end: float
    fate: Fate
    attempt: int = 0
    how: str = ""


@dataclass(slots=True)
class Curve:
    """The reports of one process. A point of NaN between two attempts breaks the line."""

    role: str
    rank: int
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    paces: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    broken: list[float] = field(default_factory=list)
    """Times at which the process reported a loss of NaN or infinity. `losses` has NaN there."""

    @property
    def title(self) -> str:
        return f"{_ROLES.get(self.role, self.role)} {self.rank}"

    def point(self, time: float, loss: float, pace: float, step: float) -> None:
        if self.times:
            if step == self.steps[-1] and (loss == self.losses[-1] or math.isnan(loss)):
                return  # repeats the last report, as an activity or at the end
            time = max(time, self.times[-1])
        if self._first_of_attempt and math.isnan(self.paces[-1]):
            self.paces[-1] = pace  # unknown at the first report, so the first pace since then is used
        self.times.append(time)
        self.losses.append(loss if abs(loss) < _LARGEST else math.nan)
        self.paces.append(pace)
        self.steps.append(step)

    @property
    def blanks(self) -> list[bool]:
        """True for points that only break the line."""
        return [self._blank(at) for at in range(len(self.times))]

    @property
    def _first_of_attempt(self) -> bool:
        return bool(self.times) and not self._blank(-1) and (len(self.times) == 1 or self._blank(-2))

    def _blank(self, at: int) -> bool:
        return math.isnan(self.losses[at]) and math.isnan(self.paces[at]) and math.isnan(self.steps[at])

    def gap(self, time: float) -> None:
        """Break the line at this time, unless it is already broken."""
        if self.times and not self._blank(-1):
            self.point(time, math.nan, math.nan, math.nan)

    def ended(self) -> None:
        """Handle the end of the process.

        Its last report may come long after its last step, so its pace is dropped if other reports exist.
        """
        if len(self.times) > _SPARED and not any(self._blank(-1 - back) for back in range(_SPARED)):
            self.paces[-1] = self.steps[-1] = math.nan


@dataclass(slots=True)
class Series:
    """A named value over time, or a number of a table. NaN breaks the line."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def point(self, time: float, value: float) -> None:
        self.times.append(time)
        self.values.append(value)

    def gap(self, time: float) -> None:
        """Break the line at this time, unless it is already broken."""
        if self.values and not math.isnan(self.values[-1]):
            self.point(time, math.nan)

    @property
    def last(self) -> float:
        """The newest number. NaN if none exists."""
        return next((value for value in reversed(self.values) if not math.isnan(value)), math.nan)


@dataclass(slots=True)
class Course:
    """One run."""

    begin: float
    end: float
    curves: dict[RoleAndRank, Curve] = field(default_factory=dict)
    lives: dict[str, list[Life]] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    restarts: list[float] = field(default_factory=list)
    """In seconds since the epoch."""
    hangs: list[float] = field(default_factory=list)
    """In seconds since the epoch."""
    late: list[tuple[float, dict[int, float]]] = field(default_factory=list)
    """Times, with the share of the minute before in which others waited for each rank. Missing ranks: 0."""
    spans: list[Span] = field(default_factory=list)
    """The use of the time."""
    values: dict[str, dict[RoleAndRank, Series]] = field(default_factory=dict)
    """By the name of the value, then by process."""
    tables: dict[str, dict[str, Series]] = field(default_factory=dict)
    """By a title for readers, then by table, summed over all servers."""
    code: int | None = None
    """The exit code. None: unknown."""
    reason: str = ""

    @property
    def paced(self) -> bool:
        """True if any process counted samples."""
        return any(not math.isnan(pace) for each in self.curves.values() for pace in each.paces)

    @property
    def lossy(self) -> bool:
        """True if any process reported a loss, even if only NaN."""
        return any(
            each.broken or any(not math.isnan(loss) for loss in each.losses) for each in self.curves.values()
        )


def course(
    events: Iterable[Event], now: float | None = None, others: Sequence[Iterable[Event]] = ()
) -> Course:
    """Build the course from the events of a job.

    `now` is given while the job runs, and running processes last until then. `others`: the event logs of the
    job's other nodes. Only their processes count, not their events of the job.
    """
    reader = _Reader()
    for event in events:
        at = _number(event.get("time"))
        if 0 <= at < _FARTHEST:
            reader.take(event, at)
    for number, more in enumerate(others):
        for event in more:
            at = _number(event.get("time"))
            if 0 <= at < _FARTHEST:
                reader.take_other(event, at, number)
    return reader.end(now)


class _Reader:
    def __init__(self) -> None:
        self.course = Course(math.inf, -math.inf)
        self._open: dict[str, tuple[float, int]] = {}
        self._goodput = Goodput()
        self._of_servers: dict[tuple[str, str], dict[RoleAndRank, float]] = {}

    def _reach(self, at: float) -> None:
        self.course.begin = min(self.course.begin, at)
        self.course.end = max(self.course.end, at)

    def take(self, event: Event, at: float) -> None:
        self._reach(at)
        self._goodput.take(event)
        handler = _HANDLERS.get(str(event.get("event")))
        if handler is not None:
            handler(self, event, at)

    def take_other(self, event: Event, at: float, number: int) -> None:
        """Take an event of another node, whose processes have the same names."""
        handler = _OF_PROCESSES.get(str(event.get("event")))
        if handler is None:
            return
        self._reach(at)
        listed = objects_in(event, "containers")
        apart = {
            "containers": [{**each, "name": f"{each.get('name')}@{number}"} for each in listed],
            "container": f"{event.get('container')}@{number}",
        }
        handler(self, {**event, **apart, "event": "launch" if listed else event["event"]}, at)

    def end(self, now: float | None) -> Course:
        course = self.course
        if math.isinf(course.begin):
            course.begin = course.end = now or 0.0
        if now is not None:
            course.end = max(course.end, now)
        course.spans = self._goodput.spans(now)
        fate = Fate.UNKNOWN if now is None else Fate.RUNNING
        for name, (begin, attempt) in self._open.items():
            self._lived(name, Life(begin, max(begin, course.end), fate, attempt))
        order = {name: number for number, name in enumerate(course.titles)}
        course.lives = dict(sorted(course.lives.items(), key=lambda each: order.get(each[0], -1)))
        return course

    def containers(self, event: Event, at: float) -> None:
        """Take the processes of a `launch` or `ready` event, which lists servers first."""
        for each in objects_in(event, "containers"):
            if isinstance(each.get("name"), str):
                role, rank = str(each.get("role")), each.get("rank")
                title = f"{_ROLES.get(role, role)} {rank}" if isinstance(rank, int) else each["name"]
                self.course.titles[each["name"]] = "".join(filter(str.isprintable, title))[:_LONGEST]
        if event["event"] == "ready" and _whole(event.get("attempt")):
            self.course.restarts.append(at)

    def started(self, event: Event, at: float) -> None:
        name = str(event.get("container"))
        if name in self._open:
            self._close(name, at, Fate.UNKNOWN, "")
        self._open[name] = (at, _whole(event.get("attempt")))
        key = self._key(event)
        if key in self.course.curves:
            self.course.curves[key].gap(at)
        for series in self.course.values.values():
            if key in series:
                series[key].gap(at)

    def exited(self, event: Event, at: float) -> None:
        code = event.get("code")
        asked = event.get("asked") is not None
        fate = Fate.OK if code == 0 else Fate.STOPPED if asked else Fate.FAILED
        key = self._key(event)
        if key in self.course.curves:
            self.course.curves[key].ended()
        self._close(str(event.get("container")), at, fate, str(event.get("how") or ""))

    def restarting(self, event: Event, at: float) -> None:
        self.course.restarts.append(at)

    def hung(self, event: Event, at: float) -> None:
        self.course.hangs.append(at)

    def lateness(self, event: Event, at: float) -> None:
        shares = {
            rank: _positive(each.get("share"))
            for each in objects_in(event, "late")
            if isinstance(rank := each.get("rank"), int) and 0 <= rank < _MOST_RANKS
        }
        self.course.late.append(
            (at, {rank: min(share, 1.0) for rank, share in shares.items() if share == share})
        )

    def over(self, event: Event, at: float) -> None:
        code = event.get("code")
        self.course.code = code if isinstance(code, int) else None
        self.course.reason = str(event.get("reason") or "")

    def progress(self, event: Event, at: float) -> None:
        key = self._key(event)
        if key is None:
            return
        age = _positive(event.get("age"))
        # time of the report, which is earlier than the time of the event
        at -= 0.0 if math.isnan(age) else min(age, _OLDEST)
        self._take_values(key, event, at)
        self._take_tables(key, event, at)
        if not any(event.get(name) is not None for name in ("step", "samples", "loss", "rate")):
            return
        curve = self.course.curves.setdefault(key, Curve(*key))
        loss = _number(event.get("loss"))
        curve.point(at, loss, _positive(event.get("rate")), _positive(event.get("step")))
        if event.get("loss") is not None and not abs(loss) < _LARGEST:
            curve.broken.append(at)

    def _take_values(self, key: RoleAndRank, event: Event, at: float) -> None:
        values = event.get("values")
        for name, value in values.items() if isinstance(values, dict) else ():
            number = _number(value)
            number = number if abs(number) < _LARGEST else math.nan
            self.course.values.setdefault(name, {}).setdefault(key, Series()).point(at, number)

    def _take_tables(self, key: RoleAndRank, event: Event, at: float) -> None:
        """Take the numbers of tables. A table's number is the sum of the newest values of all servers."""
        tables = event.get("tables")
        for table, numbers in tables.items() if isinstance(tables, dict) else ():
            for what, title in _OF_TABLES.items():
                number = _positive(numbers.get(what)) if isinstance(numbers, dict) else math.nan
                if math.isnan(number):
                    continue
                said = self._of_servers.setdefault((what, table), {})
                said[key] = number
                self.course.tables.setdefault(title, {}).setdefault(table, Series()).point(
                    at, math.fsum(said.values())
                )

    def _key(self, event: Event) -> RoleAndRank | None:
        """Return role and rank. The number in a name such as `trainer.0` is only the index on its node."""
        role, rank = str(event.get("container")).rpartition(".")[0], event.get("rank")
        return (role, rank) if role and isinstance(rank, int) else None

    def _close(self, name: str, at: float, fate: Fate, how: str) -> None:
        begun = self._open.pop(name, None)
        if begun is not None:
            self._lived(name, Life(begun[0], max(begun[0], at), fate, begun[1], how))

    def _lived(self, name: str, life: Life) -> None:
        self.course.lives.setdefault(name, []).append(life)


_HANDLERS = {
    "launch": _Reader.containers,
    "ready": _Reader.containers,
    "started": _Reader.started,
    "exited": _Reader.exited,
    "restarting": _Reader.restarting,
    "hung": _Reader.hung,
    "lateness": _Reader.lateness,
    "over": _Reader.over,
    "progress": _Reader.progress,
}


_OF_PROCESSES = {name: _HANDLERS[name] for name in ("launch", "ready", "started", "exited", "progress")}


def _number(value: object) -> float:
    """Convert to a number. NaN if the value is not a number."""
    found = history.number(value)
    return math.nan if found is None else found


def _positive(value: object) -> float:
    number = _number(value)
    return number if 0 <= number < _LARGEST else math.nan


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


# ---- Long curves are thinned, and many curves are summarized by their median.

_FEW = 12  # points of a curve
_SHORTEST = 0.5  # seconds, the shortest span of a pace


def thinned(curve: Curve, most: int) -> Curve:
    """Reduce a curve to about `most` points, each the mean of its neighbours. Gaps stay."""
    if len(curve.times) <= most:
        return curve
    times, losses, paces, steps = _thinned(most, curve.times, curve.losses, curve.paces, curve.steps)
    return Curve(curve.role, curve.rank, times, losses, paces, steps, curve.broken)


def thinned_series(series: Series, most: int) -> Series:
    """Reduce a series to about `most` points, as `thinned`."""
    return Series(*_thinned(most, series.times, series.values))


def _thinned(most: int, times: list[float], *columns: list[float]) -> list[list[float]]:
    stride = max(1, math.ceil(len(times) / most))
    thin: list[list[float]] = [[], *([] for _ in columns)]
    for start in range(0, len(times), stride):
        piece = slice(start, start + stride)
        rows = zip(*(column[piece] for column in columns), strict=True)
        if start and any(all(map(math.isnan, row)) for row in rows):
            for column, value in zip(thin, (times[start], *(math.nan for _ in columns)), strict=True):
                column.append(value)
        for column, values in zip(thin, (times, *columns), strict=True):
            column.append(_mean(values[piece]))
    return thin


def middle(
    curves: Sequence[Curve | Series], values: Sequence[Sequence[float]], bins: int
) -> tuple[list[float], list[float]]:
    """Compute the median curve. Each of `bins` equal spans has the mean time of its points, and the median of
    the curves' means.

    The value is NaN if fewer than half of the curves have a value in the span.
    """
    times = [time for curve in curves for time in curve.times]
    if not times:
        return [], []
    begin, span = min(times), (max(times) - min(times)) / bins or 1.0
    cells: list[dict[int, list[float]]] = [{} for _ in range(bins + 1)]
    when: list[list[float]] = [[] for _ in range(bins + 1)]
    for number, (curve, ys) in enumerate(zip(curves, values, strict=True)):
        for time, y in zip(curve.times, ys, strict=True):
            if not math.isnan(y):
                cells[int((time - begin) / span)].setdefault(number, []).append(y)
                when[int((time - begin) / span)].append(time)
    known = [[_mean(ys) for ys in cell.values()] for cell in cells]
    return (
        [_mean(at) if at else begin + (number + 0.5) * span for number, at in enumerate(when)],
        [median(each) if len(each) > len(curves) / 2 else math.nan for each in known],
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(value / len(known) for value in known) if known else math.nan


def median(values: Sequence[float]) -> float:
    """Return the median without NaN. NaN if there is no number."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


def lonely(values: Sequence[float]) -> list[int]:
    """Return the indices of points to draw as dots.

    These points are between two gaps, so no line shows them. If there are only few points, return all.
    """
    there = [False, *(not math.isnan(value) for value in values), False]
    few = sum(there) < _FEW
    return [
        at - 1
        for at in range(1, len(there) - 1)
        if there[at] and (few or not (there[at - 1] or there[at + 1]))
    ]


def pace_of_steps(curve: Curve) -> Series:
    """Compute steps per second between reports of new steps that are at least half a second apart."""
    paces, since = Series(), None
    for time, step, blank in zip(curve.times, curve.steps, curve.blanks, strict=True):
        if blank or (since is not None and step < since[1]):
            paces.gap(time)
            since = None if blank else (time, step)
        elif since is None and not math.isnan(step):
            since = (time, step)
        elif since is not None and step > since[1] and time - since[0] >= _SHORTEST:
            paces.point(time, (step - since[1]) / (time - since[0]))
            since = (time, step)
    return paces


def known_paces(curve: Curve) -> Series:
    """Return the samples per second that the process reported, without reports that lack them."""
    paces = Series()
    for time, pace, blank in zip(curve.times, curve.paces, curve.blanks, strict=True):
        if blank:
            paces.gap(time)
        elif not math.isnan(pace):
            paces.point(time, pace)
    return paces
