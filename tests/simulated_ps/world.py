"""Simulated processes and threads, and the clock that they share.

Each thread of the product is a greenlet here. A greenlet runs until it waits for something, or until it does
something that a kill could precede. The order of what happens at the same moment is drawn from the seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import greenlet


class Killed(greenlet.GreenletExit):
    """Ends all greenlets of a process that was killed. Nothing that they do meanwhile has an effect."""


class Stuck(AssertionError):
    """A simulation that does not end."""


class World:
    """The clock, the queue of what happens next, and all processes. `wall` is the time of the clocks of all
    nodes minus the monotonic time.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.wall = 1.7e9
        self.processes: list[Process] = []
        self.trace: list[str] = []
        self._queue: list[tuple[float, float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._hub = greenlet.getcurrent()

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now - 1000:.4f} {text}")

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        when = self.now + max(0.0, seconds)
        heapq.heappush(self._queue, (when, self.random.random(), next(self._count), call))

    def run(self, done: Callable[[], bool], *, within: float, most: int = 400_000) -> None:
        """Run until `done`. Raises Stuck after so many simulated seconds, or events."""
        limit, left = self.now + within, most
        while not done():
            if not self._queue or self._queue[0][0] > limit or not left:
                raise Stuck(f"not done {within:g} s later, with {most - left} events: {self.waiting()}")
            left -= 1
            self.now, *_, call = heapq.heappop(self._queue)
            call()

    def waiting(self) -> list[str]:
        """Describe the greenlets that are left."""
        return [f"{task.process.name}/{task.name}" for each in self.processes for task in each.tasks]

    def resume(self, task: Task, value: Any) -> None:
        assert greenlet.getcurrent() is self._hub
        if not task.dead:
            task.switch(*([value] if task else []))  # it is false before its start
        if task.dead:
            task.process.tasks.pop(task, None)

    def wait(self, waiters: list[Callable[[], None]] | None, seconds: float | None) -> bool:
        """Let the others continue. Return True if a call in `waiters` woke this greenlet, or False after so
        many seconds.
        """
        task = current()
        assert task is not None, "only a simulated thread can wait"
        task.process.check()
        pending = [True]

        def wake(value: bool) -> None:
            if pending:
                pending.clear()
                self.resume(task, value)

        if waiters is not None:
            waiters.append(lambda: self.after(0.0, lambda: wake(True)))
        if seconds is not None:
            self.after(seconds, lambda: wake(False))
        return bool(self._hub.switch())

    def step(self) -> None:
        """A moment at which the process may be killed, and others may run."""
        task = current()
        if task is None:
            return
        task.process.count_down()
        if self.random.random() < 0.3:
            self.wait(None, self.random.random() * 0.01)


class Task(greenlet.greenlet):
    """A thread of a simulated process."""

    def __init__(self, process: Process, name: str, run: Callable[[], object], hub: Any) -> None:
        super().__init__(run, hub)
        self.process = process
        self.name = name


def current() -> Task | None:
    found = greenlet.getcurrent()
    return found if isinstance(found, Task) and not _outside else None


_outside: list[str] = []
"""Names of what runs as if there were no simulation: nothing else runs meanwhile, and nothing fails."""


@contextmanager
def outside(name: str) -> Iterator[None]:
    _outside.append(name)
    try:
        yield
    finally:
        _outside.pop()


class Process:
    """A simulated process. `ended` is called once, with the error of its main thread or None, unless the
    process was killed: then with Killed.
    """

    def __init__(
        self,
        world: World,
        name: str,
        main: Callable[[], None],
        ended: Callable[[BaseException | None], None],
    ) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.tasks: dict[Task, None] = {}
        self.at_end: list[Callable[[], None]] = []
        """Called when the process ends in any way: what its kernel does then."""
        self.steps_left: int | None = None
        """Kill it after so many more steps."""
        self.idle = False
        """True while its main thread waits for messages."""
        self._ended = ended
        world.processes.append(self)
        self.main = self.start("main", lambda: self._main(main))

    def start(self, name: str, run: Callable[[], object]) -> Task:
        task = Task(self, name, run, self.world._hub)
        self.tasks[task] = None
        self.world.after(self.world.random.random() * 1e-4, lambda: self._begin(task))
        return task

    def check(self) -> None:
        if not self.alive:
            raise Killed

    def count_down(self) -> None:
        """Make a step, before which the process may be killed."""
        self.check()
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                self.kill()
                raise Killed

    def kill(self) -> None:
        self._end(Killed())

    def _begin(self, task: Task) -> None:
        if self.alive:
            self.world.resume(task, None)

    def _main(self, main: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            main()
        except Killed:
            return
        except Exception as found:  # noqa: BLE001  # the end of a process with an error
            error = found
        self.world.after(0.0, lambda: self._end(error))

    def _end(self, error: BaseException | None) -> None:
        if not self.alive:
            return
        self.alive = False
        self.world.processes.remove(self)
        self.world.note(f"{self.name} ended: {error!r}")
        for call in self.at_end:
            call()
        self.world.after(0.0, self._throw)
        self.world.after(0.0, lambda: self._ended(error))

    def _throw(self) -> None:
        for task in list(self.tasks):
            if not task.dead:
                task.throw(Killed)
        self.tasks.clear()


@contextmanager
def patched(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes of modules for a while."""
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    try:
        for place, name, value in places:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)
