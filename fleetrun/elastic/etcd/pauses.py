"""How long to wait before the next try: short at first, then longer. Knows no clock."""

from __future__ import annotations

SHORTEST, LONGEST = 0.05, 1.0


class Pauses:
    def __init__(self) -> None:
        self._next = SHORTEST

    def next(self) -> float:
        """Seconds."""
        pause, self._next = self._next, min(2 * self._next, LONGEST)
        return pause

    def over(self) -> None:
        """It worked: the next pause is a short one again."""
        self._next = SHORTEST
