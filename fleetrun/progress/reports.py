"""What a process says of its progress: one datagram, read and checked. Knows no socket and no clock.

A datagram is a JSON object of at most 8 KiB: `{"mark": "pod.role.rank", "step": 12, "samples": 384,
"loss": 0.5, "values": {"lr": 0.1}, "activity": {"what": "loading tables", "done": 3, "of": 10} | null,
"time": 1e9}`. Only the mark must be there. Numbers may be NaN or infinite, as Python's json writes them:
a loss that is no number any more is what somebody waits to see.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from fleetrun.envs.contract import Role
from fleetrun.values import dataclass, field

LARGEST = 8192
"""Bytes of a datagram."""
MOST_VALUES = 200
"""Names of values that one datagram may have, and that are remembered of one process."""
LONGEST_NAME = 100
LONGEST_WHAT = 120
_LARGEST_COUNT = 1 << 63
_RANK = re.compile(r"[0-9]{1,9}")
_ROLES = frozenset(str(role) for role in Role)


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process does beside steps. `done` of `of` parts; None where nobody can tell."""

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
    """This is no report."""


def read(datagram: bytes, received: float = 0.0) -> Report | None:
    """None for whatever is not a report in every field of it."""
    if len(datagram) > LARGEST:
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
    what = _text(given.get("what"), LONGEST_WHAT)
    return Activity(what, _finite(given.get("done")), _finite(given.get("of")))


def _text(given: object, longest: int) -> str:
    """A name that can be shown: no control characters, so no escape sequences."""
    if not isinstance(given, str) or not 0 < len(given) <= longest or not given.isprintable():
        raise _Refused
    return given
