"""The embedded store's side of the conversation: who is connected, under which lease, and what they ask of
the ledger. Knows messages and the ledger; leaves sockets to `server`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

from fleetrun.elastic.embedded import wire
from fleetrun.elastic.embedded.peers import Peer, Peers
from fleetrun.elastic.stores.ledger import Ledger, Session
from fleetrun.elastic.stores.store import forgiven
from fleetrun.pod.loop import Loop

MAX_UNREAD_BYTES = 64 << 20
"""Of one peer: whoever leaves more unread is dropped, and has to begin anew."""
MAX_LEDGER_BYTES = 512 << 20
MAX_WATCHES = 64
"""Of one session. A node needs five."""


class Sent(Enum):
    """How it went."""

    YES = auto()
    GONE = auto()
    """There is no such peer any longer; what it said before may still be on its way."""
    FULL = auto()
    """It does not read."""


Send = Callable[[bytes, Sequence[bytes]], Sent]
"""To a peer's address, these frames."""


class Service:
    def __init__(
        self, ledger: Ledger, loop: Loop, send: Send, *, job_id: str, version: str, lease: float
    ) -> None:
        self.store_id = secrets.token_hex(8)
        self.wrong = 0
        """Messages that were none, and greetings that were refused."""
        self._ledger = ledger
        self._loop = loop
        self._send = send
        self._job = job_id
        self._version = version
        self._lease = lease
        self._grace = forgiven(lease)
        self._peers = Peers(ledger)
        self._to_tell: dict[Session, None] = {}
        self._flushing = False
        self._when_idle: list[Callable[[], None]] = []
        self._does: dict[type[Any], Callable[[Peer, Any, bytes], None]] = {
            wire.Put: self._put,
            wire.Delete: self._delete,
            wire.Clear: self._clear,
            wire.Read: self._read,
            wire.Watch: self._watch,
            wire.Unwatch: self._unwatch,
            wire.Alive: self._alive,
            wire.Bye: self._bye,
        }

    @property
    def connected(self) -> int:
        """Sessions of others, those included that have lost their connection and still have a lease."""
        return self._peers.sessions

    def when_idle(self, call: Callable[[], None]) -> None:
        """Once, as soon as nobody has a session."""
        self._when_idle.append(call)
        self._wake()

    def fd_matters(self, address: bytes) -> bool:
        return self._peers.at(address) is None

    # ---- what comes

    def receive(self, address: bytes, fd: int, frames: Sequence[bytes]) -> None:
        peer = self._peers.at(address)
        try:
            message, body = wire.decode(frames, wire.REQUESTS, wire.MAX_REQUEST_BYTES)
        except wire.OtherProtocolError as error:
            self._refuse(address, f"it speaks protocol {wire.PROTOCOL}, this node {error.protocol}")
            return
        except wire.WireError as error:
            self._complain(address, peer, str(error))
            return
        if isinstance(message, wire.Hello):
            self._greet(address, fd, message)
        elif peer is None or not peer.session.open:
            self._send(address, [wire.encode(wire.Stranger())])
        else:
            peer.heard = self._loop.clock()
            self._ledger.renew(peer.session, peer.heard)
            self._does[type(message)](peer, message, body)

    def _complain(self, address: bytes, peer: Peer | None, wrong: str) -> None:
        """Once: after it, this is a stranger."""
        self.wrong += 1
        if peer is not None:
            self._send(address, [wire.encode(wire.Wrong(wrong))])
            self._peers.forget(peer)

    def _refuse(self, address: bytes, why: str) -> None:
        self.wrong += 1
        self._send(address, [wire.encode(wire.Refused(why))])

    def _greet(self, address: bytes, fd: int, hello: wire.Hello) -> None:
        if hello.job != self._job:
            self._refuse(address, f"it belongs to job {self._job!r}, this node to job {hello.job!r}")
            return
        if hello.version != self._version:
            self._refuse(address, f"it runs fleetrun {self._version}, this node {hello.version}")
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
        peer = Peer(address, fd, session, now)
        self._peers.attach(peer)
        self._reply(peer, wire.Welcome(self.store_id, self._lease, fresh))

    # ---- what is asked

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
            self._complain(peer.address, peer, "more watches than any node needs")
            return
        entries = self._ledger.watch(peer.session, watch.prefix)
        rows, body = wire.pack(entries)
        self._reply(peer, wire.Listing(watch.n, watch.prefix, rows), body)

    def _unwatch(self, peer: Peer, unwatch: wire.Unwatch, _: bytes) -> None:
        self._ledger.unwatch(peer.session, unwatch.prefix)

    def _alive(self, peer: Peer, alive: wire.Alive, _: bytes) -> None:
        peer.got = alive.got
        self._reply(peer, wire.Living(asks=False))

    def _bye(self, peer: Peer, bye: wire.Bye, _: bytes) -> None:
        self._peers.forget(peer)
        self._ledger.revoke(peer.session)

    # ---- what goes

    def _reply(self, peer: Peer, message: Any, *body: bytes) -> None:
        """After all that the peer has to know before it: so the answer to a write finds it in the mirror."""
        news = peer.session.take()
        if news:
            rows, values = wire.pack(news)
            self._tell(peer, [wire.encode(wire.News(rows)), values])
        self._tell(peer, [wire.encode(message), *body])

    def _tell(self, peer: Peer, frames: Sequence[bytes]) -> None:
        if not self._peers.known(peer):
            return
        full = peer.sent - peer.got > MAX_UNREAD_BYTES
        sent = Sent.FULL if full else self._send(peer.address, frames)
        if sent is Sent.YES:
            peer.sent += sum(map(len, frames))
        elif sent is Sent.GONE:
            self._suspect(peer)
        else:
            self._peers.forget(peer)

    def _note(self, session: Session | None) -> None:
        """Something has happened to a session."""
        if session is not None:
            self._to_tell[session] = None
            self._wake()

    def _wake(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.after(0.0, self.flush)

    def flush(self) -> None:
        """Tell everybody what has changed. Many are told the same, and it is written once."""
        self._flushing = False
        to_tell, self._to_tell = self._to_tell, {}
        written: dict[tuple[tuple[str, int], ...], list[bytes]] = {}
        for session in to_tell:
            if not session.open:
                self._end(session)
                continue
            peer, news = self._peers.of(session), session.take()
            if peer is None or not news:
                continue
            same = tuple([(key, entry.revision if entry else 0) for key, entry in news.items()])
            if same not in written:
                rows, values = wire.pack(news)
                written[same] = [wire.encode(wire.News(rows)), values]
            self._tell(peer, written[same])
        if not self.connected and self._when_idle:
            calls, self._when_idle = self._when_idle, []
            for call in calls:
                call()

    def _end(self, session: Session) -> None:
        peer = self._peers.of(session)
        if peer is not None:
            self._tell(peer, [wire.encode(wire.Stranger())])
        self._peers.end(session)

    # ---- connections that break

    def broken(self, fd: int) -> None:
        """A connection has ended. Its client comes back in a moment, or its process is gone.

        The number may belong to another connection already, so whoever has it now is asked for a sign of
        life.
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
            return  # it has said good-bye, or come back
        if peer.heard > asked and self._ask(peer) is not Sent.GONE:
            return
        if now > asked + 1.5 * self._grace:  # this process was asleep, and so was its thread that reconnects
            self._suspect(peer)
        else:
            self._ledger.revoke(peer.session)
