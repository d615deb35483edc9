"""What a server reports of its tables: every two seconds while something happens in them, to the launcher.

Counters are kept where requests are answered anyway (`kernels.counts`); here they become numbers a second,
over the last ten seconds or so.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainers.ps.kernels import counts
from trainers.ps.server.store import Store
from trainers.ps.tables.sparse import SparseTable

PERIOD = 2.0
"""Seconds between two reports."""
_POINTS = 6
"""Reports between whose first and last rates are measured."""
_AT_ONCE = 100
"""Tables in a report; of more tables some have their turn in each."""
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

Numbers: TypeAlias = Mapping[str, float]
Tell: TypeAlias = Callable[[Numbers, Mapping[str, Numbers]], bool]
"""Takes what is reported of the server, and of tables by their names; whether it could be sent."""


class _Course:
    """The counters of one table at the last few reports. Those of `base` and before are not counted: requests
    that the server took from its log, and rows that it loaded.
    """

    def __init__(self, table: SparseTable, now: float) -> None:
        self._table = table
        self._base = table.counts.row.copy()
        self._rows = len(table) + self._left
        self._points = deque([(now, self._base)], _POINTS)
        self.used = False
        """Whether its last rates are not zero."""

    @property
    def _left(self) -> int:
        """Rows that do not exist any more."""
        row = self._table.counts.row
        return int(row[counts.EVICTED] + row[counts.REMOVED])

    def begin(self, now: float) -> None:
        """Something happens again: what has happened since the last report did so just now."""
        _, last = self._points[-1]
        self._points.clear()
        self._points.append((now - PERIOD, last))

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
        }


class TableMeter:
    """Of one server. `state` has numbers of the server as a whole."""

    def __init__(self, store: Store, tell: Tell, state: Callable[[], Numbers]) -> None:
        self._store = store
        self._tell = tell
        self._state = state
        self._courses: dict[int, _Course] = {}
        self._next = -math.inf
        self._turn = 0
        self._idle = False
        self.active = True
        """Whether there is something to report; to be set when a request arrives."""

    def wait(self, now: float) -> float | None:
        """Seconds until the next report; None if there will be none before a request arrives."""
        return max(0.0, self._next - now) if self.active else None

    def report(self, now: float) -> None:
        """If it is time to."""
        if not self.active or now < self._next:
            return
        if not self._store.ready:
            self.active = False
            return
        self._next = now + PERIOD
        tables = self._courses_of_all(now)
        if self._idle:
            for each in tables.values():
                each.begin(now)
        names = {number: self._store.tables[number].spec.name for number in tables}
        turn = list(tables)[self._turn : self._turn + _AT_ONCE]
        self._turn = self._turn + _AT_ONCE if self._turn + _AT_ONCE < len(tables) else 0
        told = self._tell(self._state(), {names[number]: tables[number].numbers(now) for number in turn})
        self.active = not told or bool(self._turn) or any(each.used for each in tables.values())
        self._idle = not self.active

    def _courses_of_all(self, now: float) -> Mapping[int, _Course]:
        if not self._courses:
            self._courses = {
                number: _Course(table, now)
                for number, table in self._store.tables.items()
                if isinstance(table, SparseTable)
            }
        return self._courses
