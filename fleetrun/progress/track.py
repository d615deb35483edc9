"""The launcher's memory of one process's progress.

It holds the latest report and the rate, and decides when a report is worth a line in the event log. It is
independent of sockets, and time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from fleetrun.aliases import Document, Numbers
from fleetrun.envs.channels import MOST_TABLES, MOST_VALUES
from fleetrun.envs.progress_report import Report
from fleetrun.values import replace

WINDOW = 10.0  # seconds over which the rate is measured
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_PAUSES = 60
"""The pause between two lines of a process in the event log is a 60th of its age, within these bounds in
seconds. A long job then does not fill a disk, and a plot of a short job has enough points.
"""
_POINTS = 128
_TABLES_IN_RECORD = 50
_OF_TABLES = ("rows", "pulled_keys_s")


Tables = Mapping[str, Numbers]


class _Point(NamedTuple):
    """The samples or steps counted at one time, on the launcher's and the process's clock (None if
    unknown).
    """

    received: float
    sent: float | None
    counted: int


class Track:
    """The progress of one process since its start."""

    def __init__(self) -> None:
        self.latest: Report | None = None
        self._points: deque[_Point] = deque(maxlen=_POINTS)
        self._steps: deque[_Point] = deque(maxlen=_POINTS)
        self._began: _Point | None = None
        self._stepped: tuple[float, int] | None = None
        """Time and number of the first reported step."""
        self._first = self._moved = 0.0
        self._activity: tuple[str, float, int | None] | None = None
        """The current activity, its start, and the step before it."""
        self._noted: float | None = None
        self.unnoted = False
        """True if a report arrived since the last line in the event log."""
        self._reported_at = 0.0
        """Time of the last numbers."""

    def take(self, report: Report) -> None:
        """Take a report. Fields that it lacks keep their values."""
        if self.latest is None:
            self._first = report.received
        self._count(report)
        if report.step is not None and (self.latest is None or report.step != self.latest.step):
            self._moved = report.received
        if report.step is not None and (self._stepped is None or report.step < self._stepped[1]):
            self._stepped = report.received, report.step
        self.latest = report if self.latest is None else _merged(self.latest, report)
        if _counts(report):
            self.unnoted, self._reported_at = True, report.received

    def stall_over(self, report: Report) -> tuple[str, float] | None:
        """Return the activity that ends with this report, and its duration in seconds. Call it before `take`.

        Return None if no activity ends, or if there were steps meanwhile, because another thread was active.
        """
        now = report.received if report.time is None else report.time
        step = self.latest.step if report.step is None and self.latest is not None else report.step
        what = None if report.activity is None else report.activity.what
        before = self._activity
        if before is not None and before[0] == what:
            return None
        self._activity = None if what is None else (what, now, step)
        if before is None or before[2] != step:
            return None
        return before[0], max(0.0, now - before[1])

    def only_alive(self, report: Report) -> Report:
        """Reduce the report of another process of the same identity to activity, without its numbers."""
        activity = None if self.latest is None else self.latest.activity
        return replace(report, step=None, of=None, samples=None, loss=None, values={}, activity=activity)

    def rate(self, now: float) -> float | None:
        """Return samples per second over the last ten seconds, or over the last step if steps take longer.

        Return None if samples are not counted, or if there was no report for long.
        """
        return _rate(self._points, now)

    def step_seconds(self, now: float) -> float | None:
        """Return seconds per step over the same time. Return None if steps are not reported."""
        rate = _rate(self._steps, now)
        return 1 / rate if rate else None

    def left(self, now: float) -> float | None:
        """Return the seconds to the last step at the pace of all steps so far. Return None if either is
        unknown.
        """
        latest, pace = self.latest, self.pace
        if latest is None or latest.step is None or latest.of is None or pace is None:
            return None
        return max(0.0, (latest.of - latest.step) * pace - (now - self._moved))

    @property
    def pace(self) -> float | None:
        """Seconds per step from the first step to the last. None before the second step."""
        if self.latest is None or self.latest.step is None or self._stepped is None:
            return None
        began, first = self._stepped
        steps = self.latest.step - first
        return (self._moved - began) / steps if steps > 0 else None

    @property
    def average(self) -> float | None:
        """Samples per second from the first report to the last. None if samples are not counted."""
        seconds = _apart(self._began, self._points[-1]) if self._began is not None else 0.0
        return (self._points[-1].counted - self._began.counted) / seconds if self._began and seconds else None

    @property
    def due(self) -> bool:
        """True if the latest report belongs in the event log. The first does, then fewer and fewer."""
        if self.latest is None or not self.unnoted:
            return False
        now = self.latest.received
        pause = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, (now - self._first) / _PAUSES))
        return self._noted is None or now - self._noted >= pause

    def note(self, now: float) -> Document:
        """Return the fields for the event log, and mark all reports as noted."""
        latest = self.latest
        assert latest is not None, "a note of nothing"
        self._noted, self.unnoted = latest.received, False
        rate = self.rate(now)
        return {
            "rank": latest.rank,
            "step": latest.step,
            "samples": latest.samples,
            "loss": json_number(latest.loss),
            "values": {name: json_number(value) for name, value in latest.values.items()},
            "rate": None if rate is None else round(rate, 3),
            "age": round(max(0.0, now - self._reported_at), 3),
            **({"tables": _recorded(latest.tables)} if latest.tables else {}),
        }

    def _count(self, report: Report) -> None:
        if report.step is not None and (not self._steps or report.step != self._steps[-1].counted):
            _add(self._steps, _Point(report.received, report.time, report.step))
        if report.samples is None:
            return
        point = _Point(report.received, report.time, report.samples)
        if not _add(self._points, point):
            self._began = None
        self._began = self._began or point


def _add(points: deque[_Point], point: _Point) -> bool:
    """Add a point. Return False for the first point of a new process, which counts from 0."""
    same = not points or point.counted >= points[-1].counted
    if not same:
        points.clear()
    if points and _apart(points[-1], point) <= 0:
        points.pop()  # both arrived while the launcher was busy
    points.append(point)
    return same


def _rate(points: deque[_Point], now: float) -> float | None:
    """Return the rate of a count, per second."""
    if len(points) < 2:
        return None
    last = points[-1]
    between = _apart(points[-2], last)
    if now - last.received > max(WINDOW, 3 * between):
        return None
    since = next(point for point in points if _apart(point, last) <= max(WINDOW, between))
    seconds = _apart(since, last)
    return (last.counted - since.counted) / seconds if seconds > 0 else None


def _apart(one: _Point, other: _Point) -> float:
    """Return the seconds between two reports, on the clock of the process, because the launcher may have read
    both at once, much later.

    The launcher's clock is used if the process sent no time, or set its clock back.
    """
    if one.sent is not None and other.sent is not None and other.sent > one.sent:
        return other.sent - one.sent
    return other.received - one.received


def _counts(report: Report) -> bool:
    """Return True if the report has numbers. Activities and heartbeats are not recorded."""
    return (
        report.step is not None
        or report.loss is not None
        or bool(report.samples or report.values or report.tables)
    )


def _recorded(tables: Tables) -> dict[str, dict[str, float]]:
    """Return the largest tables, each with the numbers that a plot draws.

    A job may have hundreds of tables with dozens of numbers.
    """
    largest = sorted(tables, key=lambda name: -tables[name].get("rows", 0))[:_TABLES_IN_RECORD]
    return {
        name: {what: tables[name][what] for what in _OF_TABLES if what in tables[name]}
        for name in sorted(largest)
    }


def json_number(number: float | None) -> float | str | None:
    """Convert a number for JSON. NaN and infinities become "nan", "inf" and "-inf", which `float` reads."""
    return number if number is None or math.isfinite(number) else str(number)


def _merged(before: Report, report: Report) -> Report:
    values = {**before.values, **report.values}
    if len(values) > MOST_VALUES:
        values = dict(islice(values.items(), MOST_VALUES))  # new names are at the end
    return replace(
        report,
        step=before.step if report.step is None else report.step,
        of=before.of if report.of is None else report.of,
        samples=before.samples if report.samples is None else report.samples,
        loss=before.loss if report.loss is None else report.loss,
        values=values,
        saved=before.saved or report.saved,
        server=report.server or before.server,
        tables=_with(before.tables, report.tables),
        hot=_with(before.hot, report.hot),
    )


def _with(before: Tables, update: Tables) -> Tables:
    tables = {**before, **update} if update else before
    return dict(islice(tables.items(), MOST_TABLES)) if len(tables) > MOST_TABLES else tables
