"""Encode and decode progress reports between a process and its launcher.

`encode_reports` writes the datagrams. `read_report` checks and reads them. A datagram is a JSON object of at
most 8 KiB:

    {"mark": "pod.role.rank", "step": 12, "of": 900, "samples": 384, "loss": 0.5, "values": {"lr": 0.1},
    "activity": {"what": "loading tables", "done": 3, "of": 10} | null, "joined": [1e9, 1e9],
    "saved": true, "time": 1e9}

A parameter server adds `"server": {"log_bytes": 512}` and `"tables": {"user": {"rows": 12}}`, with its own
counters and the counters of its tables. Some of its reports have `"hot": {"user": {"17": 0.3}}`, the keys
with the most pulls. Only the mark is required. Numbers may be NaN or infinite, as Python's json writes them,
because a loss that became NaN must reach the user.

The module imports only the standard library, because every script that reports progress loads it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fleetrun.aliases import Document, Fields, Numbers
from fleetrun.envs.channels import (
    LARGEST_DATAGRAM,
    LONGEST_ACTIVITY,
    LONGEST_NAME,
    LONGEST_TABLE,
    MOST_VALUES,
)
from fleetrun.envs.contract import Role
from fleetrun.values import field, frozen, frozen_by_name

# ---- Writing


def encode_reports(fields: Fields, values: Fields, name: str = "values") -> Iterator[bytes]:
    """Yield datagrams of at most LARGEST_DATAGRAM bytes.

    Each datagram has all `fields` and, under `name`, as many values as fit. The values are numbers or
    `tables`.
    """
    head = json.dumps(fields, separators=(",", ":"))[:-1] + f',"{name}":{{'
    items: list[str] = []
    size = len(head) + 2
    for name, value in values.items():
        item = f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}"
        if items and size + len(item) + 1 > LARGEST_DATAGRAM:
            yield f"{head}{','.join(items)}}}}}".encode()
            items, size = [], len(head) + 2
        items.append(item)
        size += len(item) + 1
    yield f"{head}{','.join(items)}}}}}".encode()


def valid_name(text: object, longest: int) -> str:
    """Return `text` as a name that `read_report` accepts, printable and at most `longest` characters."""
    line = "".join(letter if letter.isprintable() else "?" for letter in str(text)[:longest])
    return line or "?"


# ---- Reading

_LARGEST_COUNT = 1 << 63
_RANK = re.compile(r"[0-9]{1,9}")
_ROLES = frozenset(str(role) for role in Role)


@frozen
class Activity:
    """The work of a process between steps. `done` of `of` parts are complete. Both are None if unknown."""

    what: str
    done: float | None = None
    of: float | None = None


@frozen_by_name
class Report:
    """The progress of one process at one moment. Fields missing from the datagram are None.

    `of` is the number of the last step. `samples` counts from the start of the process. `joined` holds two
    times, in seconds since the epoch, when the process started to join its process group and when it had
    joined. `saved` is True if the process has made a checkpoint. `server`, `tables` and `hot` hold numbers of
    a parameter server. `received` is the launcher's monotonic clock, and `time` the clock of the process in
    seconds since the epoch.
    """

    pod: str
    role: str
    rank: int
    step: int | None = None
    of: int | None = None
    samples: int | None = None
    loss: float | None = None
    values: Numbers = field(default_factory=dict)
    activity: Activity | None = None
    joined: tuple[float, float] | None = None
    saved: bool = False
    server: Numbers = field(default_factory=dict)
    tables: Mapping[str, Numbers] = field(default_factory=dict)
    hot: Mapping[str, Numbers] = field(default_factory=dict)
    received: float = 0.0
    time: float | None = None


class _InvalidReport(ValueError):
    """The datagram is not a valid report."""


def read_report(datagram: bytes, received: float = 0.0) -> Report | None:
    """Return the report in a datagram, or None if any field is invalid."""
    if len(datagram) > LARGEST_DATAGRAM:
        return None
    try:
        fields = json.loads(datagram)
        return _report(fields, received) if isinstance(fields, dict) else None
    except (ValueError, RecursionError):  # RecursionError comes from deeply nested brackets
        return None


def _report(fields: Document, received: float) -> Report:
    pod, role, rank = _mark(fields.get("mark"))
    saved = fields.get("saved") is True
    found = {name: read(fields[name]) for name, read in _READERS.items() if fields.get(name) is not None}
    return Report(pod=pod, role=role, rank=rank, saved=saved, received=received, **found)


def _mark(given: object) -> tuple[str, str, int]:
    if not isinstance(given, str):
        raise _InvalidReport
    parts = given.rsplit(".", 2)
    if len(parts) != 3 or parts[1] not in _ROLES or not _RANK.fullmatch(parts[2]):
        raise _InvalidReport
    return parts[0], parts[1], int(parts[2])


def _count(given: object) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given < _LARGEST_COUNT:
        raise _InvalidReport
    return given


def _number(given: object) -> float:
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise _InvalidReport
    try:
        return float(given)
    except OverflowError:
        raise _InvalidReport from None


def _finite(given: object) -> float:
    """Return a finite number that is not negative."""
    number = _number(given)
    if not (math.isfinite(number) and number >= 0):
        raise _InvalidReport
    return number


def _span(given: object) -> tuple[float, float]:
    if not isinstance(given, list) or len(given) != 2:
        raise _InvalidReport
    begin, end = map(_finite, given)
    if begin > end:
        raise _InvalidReport
    return begin, end


def _values(given: object) -> dict[str, float]:
    if not isinstance(given, dict) or len(given) > MOST_VALUES:
        raise _InvalidReport
    return {_text(name, LONGEST_NAME): _number(value) for name, value in given.items()}


def _tables(given: object) -> dict[str, dict[str, float]]:
    if not isinstance(given, dict):
        raise _InvalidReport
    return {_text(name, LONGEST_TABLE): _counts(numbers) for name, numbers in given.items()}


def _counts(given: Any) -> dict[str, float]:
    """Return the values, and keep whole numbers as int."""
    return {name: given[name] for name in _values(given)}


def _activity(given: object) -> Activity:
    if not isinstance(given, dict):
        raise _InvalidReport
    what = _text(given.get("what"), LONGEST_ACTIVITY)
    parts = (given.get("done"), given.get("of"))
    return Activity(what, *(None if each is None else _finite(each) for each in parts))


def _text(given: object, longest: int) -> str:
    """Return a name without control characters, and therefore without escape sequences for a terminal."""
    if not isinstance(given, str) or not 0 < len(given) <= longest or not given.isprintable():
        raise _InvalidReport
    return given


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "step": _count,
    "of": _count,
    "samples": _count,
    "loss": _number,
    "values": _values,
    "activity": _activity,
    "joined": _span,
    "server": _counts,
    "tables": _tables,
    "hot": _tables,
    "time": _finite,
}
"""The optional fields of a report, each with its reader. A reader raises _InvalidReport."""
