"""How the processes of a pod are stopped: with a notice, by a ladder of signals, and what they have left."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection

from fleetrun.aliases import Callback, Clock
from fleetrun.pod.container import Container, Pod
from fleetrun.pod.loop import Loop, Timer
from fleetrun.pod.process import ask_strays, end_descendants

# ---- The stop ladder: SIGTERM, a deadline, SIGKILL; workers first, then their servers. After Ctrl-C workers
# get SIGINT first: scripts save what they have in `except KeyboardInterrupt`.


LET_GO = 15.0
"""Seconds for the kernel to end a process after SIGKILL: to free hundreds of GB, or a GPU, takes some."""

LeftBehind = Callable[[list[Container]], None]
"""Gets the containers that SIGKILL has not ended."""


class Ladder:
    """Stops groups of containers one after the other, each within `grace` seconds, all of a group at once.
    `interrupted`: the first group gets SIGINT, and SIGTERM after half of its grace.

    Tell it of every exit by `step`; it calls `then` once when the last has gone. Containers that SIGKILL does
    not end are `left` behind.
    """

    def __init__(
        self,
        loop: Loop,
        groups: list[list[Container]],
        grace: float,
        then: Callback,
        left: LeftBehind,
        *,
        interrupted: bool = False,
    ) -> None:
        self._loop = loop
        self._groups = groups
        self._grace = grace
        self._then: Callback | None = then
        self._left = left
        self._timer: Timer | None = None
        self._asked = False
        self._interrupted = interrupted

    def step(self) -> None:
        """Go on as far as the containers that are still alive allow."""
        while self._groups and not any(each.alive for each in self._groups[0]):
            self._groups.pop(0)
            self._asked = self._interrupted = False
            self._cancel()
        if not self._groups:
            if self._then is not None:
                then, self._then = self._then, None
                then()
        elif not self._asked:
            self._asked = True
            if self._interrupted:
                self._signal(signal.SIGINT)
                self._timer = self._loop.after(self._grace / 2, lambda: self._terminate(self._grace / 2))
            else:
                self._terminate(self._grace)

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
        self._timer = self._loop.after(LET_GO, self._leave_behind)

    def _terminate(self, grace: float) -> None:
        self._signal(signal.SIGTERM)
        self._timer = self._loop.after(grace, self._kill)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._timer = self._loop.after(LET_GO, self._leave_behind)

    def _leave_behind(self) -> None:
        left = [each for each in self._groups[0] if each.alive]
        for each in left:
            assert each.process is not None
            self._loop.remove(each.process.fileno())
            each.leave_behind()
        self._left(left)
        if self._then is not None:
            self.step()

    def _signal(self, number: int) -> None:
        for container in self._groups[0]:
            container.ask(number)
            if number != signal.SIGKILL:
                container.ask(signal.SIGCONT)  # a stopped process would not see the signal

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# ---- Processes that have left their container (daemons of a script)

STRAYS_LEAVE = 0.5  # seconds from SIGTERM to SIGKILL


class Strays:
    """`sweep(grace)` ends what is left below this process and counts it; `ask` asks those outside the given
    process groups to go.
    """

    def __init__(
        self,
        clock: Clock,
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
        """Their grace is over, or they have none."""
        self._asked = None
        return self._sweep(0.0)


# ---- Stopping: the notice, the daemons, the ladder


class Stopper:
    """`notice` is what processes read of the stop; they have `grace` seconds for it. `left`: see `Ladder`."""

    def __init__(
        self,
        pod: Pod,
        loop: Loop,
        strays: Strays,
        grace: float,
        wall: Clock,
        left: LeftBehind,
    ) -> None:
        self.notice = "stop"
        self.interrupted = False
        """By Ctrl-C."""
        self.asked_at = math.inf
        """When the processes of this attempt were first asked to go."""
        self._pod = pod
        self._loop = loop
        self._strays = strays
        self._grace = grace
        self._wall = wall
        self._left = left
        self._ladder: Ladder | None = None
        self._single: dict[str, Ladder] = {}
        """Of containers that are stopped alone, by their names."""

    def stop_one(self, container: Container, then: Callback) -> None:
        """Only this one, which is to start again."""

        def gone() -> None:
            del self._single[container.spec.name]
            then()

        container.notify("restart", self._wall() + self._grace)
        ladder = Ladder(self._loop, [[container]], self._grace, gone, self._left)
        self._single[container.spec.name] = ladder
        ladder.step()

    def stops_one(self, name: str) -> bool:
        return name in self._single

    def step_one(self, name: str) -> bool:
        """This container has ended. Whether it was stopped alone."""
        ladder = self._single.get(name)
        if ladder is not None:
            ladder.step()
        return ladder is not None

    def stop(self, then: Callback, *, at_once: bool = False) -> None:
        """Everything, with a fresh grace; `then` is called once when the last has gone. `at_once`: SIGKILL
        comes before anything that would let a suspended process go on.
        """
        self.asked_at = min(self.asked_at, self._wall())
        self.abandon()
        if at_once:
            for container in self._pod.alive:
                container.ask(signal.SIGKILL)
        self._strays.ask(self._pod.pids())
        for container in self._pod.alive:
            container.notify(self.notice, self._wall() + self._grace)
        self._ladder = Ladder(
            self._loop, self._pod.stop_order, self._grace, then, self._left, interrupted=self.interrupted
        )
        self._ladder.step()

    def step(self) -> bool:
        """A process has ended. Whether a stop is in progress."""
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
        for ladder in (self._ladder, *self._single.values()):
            if ladder is not None:
                ladder.abandon()
        self._single.clear()

    def end_now(self) -> None:
        """Everything, daemons too, by SIGKILL. How it ended no longer matters."""
        self.abandon()
        for container in self._pod.alive:
            container.ask(signal.SIGKILL)
            if container.process is not None:  # the sweep reaps it
                self._loop.remove(container.process.fileno())
        self._strays.end_now()

    def forget(self) -> None:
        """All have gone; another attempt begins."""
        self.notice = "stop"
        self._ladder = None
        self.asked_at = math.inf
