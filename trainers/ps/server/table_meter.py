"""Report numbers of a server's tables to the launcher, every five seconds while the tables are in use.

`kernels.counts` keeps counters where requests are answered anyway. Here the counters become numbers per
second, over about the last ten seconds. Other numbers come from a few requests and rows (`samples`), and take
two milliseconds of a report. If there are many tables, each report covers some of them in turn.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainers.kernels.compiled import Flags, Floats, Keys
from trainers.ps.kernels import counts
from trainers.ps.server.samples import DistinctKeys, HotKeys, Sizes, sample_rows
from trainers.ps.server.steps import AsyncSteps, Steps
from trainers.ps.server.store import Store
from trainers.ps.tables.run import Sampler
from trainers.ps.tables.sparse import SparseTable

PERIOD = 5.0
"""Seconds between two reports."""
_POINTS = 2
"""The number of reports over which rates are measured, from the first to the last."""
_AT_ONCE = 50
"""The number of tables in a report. If there are more tables, they take turns."""
_SAMPLES_S = 0.002
_SAMPLED_PULLS, _SAMPLED_PUSHES = 8, 4
"""The number of pulls and of pushes to sample between two reports."""
_MOST_SAMPLED = 4096
"""The most keys to sample of a table."""
_HOT_EVERY = 2
"""The number of reports from one report of hot keys to the next. Hot keys take more bytes than all other
numbers.
"""
_COUNTERS = {
    "pulls": counts.PULLS,
    "pulled_keys": counts.PULLED_KEYS,
    "missed_keys": counts.MISSED_KEYS,
    "pushes": counts.PUSHES,
    "pushed_keys": counts.PUSHED_KEYS,
    "admitted": counts.ADMITTED,
    "refused": counts.REFUSED,
    "evicted": counts.EVICTED,
    "removed": counts.REMOVED,
}
_RATES = ("pulls", "pulled_keys", "missed_keys", "pushes", "pushed_keys")

_T = TypeVar("_T", bound=np.generic)

Numbers = Mapping[str, float]


class TableReport(NamedTuple):
    """The numbers of the server, and of tables by their names. Some reports also have the `hot` keys of these
    tables, with each key's share of the pulls.
    """

    server: Numbers
    tables: Mapping[str, Numbers]
    hot: Mapping[str, Numbers]


Emit = Callable[[Numbers, Mapping[str, Numbers], Mapping[str, Numbers]], bool]
"""A function that sends the three parts of a TableReport, and returns True if that was possible."""


class _Course:
    """The counters of one table at the last few reports, and the samples of the table.

    Counts up to `_base` are left out. They come from requests in the write-ahead log, and from rows that the
    server loaded.
    """

    def __init__(self, table: SparseTable, seen: Flags, now: float) -> None:
        self._table = table
        self._base = table.counts.row.copy()
        self._rows = len(table) + self._left
        self._points = deque([(now, self._base)], _POINTS)
        self._distinct = DistinctKeys(seen, now)
        seen[:] = 0
        self._gradients, self._values = Sizes(), Sizes()
        self.hot = HotKeys()
        self.used = False
        """True if the last rates are not zero."""

    @property
    def _left(self) -> int:
        """The number of rows that were evicted or removed."""
        row = self._table.counts.row
        return int(row[counts.EVICTED] + row[counts.REMOVED])

    def begin(self, now: float) -> None:
        """Restart the rates after an idle time. Events since the last report count as recent."""
        _, last = self._points[-1]
        self._points.clear()
        self._points.append((now - PERIOD, last))

    def sample(self, keys: Sequence[Keys], gradients: Sequence[Floats], random: np.random.Generator) -> None:
        if keys:
            self.hot.add(np.concatenate(keys)[:_MOST_SAMPLED], len(keys))
        for rows in gradients:
            self._gradients.add(rows)
        self._values.add(sample_rows(self._table.kept[0], random))

    def numbers(self, now: float) -> dict[str, float]:
        table, row = self._table, self._table.counts.row.copy()
        since, before = self._points[0]
        self._points.append((now, row))
        self.used = not np.array_equal(before, row)
        per_second: NDArray[np.float64] = (row - before) / max(now - since, 1e-3)
        storage, candidates, disk = table.kept
        places = None if disk is None else disk.places
        total = (row - self._base).tolist()
        return {
            "rows": len(table),
            "bytes": sum(each.bytes for each in (storage, candidates, places) if each is not None),
            "candidates": 0 if candidates is None else len(candidates),
            "on_disk": table.on_disk,
            "new": len(table) + self._left - self._rows,
            **{name: total[place] for name, place in _COUNTERS.items()},
            **{f"{name}_s": round(float(per_second[_COUNTERS[name]]), 3) for name in _RATES},
            "ids_hour": self._distinct.count(now),
            **self._gradients.numbers("gradient"),
            **self._values.numbers("value"),
        }


class TableMeter:
    """The meter of one server. `state` returns numbers of the server as a whole."""

    def __init__(self, store: Store, steps: Steps, emit: Emit, state: Callable[[], Numbers]) -> None:
        self._store, self._steps = store, steps
        self._emit = emit
        self._state = state
        self._courses: dict[int, _Course] = {}
        self._random = np.random.default_rng(0)
        self._next = -math.inf
        self._turn = self._sampled = self._reports = 0
        self._idle = False
        self.active = True
        """True if there is something to report. Set it when a request arrives."""

    def wait(self, now: float) -> float | None:
        """Return the seconds until the next report, or None if a request must arrive first."""
        return max(0.0, self._next - now) if self.active else None

    def report(self, now: float) -> None:
        """Send a report if one is due."""
        if not self.active or now < self._next:
            return
        if not self._store.ready:
            self.active = False
            return
        self._next = now + PERIOD
        if not self._courses:
            self._courses = {
                number: _Course(table, self._store.seen[number], now)
                for number, table in self._store.tables.items()
                if isinstance(table, SparseTable)
            }
        tables = self._courses
        if self._idle:
            for each in tables.values():
                each.begin(now)
        self._sample(tables, self._store.sampler)
        sent = self._emit(*self._report(tables, now))
        self.active = not sent or bool(self._turn) or any(each.used for each in tables.values())
        self._idle = not self.active

    def _report(self, tables: Mapping[int, _Course], now: float) -> TableReport:
        names = {number: self._store.tables[number].spec.name for number in tables}
        turn = list(tables)[self._turn : self._turn + _AT_ONCE]
        hot: Mapping[str, Numbers] = {}
        if self._reports % _HOT_EVERY == 0:
            hot = {names[number]: top for number in turn if (top := tables[number].hot.top())}
        self._turn = self._turn + _AT_ONCE if self._turn + _AT_ONCE < len(tables) else 0
        self._reports += not self._turn
        numbers = {names[number]: tables[number].numbers(now) for number in turn}
        return TableReport({**self._state(), **_staleness(self._steps)}, numbers, hot)

    def _sample(self, tables: Mapping[int, _Course], sampler: Sampler) -> None:
        """Sample some tables, one after the other, until the time for samples has passed."""
        until, numbers = time.perf_counter() + _SAMPLES_S, list(tables)
        for _ in numbers:
            number = numbers[self._sampled % len(numbers)]
            self._sampled += 1
            keys = _of_table(number, sampler.pulls)
            tables[number].sample(keys, _of_table(number, sampler.pushes), self._random)
            if time.perf_counter() > until:
                break
        sampler.want(_SAMPLED_PULLS, _SAMPLED_PUSHES)


def _of_table(number: int, requests: Sequence[tuple[int, Keys, NDArray[_T]]]) -> list[NDArray[_T]]:
    """Return the content for this table from the requests that contain the table."""
    found = []
    for first, starts, content in requests:
        place = number - first
        if 0 <= place < len(starts) - 1 and starts[place] < starts[place + 1]:
            found.append(content[starts[place] : starts[place + 1]])
    return found


def _staleness(steps: Steps) -> Numbers:
    """Return the staleness of the last pushes in async training."""
    if not isinstance(steps, AsyncSteps) or not steps.staleness:
        return {}
    behind, seconds = zip(*steps.staleness, strict=True)
    (steps50, steps99), (s50, s99) = (np.percentile(each, (50, 99)).tolist() for each in (behind, seconds))
    return {
        "stale_steps_p50": round(steps50, 1),
        "stale_steps_p99": round(steps99, 1),
        "stale_ms_p50": round(1000 * s50, 2),
        "stale_ms_p99": round(1000 * s99, 2),
    }
