"""Connections and sessions of the embedded store."""

from __future__ import annotations

import pytest

from fleetrun.elastic.embedded.server import Peer, Peers
from fleetrun.elastic.store import Ledger, Session


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def session(ledger: Ledger) -> Session:
    return ledger.grant("a", 10, 0)


@pytest.fixture
def peers(ledger: Ledger) -> Peers:
    return Peers(ledger)


def test_a_connection_is_found_by_its_address_and_its_descriptor(peers: Peers, session: Session) -> None:
    peer = Peer(b"one", 7, session, 0)
    peers.attach(peer)
    assert peers.at(b"one") is peers.on(7) is peers.of(session) is peer
    assert (peers.at(b"two"), peers.on(8), peers.sessions) == (None, None, 1)


def test_a_session_that_comes_back_has_one_connection(peers: Peers, session: Session) -> None:
    old, new = Peer(b"one", 7, session, 0), Peer(b"two", 8, session, 0)
    peers.attach(old)
    peers.attach(new)
    assert (peers.known(old), peers.known(new), peers.sessions) == (False, True, 1)
    peers.forget(old)
    assert peers.of(session) is new


def test_a_descriptor_that_is_used_again_belongs_to_the_last(
    peers: Peers, ledger: Ledger, session: Session
) -> None:
    gone, new = Peer(b"one", 7, session, 0), Peer(b"two", 7, ledger.grant("b", 10, 0), 0)
    peers.attach(gone)
    peers.attach(new)
    peers.forget(gone)
    assert peers.on(7) is new


def test_who_has_no_connection_is_told_nothing_and_keeps_its_lease(
    peers: Peers, ledger: Ledger, session: Session
) -> None:
    peer = Peer(b"one", 7, session, 0)
    peers.attach(peer)
    ledger.watch(session, "k/")
    ledger.put("own", b"", session=session)
    ledger.put("k/1", b"")
    peers.forget(peer)
    ledger.put("k/2", b"")
    assert (session.watches, session.outbox, peers.of(session)) == (set(), {}, None)
    assert (session.open, peers.sessions, list(ledger.range("own"))) == (True, 1, ["own"])
    peers.end(session)
    assert peers.sessions == 0
