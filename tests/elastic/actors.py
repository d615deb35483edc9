"""A store and a node as separate processes, to be killed and stopped. They print what happens to them.

    python -m tests.elastic.actors CLOCK PLACE host ENDPOINT LEASE TOKEN GRACE
                                                            -> `at 127.0.0.1:4711`, then `sees a b`
    python -m tests.elastic.actors CLOCK PLACE node ENDPOINT NAME LEASE TOKEN
                                                            -> `up True`, `down ...`, `lost ...`, `sees a b`
A node writes `nodes/NAME` under its lease whenever that is a new one, and closes at the end of its input. The
file CLOCK has the time that all of them share, at PLACE what this one has seen (`support/shared_clock.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from fleetrun.elastic.embedded.client import ZmqStore
from fleetrun.elastic.embedded.server import StoreServer
from fleetrun.elastic.embedded.sockets import store_keys
from fleetrun.elastic.memory_store import MemoryStore
from fleetrun.elastic.store import Ledger, Store
from fleetrun.errors import LaunchError
from fleetrun.pod.loop import Loop
from tests.support.shared_clock import LOOK_EVERY, Shared, SharedClock
from tests.support.waiting import eventually, state_of

_ROOT = Path(__file__).resolve().parents[2]


class Actor:
    """A process and what it has printed. Is killed at the end. `clock` keeps its time in `folder`/clock."""

    def __init__(self, folder: Path, clock: SharedClock, *words: object) -> None:
        self._log = folder / f"actor-{time.monotonic_ns()}.log"
        self._clock = clock
        self._place = clock.place()
        told = (folder / "clock", self._place, *words)
        with self._log.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tests.elastic.actors", *map(str, told)],
                cwd=_ROOT, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self) -> Actor:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.popen.kill()
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.wait()
        if kind is not None:
            print(f"--- {self.popen.args}\n{self._log.read_text()}")

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def said(self, start: str) -> list[str]:
        """What followed this word, each time."""
        return [line[len(start) + 1 :] for line in self.lines if line.startswith(f"{start} ")]

    def wait_for(self, line: str) -> None:
        """Until this is its last line."""
        eventually(lambda: self.lines[-1:] == [line])

    def kill(self) -> None:
        self._clock.leave(self._place)
        self.popen.kill()

    def stop(self) -> None:
        """Returns when it is suspended; the clock continues."""
        self.popen.send_signal(signal.SIGSTOP)
        eventually(lambda: state_of(self.popen.pid) == "T")
        self._clock.leave(self._place)

    def go_on(self) -> None:
        self._clock.join(self._place)
        self.popen.send_signal(signal.SIGCONT)

    def finish(self) -> None:
        """End its input, and wait for it."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.wait(60)


class _Speaker:
    """A listener that prints, and keeps its own key alive."""

    def __init__(self, store: Store, name: str, stop: Callable[[], None]) -> None:
        self._store = store
        self._name = name
        self._stop = stop

    def changed(self) -> None:
        names = sorted(key.removeprefix("nodes/") for key in self._store.mirror)
        print("sees", *names, flush=True)

    def up(self, *, fresh: bool) -> None:
        print("up", fresh, flush=True)
        if fresh:
            self._store.put(f"nodes/{self._name}", b"", leased=True)

    def down(self, why: str) -> None:
        print("down", why, flush=True)

    def lost(self, error: LaunchError) -> None:
        print("lost", error, flush=True)
        self._stop()


def host(clock: Shared, endpoint: str, lease: str, token: str, grace: str) -> None:
    loop = Loop(clock)
    ledger = Ledger()
    keys = store_keys(token)
    server = StoreServer(ledger, loop, endpoint, job_id="job", lease=float(lease), keys=keys)
    server._service._grace = min(float(lease) / 4, float(grace))
    print("at", server.endpoint, flush=True)
    store = MemoryStore(ledger, loop, "host", lease=float(lease))
    store.watch("nodes/")
    store.open(_Speaker(store, "host", loop.stop))
    _run(loop)
    store.close()
    server.close()
    loop.close()


def node(clock: Shared, endpoint: str, name: str, lease: str, token: str = "") -> None:
    loop = Loop(clock)
    keys = store_keys(token)
    store = ZmqStore(loop, endpoint, job_id="job", node_id=name, lease=float(lease), keys=keys)
    store.watch("nodes/")
    store.open(_Speaker(store, name, loop.stop))
    _run(loop)
    store.close()
    loop.close()


def _run(loop: Loop) -> None:
    """Until the input ends."""

    def look() -> None:
        loop.after(LOOK_EVERY, look)

    look()
    loop.add(0, lambda: None if os.read(0, 100) else loop.stop())
    loop.run()


if __name__ == "__main__":
    _clock = Shared(Path(sys.argv[1]), int(sys.argv[2]))
    {"host": host, "node": node}[sys.argv[3]](_clock, *sys.argv[4:])
    _clock.end()
