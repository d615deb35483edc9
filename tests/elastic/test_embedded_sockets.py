"""zmq sockets in a loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from fleetrun.elastic.embedded.sockets import Context, Monitor, Watched
from fleetrun.pod.loop import Loop
from tests.elastic.conformance import run_for, until


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context: Context = zmq.Context()
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for each in (one, other):
        each.setsockopt(zmq.RCVHWM, 0)
        each.setsockopt(zmq.SNDHWM, 0)
    one.bind("inproc://x")
    other.connect("inproc://x")
    yield one, other
    context.destroy(linger=0)


Pair = tuple[zmq.Socket[bytes], zmq.Socket[bytes]]


def test_all_that_waits_is_received_and_the_loop_turns_in_between(loop: Loop, pair: Pair) -> None:
    """More than is taken at once, and nothing is sent that would make it look again."""
    got: list[int] = []
    rests: list[int] = []
    for number in range(5000):
        pair[0].send(str(number).encode())
    watched = Watched(
        loop, pair[1], lambda frames: got.append(int(frames[0].bytes)), lambda: rests.append(len(got))
    )
    until(loop, lambda: len(got) == 5000)
    assert got == list(range(5000))
    assert rests[0] == 1000
    watched.close()


def test_nothing_is_missed_when_messages_come_while_it_sends(loop: Loop, pair: Pair) -> None:
    got: list[bytes] = []
    watched = Watched(loop, pair[1], lambda frames: got.append(frames[0].bytes))
    run_for(loop, 0.0)
    for number in range(500):
        pair[0].send(b"x")
        watched.socket.send(b"y")  # it may take the sign that something has come
        watched.look_again()
        until(loop, lambda number=number: len(got) == number + 1)
    watched.close()


def test_one_may_close_it_from_inside(loop: Loop, pair: Pair) -> None:
    got: list[bytes] = []

    def receive(frames: list[zmq.Frame]) -> None:
        got.append(frames[0].bytes)
        watched.close()

    watched = Watched(loop, pair[1], receive, lambda: pytest.fail("it is closed"))
    for word in (b"1", b"2"):
        pair[0].send(word)
    until(loop, lambda: got)
    run_for(loop, 0.01)
    watched.look_again()
    watched.close()
    run_for(loop, 0.01)
    assert got == [b"1"]


def test_a_monitor_tells_of_connections_in_order(loop: Loop) -> None:
    context: Context = zmq.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    told: list[int] = []
    watched = Watched(loop, server, lambda frames: None)
    events = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
    monitor = Monitor(loop, server, events, lambda event, value: told.append(event))
    client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
    until(loop, lambda: len(told) == 2)
    client.close(linger=0)
    until(loop, lambda: len(told) == 3)
    assert told == [zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED]
    monitor.close()
    monitor.close()
    watched.close()
    context.term()
