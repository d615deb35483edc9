"""Serve the embedded store: a ledger behind a zmq socket, in the event loop of the launcher that hosts it.

`StoreServer` has the socket. `Service` handles messages without a socket: which clients are connected
(`Peers`), under which lease, and what they request of the ledger.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import socket as socket_module
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

import zmq

from fleetrun import __version__
from fleetrun.aliases import Callback, ShowText
from fleetrun.elastic.embedded import wire
from fleetrun.elastic.embedded.sockets import (
    CurveAuthenticator,
    Frames,
    Monitor,
    Pulse,
    Watched,
    store_socket,
)
from fleetrun.elastic.memory_store import Expiry
from fleetrun.elastic.store import Ledger, Session, reconnect_grace
from fleetrun.envs.contract import join_endpoint, split_endpoint
from fleetrun.envs.curve import CurveKeys, Strangers
from fleetrun.errors import StoreError
from fleetrun.pod.loop import Loop, Timer


class Peer:
    """A connection with a session.

    `sent` is the number of bytes written to the client. `got` is the number of bytes that the client has
    acknowledged.
    """

    __slots__ = ("address", "fd", "got", "guest", "last_seen", "sent", "session", "suspected")

    def __init__(
        self, address: bytes, fd: int, session: Session, last_seen: float, guest: bool = False
    ) -> None:
        self.address = address
        self.guest = guest
        self.fd = fd
        self.session = session
        self.last_seen = last_seen
        self.sent = 0
        self.got = 0
        self.suspected = False


class Peers:
    """Connections by their zmq address and descriptor. A session has at most one connection. The session
    outlives the connection until its lease ends.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._by_address: dict[bytes, Peer] = {}
        self._by_fd: dict[int, Peer] = {}
        self._last: dict[Session, Peer] = {}

    @property
    def sessions(self) -> int:
        """The number of sessions of nodes. Commands from outside the job do not count, because the job does
        not wait for them.
        """
        return sum(not peer.guest for peer in self._last.values())

    @property
    def addresses(self) -> list[bytes]:
        """A copy of the addresses, for another thread."""
        return list(self._by_address)

    def at(self, address: bytes) -> Peer | None:
        """Return the connection with this zmq address, or None if it does not exist."""
        return self._by_address.get(address)

    def on(self, fd: int) -> Peer | None:
        """Return the connection with this descriptor, or None if it does not exist."""
        return self._by_fd.get(fd)

    def of(self, session: Session) -> Peer | None:
        """Return the session's connection, or None if it has none now."""
        peer = self._last.get(session)
        return peer if peer is not None and self.known(peer) else None

    def last(self, session: Session) -> Peer | None:
        """Return the session's present connection, or else its last one."""
        return self._last.get(session)

    def known(self, peer: Peer) -> bool:
        """Return True until the connection is dropped."""
        return self._by_address.get(peer.address) is peer

    def attach(self, peer: Peer) -> None:
        """Use this connection for its session from now on."""
        old = self._last.get(peer.session)
        if old is not None:
            self.forget(old)
        self._last[peer.session] = self._by_address[peer.address] = self._by_fd[peer.fd] = peer

    def forget(self, peer: Peer) -> None:
        """Drop the connection. May be called twice.

        The session gets no changes until it has another connection, and then lists everything again.
        """
        if not self.known(peer):
            return
        del self._by_address[peer.address]
        if self._by_fd.get(peer.fd) is peer:
            del self._by_fd[peer.fd]
        if self._last.get(peer.session) is peer:
            self._ledger.unwatch_all(peer.session)

    def end(self, session: Session) -> None:
        """End a session."""
        peer = self._last.pop(session, None)
        if peer is not None:
            self.forget(peer)


MAX_UNREAD_BYTES = 64 << 20
"""Most unread bytes of one client. A client above the limit is disconnected, and must start again."""
MAX_LEDGER_BYTES = 512 << 20
MAX_WATCHES = 64
"""Most watches of one session. A node needs five, and one for each request that it answers."""


