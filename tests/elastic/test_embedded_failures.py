"""The embedded store when processes are killed and stopped, and connections break. Its processes share a
clock that stops while one of them is suspended, unless a test has stopped that one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fleetrun.elastic.embedded import wire
from tests.elastic.actors import Actor
from tests.elastic.proxy import Proxy
from tests.support.cluster import reserved_endpoints
from tests.support.shared_clock import SharedClock
from tests.support.waiting import eventually

LEASE = 4.0
MOMENT = 0.3 * LEASE
"""Long enough to be noticed."""
LONG = 1000.0
"""A lease that does not end within a test: what happens then has other reasons."""
GRACE = 4.0
"""For whom has lost its connection, where a busy machine might need more than the usual second."""


class Cast:
    def __init__(
        self, folder: Path, stack: ExitStack, clock: SharedClock, lease: float, token: str = ""
    ) -> None:
        self._folder = folder
        self._stack = stack
        self.clock = clock
        self._lease = lease
        self._token = token
        (endpoint,) = stack.enter_context(
            reserved_endpoints(1)
        )  # not taken by another process when the store is gone
        self.host = self._start("host", endpoint, lease, token, GRACE)
        eventually(lambda: self.host.said("at"))
        self.endpoint = self.host.said("at")[0]
        self.nodes: dict[str, Actor] = {}

    def node(self, name: str, endpoint: str = "") -> Actor:
        words = (endpoint or self.endpoint, name, self._lease, self._token)
        started = self.nodes[name] = self._start("node", *words)
        return started

    def all_see(self, *names: str) -> None:
        words = " ".join(["sees", *sorted(names)])
        for actor in (self.host, *(self.nodes[name] for name in names if name != "host")):
            actor.wait_for(words)

    def _start(self, *words: object) -> Actor:
        return self._stack.enter_context(Actor(self._folder, self.clock, *words))

    def pause(self, seconds: float) -> None:
        pause(self.clock, seconds)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[SharedClock]:
    with SharedClock(tmp_path / "clock") as made:
        yield made


@pytest.fixture
def cast(tmp_path: Path, stack: ExitStack, clock: SharedClock) -> Cast:
    return Cast(tmp_path, stack, clock, LEASE)


@pytest.fixture
def patient(tmp_path: Path, stack: ExitStack, clock: SharedClock, request: pytest.FixtureRequest) -> Cast:
    return Cast(tmp_path, stack, clock, LONG, getattr(request, "param", ""))


with_and_without_secret = pytest.mark.parametrize(
    "patient", ["", "correct horse battery"], ids=["open", "secret"], indirect=True
)


@pytest.fixture
def proxy(cast: Cast, stack: ExitStack) -> Proxy:
    return stack.enter_context(Proxy(cast.endpoint))


@pytest.fixture
def unserved() -> Iterator[str]:
    """An endpoint that is taken, and at which no process listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def pause(clock: SharedClock, seconds: float) -> None:
    """The time is what is tested."""
    end = clock() + seconds
    eventually(lambda: clock() >= end)


# ---- processes


@pytest.mark.slow
@with_and_without_secret
def test_a_node_that_is_killed_is_missed_before_its_lease_ends(patient: Cast) -> None:
    patient.node("a")
    patient.node("b")
    patient.all_see("a", "b", "host")
    patient.nodes["a"].kill()
    patient.all_see("b", "host")


@pytest.mark.slow
def test_a_node_that_leaves_says_so_and_is_gone(patient: Cast) -> None:
    with Proxy(patient.endpoint) as proxy:
        patient.node("a", proxy.endpoint)
        patient.all_see("a", "host")
        patient.nodes["a"].finish()
        patient.all_see("host")
        assert any(wire.encode(wire.Bye()) in heard for heard in proxy.heard)
    assert patient.nodes["a"].popen.returncode == 0


@pytest.mark.slow
@with_and_without_secret
def test_of_a_store_that_is_killed_the_nodes_know_before_their_lease_ends(patient: Cast) -> None:
    node = patient.node("a")
    patient.all_see("a", "host")
    patient.host.kill()
    eventually(lambda: node.said("lost"))
    (lost,) = node.said("lost")
    assert patient.endpoint in lost
    assert "connection refused" in lost
    assert node.said("down") == [f"{patient.endpoint}: Connection refused"]


@pytest.mark.slow
def test_a_node_that_was_stopped_for_a_moment_is_still_there(cast: Cast) -> None:
    node = cast.node("a")
    cast.all_see("a", "host")
    node.stop()
    cast.pause(MOMENT)
    node.go_on()
    cast.pause(LEASE)
    cast.all_see("a", "host")
    assert cast.host.said("sees") == ["host", "a host"]
    assert set(node.said("up")[1:]) <= {"False"}


