"""Links between machines: who measures them, and how."""

import contextlib
import math
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fleetrun.doctor import links
from fleetrun.doctor.links import MOST_VISITS, LinkError, Surveyor, open_door, partners
from fleetrun.doctor.node_records import Link, NodeRecord

# ---- Two ends of one connection: what is measured, and what a liar gets.


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection within this machine, on which little is sent."""
    monkeypatch.setattr("fleetrun.doctor.links.MOST", 4 << 20)
    with socket.create_server(("127.0.0.1", 0)) as door:
        one = socket.create_connection(door.getsockname())
        other, _ = door.accept()
    with one, other:
        one.settimeout(60)
        other.settimeout(60)
        yield one, other


def beside(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def measured(ends: tuple[socket.socket, socket.socket], clock: Callable[[], float]) -> Link:
    one, other = ends
    thread = beside(lambda: links.serve_link(other, clock))
    try:
        return links.measure_link(one, lambda: 1000.0)
    finally:
        thread.join()


def test_what_is_measured(ends: tuple[socket.socket, socket.socket]) -> None:
    found = measured(ends, lambda: 1000.0)
    assert found.error == ""
    assert 0 < found.round_trip < 60
    assert found.there > 0
    assert found.back > 0
    assert abs(found.ahead) <= found.round_trip / 2 + 1e-9


def test_who_stands_still_as_it_begins_to_send_is_measured_all_the_same(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetrun.doctor.links.LONGEST", 0.0)
    found = measured(ends, lambda: 1000.0)
    assert found.there > 0
    assert found.back > 0


@pytest.mark.parametrize("offset", [3600.0, -0.5])
def test_a_clock_that_is_ahead(ends: tuple[socket.socket, socket.socket], offset: float) -> None:
    found = measured(ends, lambda: 1000.0 + offset)
    assert abs(found.ahead - offset) <= found.round_trip / 2 + 1e-9


@pytest.mark.parametrize(
    "answers",
    [
        b"",
        struct.pack("!d", math.nan),
        struct.pack("!d", 1000.0) * links.PINGS,
        struct.pack("!d", 1000.0) * links.PINGS + struct.pack("!Qd", 1, 1.0) + b"\xff\xff\xff\xff",
    ],
)
def test_who_answers_nonsense_is_found_out(ends: tuple[socket.socket, socket.socket], answers: bytes) -> None:
    one, other = ends

    def lie() -> None:
        with contextlib.suppress(OSError):  # it hangs up in the middle
            other.sendall(answers)
            other.shutdown(socket.SHUT_WR)
            while other.recv(1 << 20):
                pass

    thread = beside(lie)
    with pytest.raises(LinkError):
        links.measure_link(one, lambda: 1000.0)
    one.close()
    thread.join()


def test_a_count_that_is_impossible_is_no_speed(ends: tuple[socket.socket, socket.socket]) -> None:
    assert links._speed(10, math.nan) == 0.0
    assert links._speed(10, 0.0) == 0.0
    assert links._speed(1 << 60, math.inf) == 0.0


@pytest.mark.parametrize("text", [b"x", b"u\xff\xff\xff\xff", b"p" * 301, b""])
def test_who_asks_nonsense_is_let_go(ends: tuple[socket.socket, socket.socket], text: bytes) -> None:
    one, other = ends
    one.sendall(text)
    one.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkError):
        links.serve_link(other)


# ---- Who visits whom: no pair meets twice.


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_few_machines_meet_each_other_once(count: int) -> None:
    pairs = [frozenset((me, other)) for me in range(count) for other in partners(count, me)]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {frozenset((one, other)) for one in range(count) for other in range(one)}


@pytest.mark.parametrize("count", [10, 40, 1001])
def test_of_many_machines_each_meets_as_many_others(count: int) -> None:
    pairs = [(me, other) for me in range(count) for other in partners(count, me)]
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == count * MOST_VISITS
    assert all(sum(other == each for _, other in pairs) == MOST_VISITS for each in (0, 7, count - 1))


# ---- Several surveyors on this machine: each measures the ways that are its part, strangers get nothing.

BOUND = 60_000


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[tuple[NodeRecord, Surveyor]]]]:
    monkeypatch.setattr("fleetrun.doctor.links.MOST", 1 << 20)
    monkeypatch.setattr("fleetrun.doctor.links.ALLOWED", 100.0)
    monkeypatch.setattr("fleetrun.doctor.links._POLITE", 60.0)
    made: list[Surveyor] = []

    def several(count: int) -> list[tuple[NodeRecord, Surveyor]]:
        found = []
        for number in range(count):
            door = open_door("127.0.0.1", 0)
            card = NodeRecord(
                id=f"n{number}",
                name="h",
                address="127.0.0.1",
                port=door.getsockname()[1],
                ticket=f"t{number}",
            )
            made.append(Surveyor(door, card.ticket))
            found.append((card, made[-1]))
        return found

    yield several
    for each in made:
        each.close()


def done(each: Surveyor) -> None:
    poll = select.poll()
    poll.register(each.news, select.POLLIN)
    while not each.done:
        assert poll.poll(BOUND), "it has not ended"
        os.eventfd_read(each.news)


def test_every_pair_is_measured_once(make: Callable[[int], list[tuple[NodeRecord, Surveyor]]]) -> None:
    found = make(4)
    cards = [card for card, _ in found]
    for number, (_, each) in enumerate(found):
        each.survey(cards, number)
    for _, each in found:
        done(each)
    ways = {(card.id, other): way for card, each in found for other, way in each.links.items()}
    assert {frozenset(pair) for pair in ways} == {
        frozenset((one.id, other.id)) for one in cards for other in cards if one is not other
    }
    assert len(ways) == 6
    assert [way.error for way in ways.values()] == [""] * 6


def test_one_that_has_gone_is_told_of(make: Callable[[int], list[tuple[NodeRecord, Surveyor]]]) -> None:
    (card, visitor), (other, _) = make(2)
    with socket.create_server(("127.0.0.1", 0)) as door:
        gone = replace(other, port=door.getsockname()[1])
    visitor.survey([card, gone], 0)
    done(visitor)
    assert visitor.links[gone.id].error == f"port {gone.port}: Connection refused"


def test_one_that_does_not_answer_is_told_of(
    make: Callable[[int], list[tuple[NodeRecord, Surveyor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetrun.doctor.links.ALLOWED", 0.05)
    (card, visitor), (other, host) = make(2)
    with host._serving:  # it has another visitor
        visitor.survey([card, other], 0)
        done(visitor)
    assert visitor.links[other.id].error == f"no answer from port {other.port}"


def test_visitors_are_served_one_after_the_other(
    make: Callable[[int], list[tuple[NodeRecord, Surveyor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (host, _), *visitors = make(4)
    here, most, serve = [0], [0], links.serve_link

    def counted(sock: socket.socket) -> None:
        if sock.getsockname()[1] != host.port:  # a late visitor of the test before
            return serve(sock)
        here[0] += 1
        most[0] = max(most[0], here[0])
        serve(sock)
        here[0] -= 1

    monkeypatch.setattr("fleetrun.doctor.links.serve_link", counted)
    for card, each in visitors:
        each.survey([card, host], 0)
    for _, each in visitors:
        done(each)
        assert each.links[host.id].error == ""
    assert most == [1]


@pytest.mark.parametrize(
    "greeting", [b"", b"\n", b"wrong\n", b"t\n", b"t00\n", b"t0 0\n", b"\xff\n", b"x" * 10_000]
)
def test_strangers_are_shown_the_door(
    make: Callable[[int], list[tuple[NodeRecord, Surveyor]]], greeting: bytes
) -> None:
    ((card, _),) = make(1)
    with (
        socket.create_connection((card.address, card.port), timeout=60) as sock,
        contextlib.suppress(OSError),
    ):
        sock.sendall(greeting)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""


def test_who_has_no_ticket_cannot_spoil_a_visit(
    make: Callable[[int], list[tuple[NodeRecord, Surveyor]]],
) -> None:
    found = make(2)
    cards = [card for card, _ in found]
    with (
        socket.create_connection(("127.0.0.1", cards[0].port)) as first,
        socket.create_connection(("127.0.0.1", cards[1].port)) as second,
    ):
        for sock in (first, second):
            sock.sendall(b"nothing\n")
        for number, (_, each) in enumerate(found):
            each.survey(cards, number)
        for _, each in found:
            done(each)
    assert [way.error for _, each in found for way in each.links.values()] == [""]


@pytest.mark.parametrize(
    ("address", "family"), [("127.0.0.1", socket.AF_INET), ("localhost", socket.AF_INET)]
)
def test_a_door_at_an_address_or_a_name(address: str, family: socket.AddressFamily) -> None:
    with open_door(address, 0) as door, socket.create_connection(door.getsockname()[:2]):
        assert door.family is family


def test_a_door_at_a_reserved_port() -> None:
    """The port of the job, which this launcher holds."""
    from fleetrun.host.network import Ports

    ports = Ports()
    try:
        with open_door("127.0.0.1", ports.any()) as door:
            assert door.getsockname()[1]
    finally:
        ports.close()


def test_a_way_that_is_too_slow_is_not_said_to_be_closed() -> None:
    with open_door("127.0.0.1", 0) as door, socket.create_connection(door.getsockname()) as here:
        here.settimeout(0.01)
        with pytest.raises(links.LinkError, match="it answered, and then sent nothing"):
            links._measured(here)
