"""Two ends of one connection: what is measured, and what a liar gets."""

import contextlib
import math
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from fleetrun.doctor import links
from fleetrun.doctor.links import LinkError
from fleetrun.doctor.node_records import Link


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
