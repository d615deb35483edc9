"""What the product uses of `threading`, `concurrent.futures` and `time`, on greenlets of a World."""

from __future__ import annotations

import threading as real_threading
import time as real_time
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

from tests.simulated_ps.world import Killed, Task, World, current


def fake_time(world: World) -> SimpleNamespace:
    own = {
        name: getattr(real_time, name) for name in ("localtime", "strftime", "perf_counter", "thread_time")
    }
    return SimpleNamespace(
        monotonic=lambda: world.now,
        time=lambda: world.now + world.wall,
        sleep=lambda seconds: world.wait(None, seconds),
        **own,
    )


def fake_threading(world: World) -> SimpleNamespace:
    main = object()
    classes = {each.__name__: partial(each, world) for each in (Lock, Event, Condition, Thread)}
    return SimpleNamespace(
        **classes,
        local=real_threading.local,
        current_thread=current,
        main_thread=lambda: main,
        get_native_id=lambda: 0,
    )


def fake_futures(world: World) -> SimpleNamespace:
    return SimpleNamespace(
        Future=partial(Future, world),
        ThreadPoolExecutor=partial(ThreadPoolExecutor, world),
        wait=lambda futures: [future.over.wait() for future in futures],
    )


def _wake(waiters: list[Callable[[], None]]) -> None:
    woken = [*waiters]
    waiters.clear()
    for each in woken:
        each()


class Lock:
    """A lock that its owner may take again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: Task | None = None
        self._depth = 0
        self._waiters: list[Callable[[], None]] = []

    def acquire(self) -> bool:
        while self._owner not in (None, current()):
            self._world.wait(self._waiters, None)
        self._owner, self._depth = current(), self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            _wake(self._waiters)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Condition(Lock):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._notified: list[Callable[[], None]] = []

    def wait_for(self, predicate: Callable[[], bool]) -> bool:
        while not predicate():
            self.release()
            self._world.wait(self._notified, None)
            self.acquire()
        return True

    def notify(self) -> None:
        _wake(self._notified)

    notify_all = notify


class Event:
    def __init__(self, world: World) -> None:
        self._world = world
        self._set = False
        self._waiters: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        _wake(self._waiters)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else self._world.now + timeout
        while not self._set and (until is None or self._world.now < until):
            self._world.wait(self._waiters, None if until is None else until - self._world.now)
        return self._set


class Thread:
    def __init__(
        self, world: World, target: Callable[..., object], name: str = "", *, daemon: bool = False
    ) -> None:
        self.name, self._run = name, target
        self._over = Event(world)
        self._task: Task | None = None

    def start(self) -> None:
        starter = current()
        assert starter is not None
        self._task = starter.process.start(self.name, self._whole)

    def _whole(self) -> None:
        try:
            self._run()
        finally:
            self._over.set()

    def join(self, timeout: float | None = None) -> None:
        self._over.wait(timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._over.is_set()


class Future:
    def __init__(self, world: World) -> None:
        self.over = Event(world)
        self._value: Any = None
        self._error: Exception | None = None
        self._calls: list[Callable[[Any], None]] = []

    def done(self) -> bool:
        return self.over.is_set()

    def cancelled(self) -> bool:
        return False

    def exception(self) -> Exception | None:
        self.over.wait()
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        if not self.over.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value

    def add_done_callback(self, call: Callable[[Any], None]) -> None:
        if self.done():
            call(self)
        else:
            self._calls.append(call)

    def run(self, call: Callable[[], Any]) -> None:
        try:
            self._value = call()
        except Killed:
            raise
        except Exception as error:  # noqa: BLE001  # as a real one, which raises it in `result`
            self._error = error
        self.over.set()
        for each in self._calls:
            each(self)


class ThreadPoolExecutor:
    """Runs everything at once."""

    def __init__(self, world: World, most: int = 1, name: str = "", initializer: object = None) -> None:
        self._world, self._name = world, name
        self._futures: list[Future] = []

    def submit(self, call: Callable[..., Any], *args: Any) -> Future:
        future = Future(self._world)
        self._futures.append(future)
        starter = current()
        assert starter is not None
        starter.process.start(self._name, lambda: future.run(lambda: call(*args)))
        return future

    def map(self, call: Callable[..., Any], *args: Iterable[Any]) -> Iterable[Any]:
        futures = [self.submit(call, *each) for each in zip(*args, strict=False)]
        return (future.result() for future in futures)

    def shutdown(self, *, wait: bool = True) -> None:
        for future in self._futures if wait else ():
            future.over.wait()

    def __enter__(self) -> ThreadPoolExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
