"""What was asked of the store and is not settled: so that the same is not asked again at every look."""

from __future__ import annotations

import math
from dataclasses import dataclass

ECHO = 1.0
"""How long after its answer a write may take to appear in the mirror."""
AGAIN = 0.2
"""When to try again what was refused, if nothing has changed in between."""


@dataclass(slots=True)
class _Errand:
    revision: int
    until: float = math.inf


class Errands:
    def __init__(self) -> None:
        self._open: dict[str, _Errand] = {}

    def begin(self, key: str, revision: int) -> bool:
        """Whether it may be asked now: not while the same is under way, nor before the mirror shows it.
        `revision` is what the mirror has of the key.
        """
        errand = self._open.get(key)
        if errand is not None and errand.revision == revision:
            return False
        self._open[key] = _Errand(revision)
        return True

    def answered(self, key: str, done: bool, now: float) -> None:
        if key in self._open:
            self._open[key].until = now + (ECHO if done else AGAIN)

    def forget_late(self, now: float) -> float:
        """Drop what was answered without an effect; the time at which the next one is due."""
        for key in [key for key, errand in self._open.items() if errand.until <= now]:
            del self._open[key]
        return min((errand.until for errand in self._open.values()), default=math.inf)

    def clear(self) -> None:
        self._open.clear()
