"""The embedded store's server without sockets: connections, sessions and requests; the test controls time and
the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fleetrun.elastic.embedded import wire
from fleetrun.elastic.embedded.server import MAX_LEDGER_BYTES, MAX_WATCHES, Peer, Peers, Sent, Service
from fleetrun.elastic.store import Ledger, Session
from fleetrun.pod.loop import Loop

LEASE = 4.0
GRACE = 1.0


class World:
    def __init__(self, lease: float = LEASE) -> None:
        self.now = 100.0
        self.loop = Loop(lambda: self.now)
        self.ledger = Ledger()
        self.state: dict[bytes, Sent] = {}
        self.told: list[tuple[bytes, dict[str, Any]]] = []
        self.service = Service(
            self.ledger, self.loop, self._send, job_id="job", version="1", lease=lease
        )  # fmt: skip

    def _send(self, address: bytes, frames: Sequence[bytes]) -> Sent:
        sent = self.state.get(address, Sent.YES)
        if sent is Sent.YES:
            self.told.append((address, json.loads(frames[0])))
        return sent

    def say(self, address: bytes, message: Any, *body: bytes, fd: int = 7) -> None:
        self.service.receive(address, fd, [wire.encode(message), *body])

    def greet(self, address: bytes, session: str = "s", fd: int = 7) -> None:
        self.say(address, wire.Hello(wire.PROTOCOL, "1", "job", "a", session), fd=fd)

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(2):  # what happens, and what follows from it
            self.loop.after(0.0, self.loop.stop)
            self.loop.run()

    def words(self, address: bytes) -> list[str]:
        return [said["is"] for to, said in self.told if to == address]


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.loop.close()


def test_a_peer_that_was_gone_before_it_was_greeted_has_no_lease_for_long(world: World) -> None:
    """Its connection had ended before its messages were read, so its end is not reported."""
    world.state[b"p"] = Sent.UNREACHABLE
    world.greet(b"p")
    assert world.service.connected == 1
    world.pass_(GRACE)
    assert world.service.connected == 0


def test_last_words_are_heard_after_the_connection_has_broken(world: World) -> None:
    world.greet(b"p")
    world.state[b"p"] = Sent.UNREACHABLE
    for number in range(3):
        world.say(b"p", wire.Put(number, f"k/{number}", None, False), b"x")
    assert sorted(world.ledger.range("k/")) == ["k/0", "k/1", "k/2"]
    world.say(b"p", wire.Bye())
    world.pass_(0.0)
    assert world.service.connected == 0


@pytest.mark.parametrize(("lease", "grace"), [(2.0, 0.5), (10.0, 1.0), (30.0, 3.0), (1000.0, 4.0)])
def test_a_broken_connection_that_does_not_come_back_ends_the_lease_early(lease: float, grace: float) -> None:
    """Later for whoever may be silent for longer."""
    world = World(lease)
    world.greet(b"p")
    world.state[b"p"] = Sent.UNREACHABLE
    world.service.broken(7)
    world.pass_(0.9 * grace)
    assert world.service.connected == 1
    world.pass_(0.2 * grace)
    assert world.service.connected == 0
    world.loop.close()


def test_messages_on_the_way_do_not_renew_the_lease_of_a_client_that_is_gone(world: World) -> None:
    world.greet(b"p")
    world.state[b"p"] = Sent.UNREACHABLE
    world.service.broken(7)
    world.pass_(0.5 * GRACE)
    world.say(b"p", wire.Alive(0))
    world.pass_(0.6 * GRACE)
    assert world.service.connected == 0


def test_who_comes_back_in_time_keeps_its_lease(world: World) -> None:
    world.greet(b"p")
    world.state[b"p"] = Sent.UNREACHABLE
    world.service.broken(7)
    world.pass_(0.5 * GRACE)
    world.greet(b"q", fd=8)
    world.pass_(2 * GRACE)
    assert world.service.connected == 1
    assert [said["fresh"] for to, said in world.told if said["is"] == "welcome"] == [True, False]


def test_who_has_come_back_and_is_on_its_way_again_keeps_its_lease(world: World) -> None:
    """Connections that break more often than a grace is long."""
    world.greet(b"p", fd=7)
    world.state[b"p"] = Sent.UNREACHABLE
    world.service.broken(7)
    world.pass_(0.9 * GRACE)
    world.greet(b"q", fd=8)
    world.state[b"q"] = Sent.FULL
    world.say(b"q", wire.Read(1, "k"))
    world.pass_(0.2 * GRACE)
    assert world.service.connected == 1


def test_a_descriptor_that_is_used_again_ends_no_lease(world: World) -> None:
    """The news of a broken connection come late, and its number is another's already."""
    world.greet(b"p")
    world.service.broken(7)
    assert world.words(b"p") == ["welcome", "living"]
    world.pass_(0.5 * GRACE)
    world.say(b"p", wire.Alive(0))
    for _ in range(3):
        world.pass_(0.6 * GRACE)
    assert world.service.connected == 1


