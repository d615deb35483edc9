"""Who is connected to the embedded store: connections, by their address and descriptor, and the sessions that
they belong to. Knows no message.
"""

from __future__ import annotations

from fleetrun.elastic.stores.ledger import Ledger, Session


class Peer:
    """A connection with a session. `sent` and `got` are bytes: written to it, and seen by it as it says."""

    __slots__ = ("address", "fd", "got", "heard", "sent", "session", "suspected")

    def __init__(self, address: bytes, fd: int, session: Session, heard: float) -> None:
        self.address = address
        self.fd = fd
        self.session = session
        self.heard = heard
        self.sent = 0
        self.got = 0
        self.suspected = False


class Peers:
    """A session has one connection at most, and outlives it until its lease ends."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._by_address: dict[bytes, Peer] = {}
        self._by_fd: dict[int, Peer] = {}
        self._last: dict[Session, Peer] = {}

    @property
    def sessions(self) -> int:
        return len(self._last)

    def at(self, address: bytes) -> Peer | None:
        return self._by_address.get(address)

    def on(self, fd: int) -> Peer | None:
        return self._by_fd.get(fd)

    def of(self, session: Session) -> Peer | None:
        """The session's connection, if it has one."""
        peer = self._last.get(session)
        return peer if peer is not None and self.known(peer) else None

    def last(self, session: Session) -> Peer | None:
        """The connection that it has, or had before it lost it."""
        return self._last.get(session)

    def known(self, peer: Peer) -> bool:
        return self._by_address.get(peer.address) is peer

    def attach(self, peer: Peer) -> None:
        """The session goes on over this connection."""
        old = self._last.get(peer.session)
        if old is not None:
            self.forget(old)
        self._last[peer.session] = self._by_address[peer.address] = self._by_fd[peer.fd] = peer

    def forget(self, peer: Peer) -> None:
        """The connection belongs to nobody. Its session is told nothing until it has another one; then it is
        told everything anew. Done twice is fine.
        """
        if not self.known(peer):
            return
        del self._by_address[peer.address]
        if self._by_fd.get(peer.fd) is peer:
            del self._by_fd[peer.fd]
        if self._last.get(peer.session) is peer:
            self._ledger.unwatch_all(peer.session)

    def end(self, session: Session) -> None:
        """The session is over."""
        peer = self._last.pop(session, None)
        if peer is not None:
            self.forget(peer)
