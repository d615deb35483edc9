"""Processes that no container owns any more (daemons of a script): asked to go together with the containers,
ended with the pod.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from fleetrun.pod.process import ask_strays, end_descendants

STRAYS_LEAVE = 0.5  # seconds from SIGTERM to SIGKILL


class Strays:
    """`sweep(grace)` ends what is left below this process and counts it; `ask` asks those outside the given
    process groups to go.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        sweep: Callable[[float], int] = end_descendants,
        ask: Callable[[Collection[int]], None] = ask_strays,
    ) -> None:
        self._clock = clock
        self._sweep = sweep
        self._ask = ask
        self._asked: float | None = None

    def ask(self, but: Collection[int]) -> None:
        """Except those in the process groups `but`."""
        self._ask(but)
        self._asked = self._clock()

    def end(self) -> int:
        """With what is left of their time, if they were asked."""
        waited = 0.0 if self._asked is None else self._clock() - self._asked
        return self._sweep(max(0.0, STRAYS_LEAVE - waited))

    def end_now(self) -> int:
        """They had their time, or there is none."""
        self._asked = None
        return self._sweep(0.0)