def test_who_was_asleep_itself_waits_once_more(world: World) -> None:
    world.greet(b"p")
    world.state[b"p"] = Sent.UNREACHABLE
    world.service.broken(7)
    world.pass_(10 * GRACE)
    assert world.service.connected == 1
    world.pass_(GRACE)
    assert world.service.connected == 0


def test_who_does_not_read_is_a_stranger(world: World) -> None:
    world.greet(b"p")
    world.state[b"p"] = Sent.FULL
    world.say(b"p", wire.Read(1, "k"))
    world.state[b"p"] = Sent.YES
    world.say(b"p", wire.Read(2, "k"))
    assert world.words(b"p") == ["welcome", "stranger"]
    assert world.service.connected == 1, "it has its lease until it comes back"


def test_one_change_is_told_to_all_in_the_same_bytes(world: World) -> None:
    bodies: set[int] = set()
    for number in range(10):
        world.greet(b"%d" % number, f"s{number}", fd=number)
        world.say(b"%d" % number, wire.Watch(1, "state/"))
    send = world._send

    def note(address: bytes, frames: Sequence[bytes]) -> Sent:
        bodies.add(id(frames[0]))
        return send(address, frames)

    world.service._send = note
    world.ledger.put("state/round", b"1")
    world.service.flush()
    assert len(bodies) == 1
    assert all(world.words(b"%d" % number)[-1] == "news" for number in range(10))


def test_an_answer_comes_after_the_news_that_it_is_about(world: World) -> None:
    world.greet(b"p")
    world.say(b"p", wire.Watch(1, "k"))
    world.say(b"p", wire.Put(2, "k", None, False), b"x")
    assert world.words(b"p") == ["welcome", "listing", "news", "done"]


def test_who_is_given_up_is_told_if_it_can_be(world: World) -> None:
    world.greet(b"p")
    world.ledger.expire(world.now + LEASE)
    world.service.flush()
    assert world.words(b"p") == ["welcome", "stranger"]
    assert world.service.connected == 0


def test_no_client_fills_the_memory_with_watches(world: World) -> None:
    world.greet(b"p")
    for number in range(MAX_WATCHES):
        world.say(b"p", wire.Watch(number, f"nodes/{number}"))
    world.say(b"p", wire.Watch(MAX_WATCHES, "nodes/0"))
    assert world.words(b"p")[-1] == "listing"
    world.say(b"p", wire.Watch(MAX_WATCHES + 1, "one more"))
    assert world.words(b"p")[-1] == "wrong"
    world.say(b"p", wire.Read(0, "k"))
    assert world.words(b"p")[-1] == "stranger"


def test_keys_count_as_much_as_values(world: World) -> None:
    world.greet(b"p")
    world.ledger.size = MAX_LEDGER_BYTES - 10
    world.say(b"p", wire.Put(1, "k" * 11, None, False), b"")
    world.say(b"p", wire.Put(2, "k" * 10, None, False), b"")
    assert [said["ok"] for to, said in world.told if said["is"] == "done"] == [False, True]


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


def test_a_session_without_a_connection_gets_nothing_and_keeps_its_lease(
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
