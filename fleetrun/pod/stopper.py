"""Stops a pod: lets its processes know why, asks its daemons to go, and walks the ladder. Decides nothing."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable

from fleetrun.pod.ladder import Ladder
from fleetrun.pod.loop import Loop
from fleetrun.pod.pod import Pod
from fleetrun.pod.strays import Strays


class Stopper:
    """`notice` is what processes read of the stop; `grace` are the seconds that they have for it."""

    def __init__(self, pod: Pod, loop: Loop, strays: Strays, grace: float, wall: Callable[[], float]) -> None:
        self.notice = "stop"
        self.asked_at = math.inf
        """When the processes of this attempt were first asked to go."""
        self._pod = pod
        self._loop = loop
        self._strays = strays
        self._grace = grace
        self._wall = wall
        self._ladder: Ladder | None = None

    def stop(self, then: Callable[[], None]) -> None:
        """Everything, with a fresh grace; `then` is called once when the last has gone."""
        self.asked_at = min(self.asked_at, self._wall())
        self.abandon()
        self._strays.ask(self._pod.pids())
        for container in self._pod.alive:
            container.notify(self.notice, self._wall() + self._grace)
        self._ladder = Ladder(self._loop, self._pod.stop_order, self._grace, then)
        self._ladder.step()

    def step(self) -> bool:
        """A process has gone: whether that is of any matter here."""
        ladder = self._ladder  # what follows its end may be another attempt, without one
        if ladder is not None:
            ladder.step()
        return ladder is not None

    def kill(self) -> bool:
        """No more patience with what is being stopped; False when nothing is."""
        if self._ladder is not None:
            self._ladder.kill()
        return self._ladder is not None

    def abandon(self) -> None:
        """What was to follow the stop does not."""
        if self._ladder is not None:
            self._ladder.abandon()

    def end_now(self) -> None:
        """Everything, daemons too, by SIGKILL. How it ended is not asked any more."""
        self.abandon()
        for container in self._pod.alive:
            container.ask(signal.SIGKILL)
            if container.process is not None:  # the sweep reaps it
                self._loop.remove(container.process.fileno())
        self._strays.end_now()

    def forget(self) -> None:
        """All have gone; another attempt begins."""
        self._ladder = None
        self.asked_at = math.inf
