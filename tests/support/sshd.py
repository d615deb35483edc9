"""A real sshd on loopback addresses: own keys, own configuration, free port. Ends with its sessions."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.command import environment
from tests.support.ports import free_port
from tests.support.waiting import eventually

PACKAGES = "openssh-server openssh-client"
_SSHD = "/usr/sbin/sshd"
_SERVER = """
Port {port}
{addresses}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 100
LogLevel VERBOSE
"""
_OF_ADDRESS = """
Match LocalAddress {address}
    SetEnv XDG_CACHE_HOME={folder}/{address}
"""
_CLIENT = """
Host *
    Port {port}
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    StrictHostKeyChecking yes
"""


def missing() -> str:
    """Why there can be no sshd here; empty when there can."""
    if os.getuid() != 0:
        return "only root can give an sshd the key of this user"
    lacking = [name for name in (_SSHD, "ssh", "ssh-keygen") if shutil.which(name) is None]
    return f"not installed: {', '.join(lacking)} (packages {PACKAGES})" if lacking else ""


class Sshd:
    """Listening at `addresses`. `config` is for `ssh -F`: it knows the port and all keys."""

    def __init__(self, folder: Path, addresses: Sequence[str]) -> None:
        self.folder = folder
        self.addresses = tuple(addresses)
        self.port = free_port(addresses)
        self.config = folder / "ssh_config"
        self._daemon: subprocess.Popen[bytes] | None = None
        for name in ("host_key", "user_key"):
            _new_key(folder / name)
        self.trust(folder / "host_key.pub")
        self.config.write_text(_CLIENT.format(port=self.port, folder=folder))
        listen = "\n".join(f"ListenAddress {address}" for address in addresses)
        text = _SERVER.format(port=self.port, folder=folder, addresses=listen)
        text += "".join(_OF_ADDRESS.format(address=address, folder=folder) for address in addresses)
        (folder / "sshd_config").write_text(text)

    def trees(self, address: str) -> Path:
        """Where a host keeps what --sync has sent."""
        return self.folder / address / "fleetrun" / "code"

    def trust(self, key: Path) -> None:
        """The client knows this key, and no other, as the host's."""
        kind, text = key.read_text().split()[:2]
        lines = [f"[{address}]:{self.port} {kind} {text}\n" for address in self.addresses]
        (self.folder / "known_hosts").write_text("".join(lines))

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it separates its privileges
        with (self.folder / "sshd.log").open("ab") as log:
            self._daemon = subprocess.Popen(
                [_SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")],
                env=environment({"SSHD_OF_TEST": str(self.folder)}),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        eventually(self._listens)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self.addresses[0], self.port)) == 0

    def sessions(self) -> list[int]:
        """The server's processes for connections, one or two each."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and entry.name != str(self._pid) and self._is_ours(entry):
                    found.append(int(entry.name))
        return found

    def _is_ours(self, entry: Path) -> bool:
        mark = f"SSHD_OF_TEST={self.folder}".encode()
        return mark in (entry / "environ").read_bytes() or (
            (entry / "comm").read_text() == "sshd\n" and self._below(int(entry.name))
        )

    def _below(self, pid: int) -> bool:
        while pid > 1:
            if pid == self._pid:
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return False

    @property
    def _pid(self) -> int:
        return self._daemon.pid if self._daemon is not None else -1

    def freeze(self) -> list[int]:
        """Stop every session, as if the network swallowed all packets; their pids."""
        pids = self.sessions()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    def kill_sessions(self) -> None:
        for pid in self.sessions():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        if self._daemon is not None:
            self.kill_sessions()
            self._daemon.kill()
            self._daemon.wait()


def _new_key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)


@contextlib.contextmanager
def sshd(addresses: Sequence[str] = ("127.0.0.1", "127.0.0.2")) -> Iterator[Sshd]:
    """A server that lets this user in; nothing of it is left afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="sshd-"))
    server = Sshd(folder, addresses)
    try:
        server.start()
        yield server
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)
