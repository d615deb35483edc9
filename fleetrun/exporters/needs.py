"""What has to be there before a job starts whose progress is to be written elsewhere: a folder, a port. On
the launcher's side; starts nothing.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fleetrun.envs.network import Ports, split_endpoint
from fleetrun.errors import LaunchError, PortError, UsageError


def check_folder(name: str) -> Path:
    """The folder, made if need be. Raises UsageError for one that nothing can be written to."""
    path = Path(name).absolute()
    if "://" in name:
        raise UsageError(
            f"--tensorboard {name}: only folders of this machine can be written to",
            hint="Give a folder, and copy or mount it.",
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is no folder" if error.errno in (errno.EEXIST, errno.ENOTDIR) else error.strerror
        raise UsageError(f"--tensorboard {name} cannot be used: {why}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--tensorboard {name} cannot be used: this user may not write there")
    return path


def listening(host: str, port: int, ports: Ports, endpoints: Iterable[str]) -> socket.socket:
    """A socket that listens there; port 0 is any free one. `ports` reserves it, `endpoints` are the job's.

    Raises UsageError for an address that is not this machine's, PortError for a port that somebody has.
    """
    if port and port in {split_endpoint(each)[1] for each in endpoints if each}:
        raise PortError(f"--metrics_port {port} is a port of a process of this job", hint="Choose another.")
    try:
        number = ports.fixed(port) if port else ports.any()
    except PortError as error:
        hint = " ".join(filter(None, (error.hint, "0 takes any free port.")))
        raise PortError(f"--metrics_port: {error.message}", hint=hint) from None
    family, address = _resolved(host, number)
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(f"--metrics_port: no socket: {error.strerror}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # over the reservation
        sock.bind(address)
        sock.listen(64)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--metrics_host {host} is not an address of this machine") from None
        raise PortError(f"--metrics_port: port {number} of {host} is taken: {error.strerror}") from None
    return sock


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no machine can be called so"
        raise UsageError(f"--metrics_host {host} has no address: {why}") from None
    family, _, _, _, address = found[0]
    return family, address


def shown(sock: socket.socket) -> str:
    """`http://127.0.0.1:9100/metrics`"""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
