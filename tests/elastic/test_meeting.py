"""Opening and closing the rendezvous store in one loop: the node that hosts it leaves last."""

import socket
import time
from collections.abc import Iterator

import pytest

from fleetrun.elastic.embedded.client import ZmqStore
from fleetrun.elastic.meeting import CLOSE_TIMEOUT, Meeting, MeetingOptions, open_meeting
from fleetrun.envs.contract import split_endpoint
from fleetrun.host.network import Ports
from fleetrun.pod.loop import Loop
from tests.elastic.test_embedded_hostile import NULL


class Listener:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def up(self, *, fresh: bool) -> None:
        self._loop.stop()

    def changed(self) -> None: ...
    def down(self, why: str) -> None: ...
    def lost(self, error: Exception) -> None: ...


SLOWER = 20
"""So many times more slowly than elsewhere time passes here: what waits in vain does so for a minute."""


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(lambda: time.monotonic() / SLOWER)
    yield made
    made.close()


def hosted(loop: Loop, ports: Ports) -> Meeting:
    wish = MeetingOptions(master=None, address="127.0.0.1", job_id="job", node_id="a", lease=5.0)
    return open_meeting(wish, loop, ports)


def test_the_store_is_there_until_the_others_have_said_good_bye(loop: Loop) -> None:
    ports = Ports(None)
    meeting = hosted(loop, ports)
    other = ZmqStore(loop, meeting.endpoint, job_id="job", node_id="b", lease=5.0)
    other.open(Listener(loop))  # type: ignore[arg-type]
    loop.run()
    done: list[str] = []

    def leave() -> None:
        done.append("left")
        other.close()

    loop.after(0.05 / SLOWER, leave)
    began = loop.clock()
    meeting.close()
    assert done == ["left"]
    assert loop.clock() - began < CLOSE_TIMEOUT
    ports.close()


def test_without_other_nodes_it_closes_at_once(loop: Loop) -> None:
    ports = Ports(None)
    meeting = hosted(loop, ports)
    began = loop.clock()
    meeting.close()
    assert loop.clock() - began < CLOSE_TIMEOUT
    ports.close()


def test_a_connection_without_the_secret_is_reported(loop: Loop) -> None:
    ports, said = Ports(None), list[str]()

    def tell(text: str) -> None:
        said.append(text)
        loop.stop()

    wish = MeetingOptions(
        master=None,
        address="127.0.0.1",
        job_id="job",
        node_id="a",
        lease=5.0,
        token="0123456789abcdef",
        show=tell,
    )
    meeting = open_meeting(wish, loop, ports)
    host, port = split_endpoint(meeting.endpoint)
    with socket.create_connection((host, port)) as stranger:
        stranger.sendall(NULL)
        loop.run()
    assert "rejected 1 connections so far: not fleetrun, or without this job's token" in said[0]
    meeting.close()
    ports.close()
