"""fleetrun as it runs on a cluster: the real command on several hosts (see `hosts.py`), which meet at the
first of them.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import netns
from tests.support.command import FLEETRUN, Fleetrun, Launch
from tests.support.etcd import no_fsync
from tests.support.hosts import Host, hosts

PORT = 6768
needs_etcd = pytest.mark.skipif(
    not (shutil.which("etcd") and shutil.which("etcdctl")),
    reason="not installed: etcd (Debian: etcd-server etcd-client)",
)


class Nodes:
    """Of each host its fleetrun. At the end nothing may be left of any launch."""

    def __init__(self, found: Sequence[Host]) -> None:
        self.hosts = found
        self.master = f"{found[0].address}:{PORT}"
        self.commands = [Fleetrun(host.folder, FLEETRUN, host.enter) for host in found]

    def script(self, text: str, name: str = "train.py") -> None:
        """On every host a file that begins with all of `telling`."""
        for command in self.commands:
            command.script(text, name)

    def start(
        self, number: int, *words: str, nnodes: str = "3", script: str = "train.py", master: str = "",
        **options: Any,
    ) -> Launch:  # fmt: skip
        """Without restarts, unless the words say otherwise."""
        common = ("--nnodes", nnodes, "--master", master or self.master, "--max_restart", "0")
        return self.commands[number].start(*common, *words, script, **options)

    def start_all(self, *words: str, nnodes: str = "", **options: Any) -> list[Launch]:
        """The same on every host, each with the rank of its host."""
        count = len(self.hosts)
        return [
            self.start(number, "--rank", str(number), *words, nnodes=nnodes or str(count), **options)
            for number in range(count)
        ]

    def title(self, number: int) -> str:
        """How messages call a node."""
        return f"{self.hosts[number].name} ({self.hosts[number].address})"


class Etcd:
    """One that runs on a host. What it keeps survives its process."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.here = f"{host.address}:2379"
        self.url = f"etcd://{self.here}"
        self.start()

    def start(self) -> None:
        """Once more, after `kill`."""
        here, peers = f"http://{self.here}", "http://127.0.0.1:2380"
        self._running = self._host.start([
            "etcd", "--data-dir", "etcd", "--listen-client-urls", here, "--advertise-client-urls", here,
            "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers,
            "--initial-cluster", f"default={peers}", *no_fsync(),
        ])  # fmt: skip
        self._running.until_err("serving")

    def kill(self) -> None:
        self._running.send(signal.SIGKILL)
        self._running.wait()

    def keys(self) -> list[str]:
        return self._ask("get", "--prefix", "--keys-only", "/").split()

    def put(self, key: str) -> None:
        self._ask("put", key, "x")

    def expire(self, host: Host) -> None:
        """End the lease of the launcher that has gone there, as its time would: nobody waits for that."""
        for row in json.loads(self._ask("get", "--prefix", "/fleetrun/", "--write-out=json"))["kvs"]:
            key, value = b64decode(row["key"]), b64decode(row["value"])
            if b"/nodes/" in key and json.loads(value)["host"] == host.address:
                self._ask("lease", "revoke", f"{row['lease']:x}")

    def _ask(self, *words: str) -> str:
        etcdctl = ("env", "ETCDCTL_API=3", "etcdctl", f"--endpoints={self.here}")
        patience = ("--dial-timeout=60s", "--command-timeout=60s")
        return netns.run(*self._host.enter, *etcdctl, *patience, *words)


@contextmanager
def nodes(count: int, folder: Path) -> Iterator[Nodes]:
    with hosts(count, folder) as found, ExitStack() as stack:
        made = Nodes(found)
        for command in made.commands:
            stack.enter_context(command)
        yield made


def ready(launches: Sequence[Launch], times: int = 1) -> list[int]:
    """Until on each so many scripts have said "ready"; the pid of the first on each."""
    return [launch.until_ready(times)[0] for launch in launches]


_STORE = r"rendezvous"
_LOST = rf"Watching Pod.*?\nLAUNCH WARNING [^\n]*{_STORE}"


def until_store_lost(launch: Launch) -> None:
    """Until it warns that it lost its store. It may also warn before the store is up: that does not count."""
    launch.until(lambda: re.search(_LOST, launch.err, re.DOTALL), "a warning about the store")


def until_store_back(launch: Launch) -> None:
    pattern = rf"{_LOST}.*?\nLAUNCH INFO [^\n]*{_STORE}"
    launch.until(lambda: re.search(pattern, launch.err, re.DOTALL), "the store is back")


def go(launches: Sequence[Launch]) -> None:
    for launch in launches:
        launch.go()


def codes(launches: Sequence[Launch], bound: float = 100.0) -> list[int]:
    """Exit codes, once all have ended."""
    return [launch.wait(bound) for launch in launches]
