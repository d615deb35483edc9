"""An etcd of Debian's etcd-server that can die and come back as it was."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from pathlib import Path

_PATIENCE = 30.0


class Etcd:
    """A single member, its data in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._port, self._peer = free_port(), free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"etcd://127.0.0.1:{self._port}"

    @staticmethod
    def version() -> str:
        told = subprocess.check_output(["etcd", "--version"], text=True)
        return told.splitlines()[0].replace(" Version:", "")

    def start(self) -> None:
        """Returns when it answers. Raises TimeoutError."""
        here, peer = f"http://127.0.0.1:{self._port}", f"http://127.0.0.1:{self._peer}"
        with (self._folder / "log").open("ab") as log:
            self._popen = subprocess.Popen(
                [
                    "etcd", "--data-dir", f"{self._folder}/data", "--listen-client-urls", here,
                    "--advertise-client-urls", here, "--listen-peer-urls", peer,
                    "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        deadline = time.monotonic() + _PATIENCE
        while not self._answers():
            if time.monotonic() > deadline or self._popen.poll() is not None:
                raise TimeoutError("etcd did not start")
            time.sleep(0.02)

    def _answers(self) -> bool:
        """It has a leader too."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=1.0) as answer:
                return b'"true"' in answer.read()
        except OSError:
            return False

    def die(self) -> None:
        """By SIGKILL."""
        self._popen.kill()
        self._popen.wait()

    close = die


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def listens(port: int) -> bool:
    """Whether anybody does on this machine: without a connection, which a server might take for a client."""
    wanted = f"{port:04X}"
    tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return any(row[1].endswith(f":{wanted}") and row[3] == "0A" for row in rows)