class Sent(Enum):
    """The result of sending to a client."""

    YES = auto()
    UNREACHABLE = auto()
    """The client is disconnected. Messages from it may still arrive."""
    FULL = auto()
    """The client does not read."""


Send = Callable[[bytes, Sequence[bytes]], Sent]
"""A function that sends frames to a client's address."""


class Service:
    """Answer the messages of clients with the content of a ledger."""

    def __init__(
        self, ledger: Ledger, loop: Loop, send: Send, *, job_id: str, version: str, lease: float
    ) -> None:
        self.store_id = secrets.token_hex(8)
        self.wrong = 0
        """Number of invalid messages and refused Hellos."""
        self._ledger = ledger
        self._loop = loop
        self._send = send
        self._job = job_id
        self._version = version
        self._lease = lease
        self._grace = reconnect_grace(lease)
        self._peers = Peers(ledger)
        self._to_notify: dict[Session, None] = {}
        self._flushing = False
        self._when_idle: list[Callback] = []
        self._does: dict[type[object], Callable[[Peer, Any, bytes], None]] = {
            wire.Put: self._put,
            wire.Delete: self._delete,
            wire.Clear: self._clear,
            wire.Read: self._read,
            wire.Watch: self._watch,
            wire.Unwatch: lambda peer, unwatch, _: self._ledger.unwatch(peer.session, unwatch.prefix),
            wire.Alive: self._alive,
            wire.Bye: self._bye,
        }

    @property
    def connected(self) -> int:
        """The number of sessions of other nodes, including disconnected ones with a valid lease."""
        return self._peers.sessions

    @property
    def addresses(self) -> list[bytes]:
        return self._peers.addresses

    def when_idle(self, call: Callback) -> None:
        """Call `call` once, as soon as all sessions have ended."""
        self._when_idle.append(call)
        self._wake()

    def has_session(self, fd: int, _: int) -> bool:
        """Return True if the client of this connection has a session.

        A descriptor whose connection has just ended may already belong to another client.
        """
        peer = self._peers.on(fd)
        return peer is not None and not peer.suspected

    # ---- receiving

    def receive(self, address: bytes, fd: int, frames: Sequence[bytes]) -> None:
        """Carry out a message that arrived from an address over the connection `fd`."""
        peer = self._peers.at(address)
        try:
            message, body = wire.decode(frames, wire.REQUESTS, wire.MAX_REQUEST_BYTES)
        except wire.OtherProtocolError as error:
            self._refuse(address, f"it uses protocol {wire.PROTOCOL}, this node {error.protocol}")
            return
        except wire.WireError as error:
            self._complain(address, peer, str(error))
            return
        if isinstance(message, wire.Hello):
            self._greet(address, fd, message)
        elif peer is None or not peer.session.open:
            self._send(address, [wire.encode(wire.Stranger())])
        else:
            peer.last_seen = self._loop.clock()
            self._ledger.renew(peer.session, peer.last_seen)
            self._does[type(message)](peer, message, body)

    def _complain(self, address: bytes, peer: Peer | None, wrong: str) -> None:
        """Report an invalid message once, and drop the connection."""
        self.wrong += 1
        if peer is not None:
            self._send(address, [wire.encode(wire.Wrong(wrong))])
            self._peers.forget(peer)

    def _refuse(self, address: bytes, why: str) -> None:
        self.wrong += 1
        self._send(address, [wire.encode(wire.Refused(why))])

    def _greet(self, address: bytes, fd: int, hello: wire.Hello) -> None:
        guest = hello.node.startswith(wire.GUEST)
        if hello.job != self._job and guest:
            self._refuse(address, f"the job there is {self._job!r}; use --job HOST:PORT/{self._job}")
            return
        if hello.job != self._job:
            self._refuse(address, f"it belongs to job {self._job!r}, this node to job {hello.job!r}")
            return
        if hello.version != self._version:
            asking = "this command" if guest else "this node"
            self._refuse(address, f"it runs fleetrun {self._version}, {asking} {hello.version}")
            return
        name = f"net/{hello.session}"
        before = self._peers.at(address)
        if before is not None:
            self._peers.forget(before)
            if before.session.name != name:  # one lease for each connection
                self._ledger.revoke(before.session)
        now = self._loop.clock()
        session = self._ledger.session(name)
        fresh = session is None
        if session is None:
            session = self._ledger.grant(name, self._lease, now, lambda: self._note(session))
        else:
            self._ledger.renew(session, now)
        peer = Peer(address, fd, session, now, guest=guest)
        self._peers.attach(peer)
        self._reply(peer, wire.Welcome(self.store_id, self._lease, fresh))

    # ---- requests

    def _put(self, peer: Peer, put: wire.Put, value: bytes) -> None:
        if self._ledger.size + len(put.key) + len(value) > MAX_LEDGER_BYTES:
            self._done(peer, put.n, False)
            return
        owner = peer.session if put.leased else None
        entry = self._ledger.put(put.key, value, expect=put.expect, session=owner)
        self._done(peer, put.n, entry is not None)

    def _delete(self, peer: Peer, delete: wire.Delete, _: bytes) -> None:
        self._done(peer, delete.n, self._ledger.delete(delete.key, expect=delete.expect))

    def _clear(self, peer: Peer, clear: wire.Clear, _: bytes) -> None:
        self._ledger.delete_prefix(clear.prefix)
        self._done(peer, clear.n, True)

    def _done(self, peer: Peer, n: int, ok: bool) -> None:
        self._reply(peer, wire.Done(n, ok))

    def _read(self, peer: Peer, read: wire.Read, _: bytes) -> None:
        entry = self._ledger.get(read.key)
        found = wire.Found(read.n, wire.row_of(read.key, entry))
        self._reply(peer, found, b"" if entry is None else entry.value)

    def _watch(self, peer: Peer, watch: wire.Watch, _: bytes) -> None:
        if len(peer.session.watches) >= MAX_WATCHES and watch.prefix not in peer.session.watches:
            self._complain(peer.address, peer, "too many watches")
            return
        entries = self._ledger.watch(peer.session, watch.prefix)
        rows, body = wire.pack(entries)
        self._reply(peer, wire.Listing(watch.n, watch.prefix, rows), body)

    def _alive(self, peer: Peer, alive: wire.Alive, _: bytes) -> None:
        peer.got = alive.got
        self._reply(peer, wire.Living(asks=False))

    def _bye(self, peer: Peer, bye: wire.Bye, _: bytes) -> None:
        self._peers.forget(peer)
        self._ledger.revoke(peer.session)

    # ---- sending

    def _reply(self, peer: Peer, message: object, *body: bytes) -> None:
        """Send earlier changes first, so that a write is in the client's mirror when its answer arrives."""
        news = peer.session.take()
        if news:
            rows, values = wire.pack(news)
            self._deliver(peer, [wire.encode(wire.News(rows)), values])
        self._deliver(peer, [wire.encode(message), *body])

    def _deliver(self, peer: Peer, frames: Sequence[bytes]) -> None:
        if not self._peers.known(peer):
            return
        full = peer.sent - peer.got > MAX_UNREAD_BYTES
        sent = Sent.FULL if full else self._send(peer.address, frames)
        if sent is Sent.YES:
            peer.sent += sum(map(len, frames))
        elif sent is Sent.UNREACHABLE:
            self._suspect(peer)
        else:
            self._peers.forget(peer)

    def _note(self, session: Session | None) -> None:
        """Note that the session has changes to send, or has ended."""
        if session is not None:
            self._to_notify[session] = None
            self._wake()

    def _wake(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.after(0.0, self.flush)

    def flush(self) -> None:
        """Send all changes. Changes for many clients are encoded once."""
        self._flushing = False
        to_notify, self._to_notify = self._to_notify, {}
        written: dict[tuple[tuple[str, int], ...], list[bytes]] = {}
        for session in to_notify:
            if not session.open:
                self._end(session)
                continue
            peer, news = self._peers.of(session), session.take()
            if peer is None or not news:
                continue
            same = tuple([(key, -1 if entry is None else entry.revision) for key, entry in news.items()])
            if same not in written:
                rows, values = wire.pack(news)
                written[same] = [wire.encode(wire.News(rows)), values]
            self._deliver(peer, written[same])
        if not self.connected and self._when_idle:
            calls, self._when_idle = self._when_idle, []
            for call in calls:
                call()

    def _end(self, session: Session) -> None:
        peer = self._peers.of(session)
        if peer is not None:
            self._deliver(peer, [wire.encode(wire.Stranger())])
        self._peers.end(session)

    # ---- broken connections

    def broken(self, fd: int) -> None:
        """Handle the end of a connection. Its client reconnects in a moment, or its process has ended.

        The descriptor may already belong to another connection, so its present client must send a message.
        """
        peer = self._peers.on(fd)
        if peer is not None:
            self._suspect(peer)

    def _suspect(self, peer: Peer) -> None:
        if not peer.suspected:
            peer.suspected = True
            self._ask(peer)
            asked = self._loop.clock()
            self._loop.after(self._grace, lambda: self._judge(peer, asked))

    def _ask(self, peer: Peer) -> Sent:
        return self._send(peer.address, [wire.encode(wire.Living(asks=True))])

    def _judge(self, peer: Peer, asked: float) -> None:
        now = self._loop.clock()
        peer.suspected = False
        if not peer.session.open or self._peers.last(peer.session) is not peer:
            return  # the client has left, or has reconnected
        if peer.last_seen > asked and self._ask(peer) is not Sent.UNREACHABLE:
            return
        if now > asked + 1.5 * self._grace:  # this process was suspended, and libzmq's thread with it
            self._suspect(peer)
        else:
            self._ledger.revoke(peer.session)


_ANY = "*"
_NOTICE_EVERY_S = 10.0
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_LINGER_MS = 200
_SHARED_FROM = 64 << 10
_LARGE_VALUES = 4
_DESCRIPTORS = 1 << 16


class StoreServer:
    """Listen on `endpoint` from now until `close`.

    `endpoint` is host:port, with IPv6 in brackets, and with port 0 for a free port. An IP address is bound
    alone. A name is bound at each of its addresses that belong to this node. A node's own name is often
    loopback in its /etc/hosts, and other nodes then use another address. In this case the store listens on
    all interfaces. `localhost` is loopback only.

    With `keys`, only clients with the job's token can connect. `notice` is called, at most every 10 s, when
    connections were rejected. Raises StoreError if the address cannot be bound.
    """

    def __init__(
        self,
        ledger: Ledger,
        loop: Loop,
        endpoint: str,
        *,
        job_id: str,
        lease: float,
        keys: CurveKeys | None = None,
        notice: ShowText = lambda text: None,
    ) -> None:
        # Raise the limit of descriptors, because each node is a connection. The usual limit of 1,024 exists
        # for programs that use select.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        self._loop = loop
        self._notice = notice
        self._noticed_at = -_NOTICE_EVERY_S
        self._refused = 0
        self._large: OrderedDict[int, tuple[bytes, zmq.Frame]] = OrderedDict()
        self._context = zmq.Context()
        self._authenticator = CurveAuthenticator(loop, self._context, keys) if keys is not None else None
        socket = store_socket(self._context, lease, keys)
        try:
            self.endpoint = _bind(socket, endpoint)
        except StoreError:
            socket.close()
            self._close_context()
            raise
        self._service = Service(ledger, loop, self._send, job_id=job_id, version=__version__, lease=lease)
        self._watched = Watched(loop, socket, self._receive, self._service.flush)
        self._monitor = Monitor(loop, socket, Strangers.EVENTS | _FAILURES, self._happened)
        self._strangers = Strangers(self._service.has_session)
        self._checking = Timer()
        self._expiry = Expiry(ledger, loop, lease)
        self._pulse = Pulse(loop, lease, self._beat, self._watched.look_again)

    @property
    def connected(self) -> int:
        """The number of other nodes with a session."""
        return self._service.connected

    @property
    def refused(self) -> int:
        """The number of connections and messages rejected so far."""
        return self._refused + self._service.wrong

    def when_idle(self, call: Callback) -> None:
        """Call `call` once, from the loop, as soon as all other nodes have left or were lost."""
        self._service.when_idle(call)

    def close(self) -> None:
        """Close the store. The last messages have 0.2 s to be sent. May be called twice."""
        self._pulse.close()
        self._expiry.close()
        self._checking.cancel()
        self._monitor.close()
        self._watched.close(_LINGER_MS)
        self._close_context()

    def _close_context(self) -> None:
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()

    def _receive(self, frames: Frames) -> None:
        address, *rest = [frame.bytes for frame in frames]
        self._service.receive(address, int(frames[-1].get(zmq.SRCFD)), rest)
        self._watched.look_again()

    def _send(self, address: bytes, frames: Sequence[bytes]) -> Sent:
        try:
            self._watched.send([address, *map(self._shared, frames)], copy=False)
        except zmq.ZMQError as error:
            return Sent.FULL if error.errno == zmq.EAGAIN else Sent.UNREACHABLE
        self._watched.look_again()
        return Sent.YES

    def _beat(self) -> None:
        """Show all nodes that the store is alive, while this process waits for a file. Runs in the thread of
        the pulse.
        """
        for address in self._service.addresses:
            with contextlib.suppress(zmq.ZMQError):
                self._watched.send([address, wire.encode(wire.Living(asks=False))])

    def _shared(self, data: bytes) -> bytes | zmq.Frame:
        """Share the copy of a large value among all clients that get it."""
        if len(data) < _SHARED_FROM:
            return data
        known = self._large.get(id(data))
        if known is None:
            known = self._large[id(data)] = (data, zmq.Frame(data, copy=True))
            if len(self._large) > _LARGE_VALUES:
                self._large.popitem(last=False)
        return known[1]

    def _check(self) -> None:
        self._checking.cancel()
        if wait := self._strangers.check():
            self._checking = self._loop.after(wait, self._check)

    def _happened(self, event: int, value: int) -> None:
        if event & Strangers.EVENTS:
            self._strangers.happened(event, value)
            self._check()
            if event == zmq.EVENT_DISCONNECTED:
                self._service.broken(value)
            return
        self._refused += 1
        now = self._loop.clock()
        if now - self._noticed_at >= _NOTICE_EVERY_S:
            self._noticed_at = now
            self._notice(
                f"the rendezvous store {self.endpoint} rejected {self._refused} connections so far: "
                "not fleetrun, or without this job's token"
            )


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind the socket, and return its endpoint. Raises StoreError."""
    host, port = split_endpoint(endpoint)
    failure = "the name has no address"
    bound = False
    for address in _own_addresses(host, endpoint):
        socket.ipv6 = int(":" in address or address == _ANY)
        try:
            socket.bind(f"tcp://{join_endpoint(address, port)}")
        except zmq.ZMQError as error:
            failure = error.strerror or str(error)
            continue
        bound = True
        port = int(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2])
    if not bound:
        raise StoreError(
            f"nodes cannot join at {endpoint}: {failure}",
            hint="Another program may use the port, or the address belongs to another node.",
        )
    return join_endpoint(host, port)


def _own_addresses(host: str, endpoint: str) -> list[str]:
    try:
        found = socket_module.getaddrinfo(host, None, type=socket_module.SOCK_STREAM)
    except OSError as error:
        raise StoreError(f"nodes cannot join at {endpoint}: {error.strerror}") from None
    addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
    if host in addresses or host == "localhost":
        return addresses
    loopback = any(address.startswith("127.") or address == "::1" for address in addresses)
    return [_ANY] if loopback else addresses
