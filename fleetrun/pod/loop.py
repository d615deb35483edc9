"""Run handlers for readable files, signals and deadlines in one loop, which sleeps until there is a cause.

Handlers run in the order in which the kernel saw the events, because epoll keeps its ready list in order of
arrival. If two processes died before the loop woke up, the first one is handled first. A deadline comes after
all earlier events, however late the loop is. A process that ended in time therefore counts as in time.
"""

from __future__ import annotations

import heapq
import itertools
import select
import time

from fleetrun.aliases import Callback, Clock

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
_MAX_EVENTS = 4096
_LONGEST = 86_400.0  # seconds; epoll counts milliseconds in 32 bits, which is 24 days


class Timer:
    """A deadline that you can cancel. Without a handler, no deadline is set."""

    __slots__ = ("_handler",)

    def __init__(self, handler: Callback | None = None) -> None:
        self._handler = handler

    def cancel(self) -> None:
        self._handler = None

    def fire(self) -> None:
        if self._handler is not None:
            handler, self._handler = self._handler, None
            handler()

    @property
    def pending(self) -> bool:
        return self._handler is not None


class Loop:
    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._epoll = select.epoll()
        self._handlers: dict[int, Callback] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()
        self._running = False

    def add(self, fd: int, handler: Callback, events: int = READ) -> None:
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def remove(self, fd: int) -> None:
        """Stop watching a descriptor, before you close it. Unknown descriptors are ignored."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def after(self, seconds: float, handler: Callback) -> Timer:
        timer = Timer(handler)
        heapq.heappush(self._timers, (self.clock() + seconds, next(self._sequence), timer))
        return timer

    def postpone(self, seconds: float) -> None:
        """Move every deadline by `seconds`, for the time that this process was stopped."""
        self._timers = [(when + seconds, number, timer) for when, number, timer in self._timers]

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        """Run until `stop`."""
        self._running = True
        while self._running:
            # before the poll, because a deadline that passes during a handler must come after its event
            now = self.clock()
            for fd, _ in self._epoll.poll(self._patience(now), _MAX_EVENTS):
                handler = self._handlers.get(fd)  # an earlier handler may have removed it
                if handler is not None and self._running:
                    handler()
            self._fire_timers(now)

    def close(self) -> None:
        self._epoll.close()

    def _patience(self, now: float) -> float:
        while self._timers and not self._timers[0][2].pending:
            heapq.heappop(self._timers)
        return min(_LONGEST, max(0.0, self._timers[0][0] - now)) if self._timers else -1

    def _fire_timers(self, now: float) -> None:
        while self._running and self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].fire()
