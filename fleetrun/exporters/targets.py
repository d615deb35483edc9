"""Prepare the targets of exports: the directory of --tensorboard, and the socket of --metrics_port."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from fleetrun.envs.contract import split_endpoint
from fleetrun.errors import PortError, UsageError
from fleetrun.host.network import Ports


def check_folder(name: str) -> Path:
    """Create the directory if necessary. Raises UsageError if it is not writable."""
    path = Path(name).absolute()
    if "://" in name:
        raise UsageError(
            f"--tensorboard {name} must be a local directory",
            hint="Use a local directory, and copy or mount it.",
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "this is not a directory" if error.errno in (errno.EEXIST, errno.ENOTDIR) else error.strerror
        raise UsageError(f"--tensorboard {name} cannot be used: {why}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--tensorboard {name} cannot be used: no permission to write there")
    return path


def listening_socket(host: str, port: int, ports: Ports, endpoints: Iterable[str]) -> socket.socket:
    """Return a listening socket. Port 0 takes any free port.

    `ports` reserves the port. `endpoints` are the endpoints of the job. Raises UsageError for an address of
    another host, and PortError for a port in use.
    """
    if port and port in {split_endpoint(each)[1] for each in endpoints if each}:
        raise PortError(f"--metrics_port {port} is a port of this job", hint="Choose another port.")
    try:
        number = ports.fixed(port) if port else ports.any()
    except PortError as error:
        hint = " ".join(filter(None, (error.hint, "With 0, fleetrun chooses a free port.")))
        raise PortError(f"--metrics_port: {error.message}", hint=hint) from None
    try:
        found = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a valid host name"
        raise UsageError(f"--metrics_host {host} has no address: {why}") from None
    family, _, _, _, address = found[0]
    try:
        # It sets SO_REUSEADDR, and so binds although `ports` holds the port.
        both = family is socket.AF_INET6
        return socket.create_server(address, family=family, backlog=64, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--metrics_host {host} is not an address of this node") from None
        why = os.strerror(error.errno or 0)
        raise PortError(f"--metrics_port: port {number} of {host} cannot be used: {why}") from None


def metrics_url(sock: socket.socket) -> str:
    """Return `http://127.0.0.1:9100/metrics`."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"
