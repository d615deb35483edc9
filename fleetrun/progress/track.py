"""What is known of one process's progress: its latest state, its pace, and when that is worth a line in the
record. Pure: time is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from typing import Any, NamedTuple

from fleetrun.progress.reports import MOST_VALUES, Report
from fleetrun.values import replace

WINDOW = 10.0  # seconds that the pace is of
_PAUSES = ((60.0, 1.0), (3600.0, 10.0), (math.inf, 60.0))
"""(until that age of a process, seconds between its notes): a job of a month must not fill a disk."""
_POINTS = 128


class _Point(NamedTuple):
    """So many samples until then: by the clock of the launcher, and by that of the process (if it said)."""

    received: float
    sent: float | None
    samples: int


class Track:
    """One process, from its start."""

    def __init__(self) -> None:
        self.latest: Report | None = None
        self._points: deque[_Point] = deque(maxlen=_POINTS)
        self._first = 0.0
        self._noted: float | None = None
        self._news = False

    def take(self, report: Report) -> None:
        """What it leaves out is as it was."""
        if self.latest is None:
            self._first = report.received
        self._count(report)
        self.latest = report if self.latest is None else _merged(self.latest, report)
        self._news = self._news or _counts(report)

    def only_alive(self, report: Report) -> Report:
        """Of what another process said that it said something."""
        activity = None if self.latest is None else self.latest.activity
        return replace(report, step=None, samples=None, loss=None, values={}, activity=activity)

    def rate(self, now: float) -> float | None:
        """Samples per second over the last ten seconds; where steps take longer, over the last that is known
        of them. None when nobody counts samples, or when none has come for long.
        """
        if len(self._points) < 2:
            return None
        last = self._points[-1]
        between = _apart(self._points[-2], last)
        if now - last.received > max(WINDOW, 3 * between):
            return None
        since = next(point for point in self._points if _apart(point, last) <= max(WINDOW, between))
        seconds = _apart(since, last)
        return (last.samples - since.samples) / seconds if seconds > 0 else None

    @property
    def due(self) -> bool:
        """Whether what came last belongs into the record: the first, and then ever fewer."""
        if self.latest is None or not self._news:
            return False
        now = self.latest.received
        pause = next(pause for until, pause in _PAUSES if now - self._first < until)
        return self._noted is None or now - self._noted >= pause

    @property
    def unnoted(self) -> bool:
        """Whether something came since the last note."""
        return self._news

    def note(self, now: float) -> dict[str, Any]:
        """What the record says; taken, so that it is said once."""
        latest = self.latest
        assert latest is not None, "a note of nothing"
        self._noted, self._news = latest.received, False
        rate = self.rate(now)
        return {
            "rank": latest.rank,
            "step": latest.step,
            "samples": latest.samples,
            "loss": plain(latest.loss),
            "values": {name: plain(value) for name, value in latest.values.items()},
            "rate": None if rate is None else round(rate, 3),
        }

    def _count(self, report: Report) -> None:
        if report.samples is None:
            return
        point = _Point(report.received, report.time, report.samples)
        if self._points and point.samples < self._points[-1].samples:
            self._points.clear()  # another process counts from 0
        if self._points and _apart(self._points[-1], point) <= 0:
            self._points.pop()  # both came while the launcher looked elsewhere
        self._points.append(point)


def _apart(one: _Point, other: _Point) -> float:
    """Seconds between two reports, by the clock of the process: the launcher may have read both much later,
    at once. By its own clock where the process has none, or has set it back.
    """
    if one.sent is not None and other.sent is not None and other.sent > one.sent:
        return other.sent - one.sent
    return other.received - one.received


def _counts(report: Report) -> bool:
    """Whether there is a number in it; activities and heartbeats are not for the record."""
    return report.step is not None or report.loss is not None or bool(report.samples or report.values)


def plain(number: float | None) -> float | str | None:
    """As JSON can say it: "nan", "inf" and "-inf" where the number is none. `float` reads all of them."""
    return number if number is None or math.isfinite(number) else str(number)


def _merged(before: Report, report: Report) -> Report:
    values = {**before.values, **report.values}
    if len(values) > MOST_VALUES:
        values = dict(islice(values.items(), MOST_VALUES))  # what is new stands at the end
    return replace(
        report,
        step=before.step if report.step is None else report.step,
        samples=before.samples if report.samples is None else report.samples,
        loss=before.loss if report.loss is None else report.loss,
        values=values,
    )
