"""Looks: when a server looks after its trainers, and which time it is for them then. Knows no clock.

While a server stands still - suspended, or at its disk - nobody looks: that is no trainer's absence.
"""

from __future__ import annotations


class Looks:
    """One look every so many seconds. Times are of a clock that also runs while nobody looks."""

    def __init__(self, every: float, now: float) -> None:
        self._every = every
        self._next = now + every
        self._missed = 0.0

    def wait(self, now: float) -> float:
        """Seconds until the next one."""
        return max(0.0, self._next - now)

    def due(self, now: float) -> float | None:
        """The time that trainers are told, without what was missed; None before the next look."""
        if now < self._next:
            return None
        self._missed += now - self._next
        self._next = now + self._every
        return now - self._missed

    def unneeded(self, now: float) -> None:
        """Nobody waits for a look: no time is missed, and the next one comes as soon as somebody does."""
        self._next = max(self._next, now)
