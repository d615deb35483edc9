"""How often somebody who waits is told so: on every change, every 10 s in the first minute, then once a
minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fleetrun.elastic.rounds.policy import Waiting

OFTEN = 10.0
SELDOM = 60.0


class Reminder:
    def __init__(self) -> None:
        self._told: tuple[int, tuple[str, ...]] | None = None
        self._since = 0.0
        self._next = 0.0

    def note(self, waiting: Waiting | None, now: float, tell: Callable[[Waiting], None]) -> float:
        """Tell it when it is due; the time at which to ask again."""
        if waiting is None:
            self._told = None
            return math.inf
        what = waiting.present, waiting.missing
        if self._told is None:
            self._since = now
        if what != self._told or now >= self._next:
            self._told = what
            self._next = now + (OFTEN if now - self._since < SELDOM else SELDOM)
            tell(waiting)
        return self._next
