"""Where the nodes of `rendezvous.py` meet: the embedded store, an etcd, and torchrun's rendezvous."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from _rendezvous_job import BenchError, Figures

_HERE = Path(__file__).parent
_PATIENCE = 30.0
_COUNTERS = ("grpc_server_msg_received_total", "grpc_server_msg_sent_total")


class EmbeddedStore:
    kind = "embedded"

    def __init__(self, lease: float) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, str(_HERE / "_rendezvous_store.py"), str(lease)], stdout=subprocess.PIPE
        )
        assert self._popen.stdout is not None
        self.url = self._popen.stdout.readline().decode().strip()
        self.pid = self._popen.pid

    def messages(self) -> None:
        """The nodes count them."""

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate()


class Etcd:
    """A single member with its data in memory, where there is a /dev/shm: no disk is measured."""

    kind = "etcd"

    def __init__(self, lease: float) -> None:
        self._folder = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        port, peer = _free_port(), _free_port()
        here, other = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
        with (Path(self._folder) / "log").open("wb") as log:
            self._popen = subprocess.Popen(
                [
                    "etcd", "--data-dir", f"{self._folder}/data", "--listen-client-urls", here,
                    "--advertise-client-urls", here, "--listen-peer-urls", other,
                    "--initial-advertise-peer-urls", other, "--initial-cluster", f"default={other}",
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        self.url = f"etcd://127.0.0.1:{port}"
        self.pid = self._popen.pid
        self._await(port)

    @staticmethod
    def version() -> str:
        return (
            subprocess.check_output(["etcd", "--version"], text=True).splitlines()[0].replace(" Version:", "")
        )

    def messages(self) -> int:
        """Of all calls and watches over its gateway, as its metrics have it."""
        with urllib.request.urlopen(self.url.replace("etcd", "http", 1) + "/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(int(float(line.split()[-1])) for line in lines if line.startswith(_COUNTERS))

    def close(self) -> None:
        self._popen.kill()
        self._popen.wait()
        shutil.rmtree(self._folder)

    def _await(self, port: int) -> None:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline and self._popen.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                return
            except OSError:
                time.sleep(0.02)
        raise BenchError("etcd did not start")


def torchrun(nodes: int) -> Figures:
    """torch.distributed.elastic's dynamic rendezvous of so many nodes."""
    command = [sys.executable, str(_HERE / "_rendezvous_torch.py"), str(nodes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=900)
    told = json.loads(done.stdout.splitlines()[-1])
    return {"met": None if told["errors"] else told["met"], "nodes_cpu": told["cpu"]}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
