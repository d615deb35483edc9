"""How long somebody has said nothing. Time is an argument."""

from __future__ import annotations


class Silence:
    """What passes while nobody looks is not counted: if `look` comes `late` seconds or more after the one
    before it, this process was stopped, or its machine asleep.
    """

    def __init__(self, late: float, now: float) -> None:
        self._late = late
        self._heard = self._looked = now

    def heard(self, now: float) -> None:
        self._heard = now

    def look(self, now: float) -> float:
        """The seconds since something was heard."""
        if now - self._looked >= self._late:
            self._heard = now
        self._looked = now
        return now - self._heard
