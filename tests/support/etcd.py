"""Real etcd servers, of Debian's package etcd-server: on free ports of the loopback interface, their data
in a folder. They can be killed, stopped for a while, and started again as they were.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.cluster import reserved_endpoints
from tests.support.waiting import eventually, state_of

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="etcd is not installed: apt-get install etcd-server"
)
needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not installed: apt-get install openssl"
)

_READY = "serving client traffic"


@cache
def no_fsync() -> tuple[str, ...]:
    """The hidden option by which an etcd waits for no disk, where the one that is installed knows it: what
    was written survives the process then, but not the machine.
    """
    option = "--unsafe-no-fsync"
    tried = subprocess.run(["etcd", option, "--version"], check=False, capture_output=True, timeout=100)
    return () if tried.returncode else (option,)


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: an authority, and certificates that it gave to a server on 127.0.0.1 and to a client."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> Certificates:
        folder.mkdir(parents=True)
        _openssl(folder, "ca", "-addext", "keyUsage=critical,keyCertSign")
        for name in ("server", "client"):
            _openssl(
                folder, name, "-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE",
                "-addext", "subjectAltName=IP:127.0.0.1",
            )  # fmt: skip
        return cls(folder)

    def __getitem__(self, name: str) -> str:
        """`ca.pem`, `client.key` ...: its path."""
        return str(self.folder / name)


def _openssl(folder: Path, name: str, *options: str) -> None:
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem", *options,
    ]  # fmt: skip
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)


@dataclass(slots=True)
class Etcd:
    """One member. Election and heartbeat are fast where nobody else has a say in them."""

    name: str
    folder: Path
    endpoint: str
    peer: str
    cluster: str
    certificates: Certificates | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"etcd://{self.endpoint}"

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    def start(self) -> None:
        """Returns at once."""
        scheme = "https" if self.certificates else "http"
        command = [
            "etcd", "--name", self.name, "--data-dir", str(self.folder / "data"), "--logger", "zap",
            "--listen-client-urls", f"{scheme}://{self.endpoint}",
            "--advertise-client-urls", f"{scheme}://{self.endpoint}",
            "--listen-peer-urls", f"http://{self.peer}", "--initial-advertise-peer-urls", f"http://{self.peer}",
            "--initial-cluster", self.cluster, *self._options(), *no_fsync(),
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)

    def _options(self) -> Iterator[str]:
        if "," not in self.cluster:
            yield from ("--heartbeat-interval", "20", "--election-timeout", "200")
        if self.certificates is not None:
            for option, name in (
                ("--trusted-ca-file", "ca.pem"),
                ("--cert-file", "server.pem"),
                ("--key-file", "server.key"),
            ):
                yield from (option, self.certificates[name])
            yield "--client-cert-auth"

    def wait(self) -> None:
        """Until it answers."""
        eventually(self._is_ready, within=60)

    def _is_ready(self) -> bool:
        assert self._process is not None
        log = self._log.read_text(errors="replace")
        assert self._process.poll() is None, log
        return _READY in log

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Returns when it stands still."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        eventually(lambda: all(state_of(int(thread.name)) == "T" for thread in threads.iterdir()))

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        """Its data are lost. It must not run."""
        shutil.rmtree(self.folder / "data")

    def ask(self, path: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
        """Without any client; no TLS."""
        answer = self._post(path, body, token)
        assert answer.ok, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def revoke(self, lease: str) -> None:
        """It ends now, if it has not done so before."""
        answer = self._post("/lease/revoke", {"ID": lease})
        assert answer.ok or "lease not found" in answer.text, answer.text

    def _post(self, path: str, body: dict[str, Any], token: str = "") -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False
            if token:
                session.headers["Authorization"] = token
            return session.post(f"http://{self.endpoint}/v3{path}", json=body, timeout=60)


@contextmanager
def etcd_cluster(
    folder: Path, size: int = 1, certificates: Certificates | None = None
) -> Iterator[Sequence[Etcd]]:
    """Members that answer."""
    with ExitStack() as stack:
        endpoints = stack.enter_context(reserved_endpoints(2 * size))
        names = [f"m{number}" for number in range(size)]
        cluster = ",".join(
            f"{name}=http://{peer}" for name, peer in zip(names, endpoints[size:], strict=True)
        )
        members = []
        for name, endpoint, peer in zip(names, endpoints, endpoints[size:], strict=False):
            (folder / name).mkdir(parents=True)
            member = Etcd(name, folder / name, endpoint, peer, cluster, certificates)
            member.start()
            stack.callback(member.kill)
            members.append(member)
        for member in members:
            member.wait()
        yield members
