"""Store and node as processes of their own, to be killed and stopped. What happens to them they print.

    python -m tests.elastic.actors host LEASE TOKEN GRACE    -> `at 127.0.0.1:4711`, then `nodes a b`
    python -m tests.elastic.actors node ENDPOINT NAME LEASE TOKEN
                                                            -> `up True`, `down ...`, `lost ...`, `sees a b`
A node writes `nodes/NAME` under its lease whenever that is a new one, and closes at the end of its input.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from fleetrun.elastic.embedded.keys import store_keys
from fleetrun.elastic.embedded.server import StoreServer
from fleetrun.elastic.embedded.store import ZmqStore
from fleetrun.elastic.stores.ledger import Ledger
from fleetrun.elastic.stores.memory_store import MemoryStore
from fleetrun.elastic.stores.store import Store
from fleetrun.errors import LaunchError
from fleetrun.pod.loop import Loop
from tests.support.waiting import eventually

_ROOT = Path(__file__).resolve().parents[2]


class Actor:
    """A process and what it has printed. Is killed at the end."""

    def __init__(self, folder: Path, *words: object) -> None:
        self._log = folder / f"actor-{time.monotonic_ns()}.log"
        with self._log.open("wb") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "tests.elastic.actors", *map(str, words)],
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


def host(lease: str, token: str, grace: str) -> None:
    loop = Loop()
    ledger = Ledger()
    keys = store_keys(token)
    server = StoreServer(ledger, loop, "127.0.0.1:0", job_id="job", lease=float(lease), keys=keys)
    server._service._grace = min(float(lease) / 4, float(grace))
    print("at", server.endpoint, flush=True)
    store = MemoryStore(ledger, loop, "host", lease=float(lease))
    store.watch("nodes/")
    store.open(_Speaker(store, "host", loop.stop))
    _run(loop)
    store.close()
    server.close()
    loop.close()


def node(endpoint: str, name: str, lease: str, token: str = "") -> None:
    loop = Loop()
    keys = store_keys(token)
    store = ZmqStore(loop, endpoint, job_id="job", node_id=name, lease=float(lease), keys=keys)
    store.watch("nodes/")
    store.open(_Speaker(store, name, loop.stop))
    _run(loop)
    store.close()
    loop.close()


def _run(loop: Loop) -> None:
    """Until the input ends."""
    loop.add(0, lambda: None if os.read(0, 100) else loop.stop())
    loop.run()


if __name__ == "__main__":
    {"host": host, "node": node}[sys.argv[1]](*sys.argv[2:])
