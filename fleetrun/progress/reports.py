"""What a process reports of its progress (one datagram, read and checked), and what is known of it over time:
its latest state, its pace, and when that is worth a line in the record. Pure: no socket, and time is an
argument.

A datagram is a JSON object of at most 8 KiB: `{"mark": "pod.role.rank", "step": 12, "samples": 384, "loss":
0.5, "values": {"lr": 0.1}, "activity": {"what": "loading tables", "done": 3, "of": 10} | null, "time": 1e9}`.
Only the mark must be there. Numbers may be NaN or infinite, as Python's json writes them: a loss that is not
a number any more is what somebody waits to see.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

from fleetrun.envs.channels import LARGEST_DATAGRAM, LONGEST_ACTIVITY, LONGEST_NAME, MOST_VALUES
from fleetrun.envs.contract import Role
from fleetrun.values import dataclass, field, replace

# ---- One report: a datagram, read and checked
#
# A datagram is a JSON object of at most 8 KiB: `{"mark": "pod.role.rank", "step": 12, "samples": 384, "loss":
# 0.5, "values": {"lr": 0.1}, "activity": {"what": "loading tables", "done": 3, "of": 10} | null, "time":
# 1e9}`. Only the mark must be there. Numbers may be NaN or infinite, as Python's json writes them: a loss
# that has become NaN is what somebody waits to see.

_LARGEST_COUNT = 1 << 63
_RANK = re.compile(r"[0-9]{1,9}")
_ROLES = frozenset(str(role) for role in Role)


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process does besides steps. `done` of `of` parts; None where that is unknown."""

    what: str
    done: float | None = None
    of: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one process said at one moment; None, or no value, where it said nothing.

    `samples` counts since the process began. `received` is the launcher's monotonic clock, `time` the
    process's own, in seconds since the epoch.
    """

    pod: str
    role: str
    rank: int
    step: int | None = None
    samples: int | None = None
    loss: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    activity: Activity | None = None
    received: float = 0.0
    time: float | None = None


class _Refused(ValueError):
    """The datagram is not a report."""


def read_report(datagram: bytes, received: float = 0.0) -> Report | None:
    """None for whatever is not a report in every field of it."""
    if len(datagram) > LARGEST_DATAGRAM:
        return None
    try:
        said = json.loads(datagram)
        return _report(said, received) if isinstance(said, dict) else None
    except (ValueError, RecursionError):  # the second: thousands of brackets
        return None


def _report(said: dict[str, Any], received: float) -> Report:
    pod, role, rank = _mark(said.get("mark"))
    return Report(
        pod=pod,
        role=role,
        rank=rank,
        step=_count(said.get("step")),
        samples=_count(said.get("samples")),
        loss=_number(said.get("loss")),
        values=_values(said.get("values")),
        activity=_activity(said.get("activity")),
        received=received,
        time=_finite(said.get("time")),
    )


def _mark(given: object) -> tuple[str, str, int]:
    if not isinstance(given, str):
        raise _Refused
    parts = given.rsplit(".", 2)
    if len(parts) != 3 or parts[1] not in _ROLES or not _RANK.fullmatch(parts[2]):
        raise _Refused
    return parts[0], parts[1], int(parts[2])


def _count(given: object) -> int | None:
    if given is None:
        return None
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < _LARGEST_COUNT:
        raise _Refused
    return given


def _number(given: object) -> float | None:
    if given is None:
        return None
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise _Refused
    try:
        return float(given)
    except OverflowError:
        raise _Refused from None


def _finite(given: object) -> float | None:
    """A number that can be counted with: finite, and not negative."""
    number = _number(given)
    if number is not None and not (math.isfinite(number) and number >= 0):
        raise _Refused
    return number


def _values(given: object) -> dict[str, float]:
    if given is None:
        return {}
    if not isinstance(given, dict) or len(given) > MOST_VALUES:
        raise _Refused
    values = {}
    for name, value in given.items():
        number = _number(value)
        if number is None:
            raise _Refused
        values[_text(name, LONGEST_NAME)] = number
    return values


def _activity(given: object) -> Activity | None:
    if given is None:
        return None
    if not isinstance(given, dict):
        raise _Refused
    what = _text(given.get("what"), LONGEST_ACTIVITY)
    return Activity(what, _finite(given.get("done")), _finite(given.get("of")))


def _text(given: object, longest: int) -> str:
    """A name that can be shown: no control characters, so no escape sequences."""
    if not isinstance(given, str) or not 0 < len(given) <= longest or not given.isprintable():
        raise _Refused
    return given


# ---- The state of one process: latest report, pace, and when it is due in the record

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
        of them. None when samples are not counted, or when none has come for long.
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
            "loss": json_number(latest.loss),
            "values": {name: json_number(value) for name, value in latest.values.items()},
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


def json_number(number: float | None) -> float | str | None:
    """As JSON can say it: "nan", "inf" and "-inf" where the number is none. `float` reads all of them."""
    return number if number is None or math.isfinite(number) else str(number)


def _merged(before: Report, report: Report) -> Report:
    values = {**before.values, **report.values}
    if len(values) > MOST_VALUES:
        values = dict(islice(values.items(), MOST_VALUES))  # what is new comes last
    return replace(
        report,
        step=before.step if report.step is None else report.step,
        samples=before.samples if report.samples is None else report.samples,
        loss=before.loss if report.loss is None else report.loss,
        values=values,
    )
