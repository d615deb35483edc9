"""Stop the processes of a pod with a notice and a ladder of signals, and end their leftover children."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection

from fleetrun.aliases import Callback, Clock
from fleetrun.pod.container import Container, Pod
from fleetrun.pod.loop import Loop, Timer

# ---- The stop ladder: SIGTERM, a deadline, SIGKILL, first for workers, then for their servers. After Ctrl-C,
# workers get SIGINT first, because scripts save their work in `except KeyboardInterrupt`.


LET_GO = 15.0
"""Seconds for the kernel to end a process after SIGKILL. Freeing hundreds of GB, or a GPU, takes a while."""

LeftBehind = Callable[[list[Container]], None]
"""Receives the containers that SIGKILL has not ended."""


class Ladder:
    """Stops groups of containers one after the other, each within `grace` seconds.

    The containers of a group stop together. If `interrupted`, the first group gets SIGINT, and SIGTERM after
    half of its grace. Call `step` after every exit. The ladder calls `then` once when the last container has
    ended. `left` receives containers that SIGKILL does not end.
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
        """Continue as far as the running containers allow."""
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
        """Stop this ladder, because another one replaces it."""
        self._cancel()
        self._then = None

    def kill(self) -> None:
        """Send SIGKILL to all groups immediately."""
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
                container.ask(signal.SIGCONT)  # a stopped process would not receive the signal

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# ---- Processes that have left their container (daemons of a script)

STRAYS_LEAVE = 0.5  # seconds from SIGTERM to SIGKILL


class Strays:
    """Ends processes that left their container.

    `sweep(grace)` ends the remaining descendants and counts them. `ask` sends SIGTERM to descendants outside
    the given process groups.
    """

    def __init__(
        self,
        clock: Clock,
        sweep: Callable[[float], int],
        ask: Callable[[Collection[int]], None],
    ) -> None:
        self._clock = clock
        self._sweep = sweep
        self._ask = ask
        self._asked: float | None = None

    def ask(self, but: Collection[int]) -> None:
        """Send SIGTERM to strays outside the process groups `but`."""
        self._ask(but)
        self._asked = self._clock()

    def end(self) -> int:
        """End the strays. After `ask`, they have the rest of their grace."""
        waited = 0.0 if self._asked is None else self._clock() - self._asked
        return self._sweep(max(0.0, STRAYS_LEAVE - waited))

    def end_now(self) -> int:
        """End the strays without grace."""
        self._asked = None
        return self._sweep(0.0)


# ---- Stopping: the notice, the daemons, the ladder


class Stopper:
    """Stops a pod. `notice` is the reason that processes read, and `grace` is their time in seconds.

    `left` works as in `Ladder`.
    """

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
        """True after Ctrl-C."""
        self.asked_at = math.inf
        """When the processes of this attempt first received a stop signal."""
        self._pod = pod
        self._loop = loop
        self._strays = strays
        self._grace = grace
        self._wall = wall
        self._left = left
        self._ladder: Ladder | None = None
        self._single: dict[str, Ladder] = {}
        """Ladders of containers that are stopped alone, by container name."""

    def stop_one(self, container: Container, then: Callback) -> None:
        """Stop only this container, which will start again."""

        def ended() -> None:
            del self._single[container.spec.name]
            then()

        container.notify("restart", self._wall() + self._grace)
        ladder = Ladder(self._loop, [[container]], self._grace, ended, self._left)
        self._single[container.spec.name] = ladder
        ladder.step()

    def stops_one(self, name: str) -> bool:
        return name in self._single

    def step_one(self, name: str) -> bool:
        """Handle the end of this container. Return True if it was stopped alone."""
        ladder = self._single.get(name)
        if ladder is not None:
            ladder.step()
        return ladder is not None

    def stop(self, then: Callback, *, at_once: bool = False) -> None:
        """Stop all containers with a fresh grace, and call `then` once when the last has ended.

        With `at_once`, send SIGKILL first, so that no suspended process runs again.
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
        """Handle the end of a process. Return True if a stop is in progress."""
        ladder = self._ladder  # after its end another attempt may follow, without a ladder
        if ladder is not None:
            ladder.step()
        return ladder is not None

    def kill(self) -> bool:
        """Kill the containers that are being stopped. Return False if no stop is in progress."""
        if self._ladder is not None:
            self._ladder.kill()
        return self._ladder is not None

    def abandon(self) -> None:
        """Cancel the actions that would follow the current stops."""
        for ladder in (self._ladder, *self._single.values()):
            if ladder is not None:
                ladder.abandon()
        self._single.clear()

    def end_now(self) -> None:
        """End all processes by SIGKILL, daemons included, without recording their ends."""
        self.abandon()
        for container in self._pod.alive:
            container.ask(signal.SIGKILL)
            if container.process is not None:  # the sweep reaps it
                self._loop.remove(container.process.fileno())
        self._strays.end_now()

    def forget(self) -> None:
        """Forget the stop, because all processes have ended and another attempt starts."""
        self.notice = "stop"
        self._ladder = None
        self.asked_at = math.inf
