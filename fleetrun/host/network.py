"""Find the addresses of this node, and reserve ports until their processes bind them. Linux only.

A reservation is a bound socket that never listens. The kernel excludes its port from binds to port 0 and from
outgoing connections. A process that sets SO_REUSEADDR can still bind the port and listen on it, also after a
restart. TCPStore, zmq, gRPC, http.server and brpc set it.

TCP alone would let two launchers share the port. Each reservation therefore also binds a name in the abstract
unix namespace, which belongs to the same network namespace. Other launchers see the name.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fleetrun.aliases import Strings
from fleetrun.errors import PortError, ReservedPortError, UsageError

LOOPBACK = "127.0.0.1"
RESERVED = "reserved by another fleetrun"
_TAKEN = "End the program that uses the port, or choose another port."


class Ports:
    """The ports that this launcher holds until `close`."""

    def __init__(self, port_range: tuple[int, int] | None = None) -> None:
        self._range = port_range
        self._held: dict[int, tuple[socket.socket, socket.socket]] = {}

    def any(self) -> int:
        """Reserve a free port of the range, or else one that the kernel chooses. Raises PortError if all are
        in use.
        """
        for port in self._candidates():
            taken = self._try(port)
            if isinstance(taken, int):
                return taken
        if self._range is None:
            raise PortError(f"the kernel has no free port; this job holds {len(self._held)} ports")
        low, high = self._range
        raise PortError(
            f"PORT_RANGE={low}:{high} has no free port; this job holds {len(self._held)} of its ports",
            hint="Set a larger PORT_RANGE, or unset it.",
        )

    def fixed(self, port: int) -> int:
        """Reserve exactly this port. Raises PortError, which names the process that holds the port."""
        if port in self._held:
            raise PortError(f"this job needs port {port} twice")
        taken = self._try(port)
        if isinstance(taken, int):
            return taken
        if taken == os.strerror(errno.EACCES):
            raise PortError(f"this user may not use port {port}: {taken}", hint="Choose a port above 1023.")
        reserved = _reserving_launcher(port)
        if reserved or taken == RESERVED:
            raise ReservedPortError(f"port {port} is taken: {reserved or taken}", hint=_TAKEN)
        raise PortError(f"port {port} is taken: {_process_on(port) or taken}", hint=_TAKEN)

    def close(self) -> None:
        for pair in self._held.values():
            for each in pair:
                each.close()
        self._held.clear()

    def _candidates(self) -> Iterator[int]:
        if self._range is None:
            yield from (0 for _ in range(100))
            return
        ports = range(self._range[0], self._range[1] + 1)
        start = int.from_bytes(os.urandom(4)) % len(ports)
        yield from (port for port in [*ports[start:], *ports[:start]] if port not in self._held)

    def _try(self, port: int) -> int | str:
        """Reserve the port and return its number, or return the reason for the failure."""
        holder = _bind(port)
        if not isinstance(holder, socket.socket):
            return holder
        port = holder.getsockname()[1]
        name = _claim(port)
        if name is None:
            holder.close()
            return RESERVED
        self._held[port] = (holder, name)
        return port


def _bind(port: int) -> socket.socket | str:
    """Bind a socket for both address families and return it, or return the reason for the failure.

    If any port will do, bind without SO_REUSEADDR. With SO_REUSEADDR, the kernel would also offer a port that
    somebody else has reserved.
    """
    holder = _tcp_socket()
    try:
        if port:
            holder.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # TIME_WAIT of an earlier run does not matter
        holder.bind(("", port))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        holder.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise PortError(f"cannot reserve a port: {error.strerror}") from None
        return error.strerror or "taken"
    return holder


def _tcp_socket() -> socket.socket:
    try:
        holder = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        raise PortError(f"cannot reserve a port: {error.strerror}", hint="See `ulimit -n`.") from None
    holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    return holder


def _lock_name(port: int) -> str:
    return f"\0fleetrun-port-{port}"


def _claim(port: int) -> socket.socket | None:
    try:
        name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise PortError(f"cannot reserve port {port}: {error.strerror}", hint="See `ulimit -n`.") from None
    try:
        name.bind(_lock_name(port))
        name.listen(1)  # so that others can see which job holds the port
    except OSError:
        name.close()
        return None
    return name


def _reserving_launcher(port: int) -> str | None:
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ask:
        ask.settimeout(0.2)
        try:
            ask.connect(_lock_name(port))
        except (BlockingIOError, TimeoutError):  # many others are connecting, so the queue is full
            return RESERVED
        pid, _, _ = struct.unpack("3i", ask.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return f"{RESERVED}, process {pid}"
    return None


def _process_on(port: int) -> str | None:
    """Describe the process that holds the port, as far as this user may see it."""
    import psutil

    with suppress(psutil.Error):
        for connection in psutil.net_connections("inet"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                with suppress(psutil.Error):
                    name = psutil.Process(connection.pid).name()
                    state = (
                        "listens on this port"
                        if connection.status == psutil.CONN_LISTEN
                        else "has a connection from this port"
                    )
                    return f"process {connection.pid} ({name}) {state}"
    return "by a process of another user" if os.getuid() else None


def ports_in_use() -> set[int]:
    """Return the ports of listening processes in this network namespace, and the ports at both ends of each
    connection.

    Connections that ended within the last minute count too. Source: the kernel's /proc/net/tcp and tcp6.
    """
    ports: set[int] = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                ports.update(int(end.rpartition(":")[2], 16) for end in line.split()[1:3])
    return ports


def is_this_host(host: str) -> bool:
    """Return True if `host`, a name or an address, is one of this node's own.

    The kernel decides: it sends to such an address from the same address. The kernel may allow a program to
    bind to any address (ip_nonlocal_bind).
    """
    try:
        asked = host.encode() if host.isascii() else host  # text would be turned by a codec, slow to import
        found = socket.getaddrinfo(asked, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, (address, *_) in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect((address, 9))  # sends nothing
            if probe.getsockname()[0] in (address, "127.0.0.1") or address in ("0.0.0.0", "::"):
                return True
    return False


def accepts(host: str, port: int, within: float) -> bool:
    """Return True if a connection to the port succeeds within so many seconds."""
    deadline = time.monotonic() + within
    while (left := deadline - time.monotonic()) > 0:
        with suppress(OSError), socket.create_connection((host, port), left):
            return True
        time.sleep(min(0.1, left))
    return False


def same_host(one: str, other: str) -> bool:
    """Return True if two names or addresses have an address in common."""
    return not set(host_addresses(one)).isdisjoint(host_addresses(other))


def host_addresses(host: str) -> Strings:
    """Return the addresses of a host name, or an empty tuple if it cannot be resolved."""
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError for a name that is invalid in DNS
        return ()
    return tuple(dict.fromkeys(str(row[4][0]) for row in rows))


def source_address(host: str) -> str | None:
    """Return the address that this node would use to reach `host`. Sends no packet."""
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def address_of(nic: str) -> str:
    """Return the first address of a network interface, IPv4 before IPv6. Raises UsageError if it has no
    address.
    """
    found = _interfaces()
    if nic not in found:
        raise UsageError(
            f"--nic {nic}: this network interface does not exist", hint=f"This node has {', '.join(found)}."
        )
    if not found[nic]:
        raise UsageError(f"--nic {nic}: this network interface has no address")
    return found[nic][0]


def addresses() -> list[str]:
    """Return all addresses of this node, with loopback last."""
    found = [each for rows in _interfaces().values() for each in rows]
    return sorted(found, key=lambda each: each in (LOOPBACK, "::1"))


def _interfaces() -> dict[str, list[str]]:
    import psutil  # late: the import takes 37 ms, and only multi-node jobs need it

    families = (socket.AF_INET, socket.AF_INET6)
    found = {}
    for name, rows in psutil.net_if_addrs().items():
        usable = [row for row in rows if row.family in families and not row.address.startswith("fe80:")]
        usable.sort(key=lambda row: families.index(row.family))
        found[name] = [row.address.partition("%")[0] for row in usable]
    return found