@pytest.mark.slow
def test_a_node_that_was_stopped_for_long_comes_back_under_another_lease(cast: Cast) -> None:
    node = cast.node("a")
    cast.all_see("a", "host")
    node.stop()
    cast.host.wait_for("sees host")
    cast.pause(LEASE / 2)
    node.go_on()
    cast.all_see("a", "host")
    assert node.said("up").count("True") == 2
    assert node.said("lost") == []


@pytest.mark.slow
def test_a_store_that_was_stopped_for_a_moment_ends_no_lease(cast: Cast) -> None:
    node = cast.node("a")
    cast.all_see("a", "host")
    cast.host.stop()
    cast.pause(MOMENT)
    cast.host.go_on()
    cast.pause(LEASE)
    cast.all_see("a", "host")
    assert cast.host.said("sees") == ["host", "a host"]
    assert set(node.said("up")[1:]) <= {"False"}


@pytest.mark.slow
def test_a_store_that_is_silent_for_a_lease_is_lost(cast: Cast) -> None:
    node = cast.node("a")
    cast.all_see("a", "host")
    stopped_at = cast.clock()
    cast.host.stop()
    eventually(lambda: node.said("lost"))
    assert cast.clock() - stopped_at > 0.7 * LEASE
    (lost,) = node.said("lost")
    assert (
        lost == f"the rendezvous store {cast.endpoint} has not answered for {LEASE:g} s: "
        "its machine or network is down"
    )


@pytest.mark.slow
def test_when_everything_was_suspended_no_lease_ends(cast: Cast) -> None:
    """A machine that was suspended, or a job under Ctrl-Z."""
    node = cast.node("a")
    cast.all_see("a", "host")
    for actor in (node, cast.host):
        actor.stop()
    cast.pause(1.5 * LEASE)
    for actor in (cast.host, node):
        actor.go_on()
    cast.pause(LEASE)
    cast.all_see("a", "host")
    assert node.said("lost") == []
    assert cast.host.said("sees") == ["host", "a host"]


# ---- connections


@pytest.mark.slow
@with_and_without_secret
def test_connections_that_were_reset_are_forgiven(patient: Cast, stack: ExitStack) -> None:
    proxy = stack.enter_context(Proxy(patient.endpoint))
    nodes = [patient.node(name, proxy.endpoint) for name in ("a", "b")]
    patient.all_see("a", "b", "host")
    for round_ in range(1, 4):
        proxy.reset()
        for node in nodes:
            eventually(lambda node=node, round_=round_: len(node.said("up")) == 1 + round_)
    patient.pause(1.2 * GRACE)
    assert patient.host.said("sees")[-1] == "a b host"
    assert "host" not in patient.host.said("sees")[2:], "no node was ever missing"
    for node in nodes:
        assert node.said("up") == ["True", "False", "False", "False"]
        assert node.said("down") == []


@pytest.mark.slow
def test_a_cut_shorter_than_the_lease_is_forgiven(cast: Cast, proxy: Proxy) -> None:
    node = cast.node("a", proxy.endpoint)
    cast.all_see("a", "host")
    proxy.cut()
    cast.pause(MOMENT)
    proxy.heal()
    cast.pause(LEASE)
    assert cast.host.said("sees") == ["host", "a host"]
    assert set(node.said("up")[1:]) <= {"False"}
    cast.node("b")
    node.wait_for("sees a b host")


@pytest.mark.slow
def test_a_cut_longer_than_the_lease_is_known_on_both_sides(cast: Cast, proxy: Proxy) -> None:
    node = cast.node("a", proxy.endpoint)
    cast.all_see("a", "host")
    cut_at = cast.clock()
    proxy.cut()
    cast.host.wait_for("sees host")
    assert cast.clock() - cut_at > 0.7 * LEASE
    eventually(lambda: node.said("lost"))
    assert "has not answered" in node.said("lost")[0]


@pytest.mark.slow
def test_a_node_whose_store_is_not_there_yet_waits_for_it_and_next_to_nothing_is_used(
    tmp_path: Path, stack: ExitStack, clock: SharedClock, unserved: str
) -> None:
    def used() -> float:
        fields = Path(f"/proc/{node.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    node = stack.enter_context(Actor(tmp_path, clock, "node", unserved, "a", LEASE, ""))
    eventually(lambda: node.said("down"))
    pause(clock, 1.5)  # first it tries more often
    before, began = used(), clock()
    pause(clock, 3.0)
    assert used() - before < 0.1 * (clock() - began)
    assert node.said("down") == [f"{unserved}: Connection refused"]
    assert node.said("lost") == []
