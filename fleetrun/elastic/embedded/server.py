"""The embedded store: a ledger behind a zmq socket, inside the loop of the launcher that hosts it. Knows
sockets; leaves the conversation to `service`.
"""

from __future__ import annotations

import contextlib
import resource
import socket as socket_module
from collections import OrderedDict
from collections.abc import Callable, Sequence

import zmq

from fleetrun.elastic.embedded.gate import Gate
from fleetrun.elastic.embedded.keys import StoreKeys
from fleetrun.elastic.embedded.service import Sent, Service
from fleetrun.elastic.embedded.sockets import Context, Frames, Monitor, Watched, store_socket
from fleetrun.elastic.embedded.version import running_version
from fleetrun.elastic.stores.expiry import Expiry
from fleetrun.elastic.stores.ledger import Ledger
from fleetrun.envs.settings.parsing import join_endpoint, split_endpoint
from fleetrun.errors import StoreError
from fleetrun.pod.loop import Loop

_ANY = "*"
_NOTICE_EVERY_S = 10.0
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_LINGER_MS = 200
_SHARED_FROM = 64 << 10
_LARGE_VALUES = 4
_DESCRIPTORS = 1 << 16


class StoreServer:
    """Listens on `endpoint` (host:port, IPv6 in brackets; port 0: a free one) from now until `close`.

    An address is bound and no other. A name is bound at each address that it stands for, if those are this
    machine's; if one of them is loopback, as of a machine's own name in its own /etc/hosts, the others know
    another one: so then on all interfaces. `localhost` is loopback.

    With `keys` only who has the job's secret gets in. `notice` is told, at most once in 10 s, of those who
    were turned away. Raises StoreError when it cannot listen there.
    """

    def __init__(
        self,
        ledger: Ledger,
        loop: Loop,
        endpoint: str,
        *,
        job_id: str,
        lease: float,
        keys: StoreKeys | None = None,
        version: str | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        _allow_many_connections()
        self._loop = loop
        self._notice = notice
        self._noticed_at = -_NOTICE_EVERY_S
        self._refused = 0
        self._large: OrderedDict[int, tuple[bytes, zmq.Frame]] = OrderedDict()
        self._context: Context = zmq.Context()
        self._gate = Gate(loop, self._context, keys) if keys is not None else None
        socket = store_socket(self._context, lease, keys)
        try:
            self.endpoint = _bind(socket, endpoint)
        except StoreError:
            socket.close()
            self._close_context()
            raise
        self._service = Service(
            ledger, loop, self._send, job_id=job_id, version=version or running_version(), lease=lease
        )
        self._watched = Watched(loop, socket, self._receive, self._service.flush)
        self._monitor = Monitor(loop, socket, zmq.EVENT_DISCONNECTED | _FAILURES, self._happened)
        self._expiry = Expiry(ledger, loop, lease)

    @property
    def connected(self) -> int:
        """How many other nodes have a session."""
        return self._service.connected

    @property
    def refused(self) -> int:
        """Connections and messages that were turned away so far."""
        return self._refused + self._service.wrong

    def when_idle(self, call: Callable[[], None]) -> None:
        """Once, from the loop, as soon as no other node has a session: all said good-bye or were given up."""
        self._service.when_idle(call)

    def close(self) -> None:
        """What was said last has a moment to get out. Done twice is fine."""
        self._expiry.close()
        self._monitor.close()
        self._watched.close(_LINGER_MS)
        self._close_context()

    def _close_context(self) -> None:
        if self._gate is not None:
            self._gate.close()
        self._context.term()

    def _receive(self, frames: Frames) -> None:
        address, *rest = [frame.bytes for frame in frames]
        fd = int(frames[-1].get(zmq.SRCFD)) if self._service.fd_matters(address) else -1
        self._service.receive(address, fd, rest)
        self._watched.look_again()

    def _send(self, address: bytes, frames: Sequence[bytes]) -> Sent:
        """The first frame decides: after it, all others are taken."""
        socket = self._watched.socket
        if socket.closed:
            return Sent.GONE
        try:
            socket.send(address, zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.ZMQError as error:
            return Sent.FULL if error.errno == zmq.EAGAIN else Sent.GONE
        *leading, last = frames
        for frame in leading:
            socket.send(self._shared(frame), zmq.NOBLOCK | zmq.SNDMORE, copy=False)
        socket.send(self._shared(last), zmq.NOBLOCK, copy=False)
        self._watched.look_again()
        return Sent.YES

    def _shared(self, data: bytes) -> bytes | zmq.Frame:
        """A large value is copied once, however many read it."""
        if len(data) < _SHARED_FROM:
            return data
        known = self._large.get(id(data))
        if known is None:
            known = self._large[id(data)] = (data, zmq.Frame(data, copy=True))
            if len(self._large) > _LARGE_VALUES:
                self._large.popitem(last=False)
        return known[1]

    def _happened(self, event: int, value: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self._service.broken(value)
            return
        self._refused += 1
        now = self._loop.clock()
        if now - self._noticed_at >= _NOTICE_EVERY_S:
            self._noticed_at = now
            self._notice(
                f"the meeting point {self.endpoint} turned away {self._refused} connections so far: "
                "of no fleetrun, or without this job's token"
            )


def _allow_many_connections() -> None:
    """Each node is a connection. The usual limit of 1,024 is for programs that use select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Where it listens now. Raises StoreError."""
    host, port = split_endpoint(endpoint)
    failure = "the name has no address"
    bound = False
    for address in _own_addresses(host, endpoint):
        socket.setsockopt(zmq.IPV6, int(":" in address or address == _ANY))
        try:
            socket.bind(f"tcp://{join_endpoint(address, port)}")
        except zmq.ZMQError as error:
            failure = error.strerror or str(error)
            continue
        bound = True
        port = int(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2])
    if not bound:
        raise StoreError(
            f"machines cannot meet at {endpoint}: {failure}",
            hint="Another program may have the port, or the address is none of this machine's.",
        )
    return join_endpoint(host, port)


def _own_addresses(host: str, endpoint: str) -> list[str]:
    try:
        found = socket_module.getaddrinfo(host, None, type=socket_module.SOCK_STREAM)
    except OSError as error:
        raise StoreError(f"machines cannot meet at {endpoint}: {error.strerror}") from None
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    if host in addresses or host == "localhost":
        return addresses
    loopback = any(address.startswith("127.") or address == "::1" for address in addresses)
    return [_ANY] if loopback else addresses
