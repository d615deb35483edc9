"""The stop ladder: SIGTERM, a deadline, SIGKILL; workers first, then their servers. Acts on containers."""

from __future__ import annotations

import signal
from collections.abc import Callable

from fleetrun.pod.container import Container
from fleetrun.pod.loop import Loop, Timer


class Ladder:
    """Stops groups of containers one after the other, each within `grace` seconds, all of a group at once.

    Tell it of every exit by `step`; it calls `then` once when the last has gone.
    """

    def __init__(
        self, loop: Loop, groups: list[list[Container]], grace: float, then: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._groups = groups
        self._grace = grace
        self._then: Callable[[], None] | None = then
        self._timer: Timer | None = None
        self._asked = False

    def step(self) -> None:
        """Go on as far as the containers that are still alive allow."""
        while self._groups and not any(each.alive for each in self._groups[0]):
            self._groups.pop(0)
            self._asked = False
            self._cancel()
        if not self._groups:
            if self._then is not None:
                then, self._then = self._then, None
                then()
        elif not self._asked:
            self._asked = True
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process would not see its SIGTERM
            self._timer = self._loop.after(self._grace, lambda: self._signal(signal.SIGKILL))

    def abandon(self) -> None:
        """Another ladder takes over."""
        self._cancel()
        self._then = None

    def kill(self) -> None:
        """No more patience: SIGKILL to everything at once."""
        self._cancel()
        for group in self._groups:
            for container in group:
                container.ask(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for container in self._groups[0]:
            container.ask(number)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
