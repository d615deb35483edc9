"""The embedded store when processes are killed and stopped, and connections break."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.elastic.actors import Actor
from tests.elastic.proxy import Proxy
from tests.support.waiting import eventually, state_of

LEASE = 2.0
EARLY = LEASE / 4
SLACK = 1.0
"""What a busy machine may add."""


class Cast:
    def __init__(self, folder: Path, stack: ExitStack, token: str = "") -> None:
        self._folder = folder
        self._stack = stack
        self._token = token
        self.host = self._start("host", LEASE, token)
        eventually(lambda: self.host.said("at"))
        self.endpoint = self.host.said("at")[0]
        self.nodes: dict[str, Actor] = {}

    def node(self, name: str, endpoint: str = "") -> Actor:
        started = self.nodes[name] = self._start("node", endpoint or self.endpoint, name, LEASE, self._token)
        return started

    def all_see(self, *names: str, within: float = 20.0) -> None:
        words = " ".join(["sees", *sorted(names)])
        deadline = time.monotonic() + within
        for actor in (self.host, *(self.nodes[name] for name in names if name != "host")):
            actor.wait_for(words, deadline - time.monotonic())

    def _start(self, *words: object) -> Actor:
        return self._stack.enter_context(Actor(self._folder, *words))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def cast(tmp_path: Path, stack: ExitStack, request: pytest.FixtureRequest) -> Cast:
    return Cast(tmp_path, stack, getattr(request, "param", ""))


with_and_without_secret = pytest.mark.parametrize(
    "cast", ["", "correct horse battery"], ids=["open", "secret"], indirect=True
)


@pytest.fixture
def proxy(cast: Cast, stack: ExitStack) -> Proxy:
    return stack.enter_context(Proxy(cast.endpoint))


def stop(actor: Actor) -> None:
    actor.popen.send_signal(signal.SIGSTOP)
    eventually(lambda: state_of(actor.popen.pid) == "T")


def go_on(actor: Actor) -> None:
    actor.popen.send_signal(signal.SIGCONT)


def pause(seconds: float) -> None:
    """The time is what is tested."""
    time.sleep(seconds)


# ---- processes


@with_and_without_secret
def test_a_node_that_is_killed_is_missed_at_once(cast: Cast) -> None:
    cast.node("a")
    cast.node("b")
    cast.all_see("a", "b", "host")
    cast.nodes["a"].popen.kill()
    cast.all_see("b", "host", within=EARLY + SLACK)


def test_a_node_that_leaves_is_gone_at_once(cast: Cast) -> None:
    cast.node("a")
    cast.all_see("a", "host")
    cast.nodes["a"].finish()
    cast.all_see("host", within=SLACK)
    assert cast.nodes["a"].popen.returncode == 0


@pytest.mark.slow
@with_and_without_secret
def test_of_a_store_that_is_killed_the_nodes_know_soon(cast: Cast) -> None:
    node = cast.node("a")
    cast.all_see("a", "host")
    cast.host.popen.kill()
    eventually(lambda: node.said("lost"), within=1.0 + 0.5 + SLACK)
    assert node.said("lost") == [
        f"the meeting point {cast.endpoint} is gone, and the launcher that served it: connection refused"
    ]
    assert node.said("down") == [f"{cast.endpoint}: Connection refused"]


@pytest.mark.slow
def test_a_node_that_was_stopped_for_a_moment_is_still_there(cast: Cast) -> None:
    node = cast.node("a")
    cast.all_see("a", "host")
    stop(node)
    pause(0.6 * LEASE)
    go_on(node)
    pause(LEASE)
    cast.all_see("a", "host", within=0.1)
    assert cast.host.said("sees") == ["host", "a host"]
    assert node.said("up") == ["True"]


@pytest.mark.slow
def test_a_node_that_was_stopped_for_long_comes_back_under_another_lease(cast: Cast) -> None:
    node = cast.node("a")
    cast.all_see("a", "host")
    stop(node)
    cast.host.wait_for("sees host", within=LEASE + SLACK)
    pause(LEASE)
    go_on(node)
    cast.all_see("a", "host", within=SLACK)
    assert node.said("up") == ["True", "True"]
    assert node.said("lost") == []


@pytest.mark.slow
def test_a_store_that_was_stopped_for_a_moment_gives_nobody_up(cast: Cast) -> None:
    node = cast.node("a")
    cast.all_see("a", "host")
    stop(cast.host)
    pause(0.6 * LEASE)
    go_on(cast.host)
    pause(LEASE)
    cast.all_see("a", "host", within=0.1)
    assert cast.host.said("sees") == ["host", "a host"]
    assert set(node.said("up")[1:]) <= {"False"}


@pytest.mark.slow
def test_a_store_that_is_silent_for_a_lease_is_lost(cast: Cast) -> None:
    node = cast.node("a")
    cast.all_see("a", "host")
    stop(cast.host)
    stopped_at = time.monotonic()
    eventually(lambda: node.said("lost"), within=1.5 * LEASE + SLACK)
    assert time.monotonic() - stopped_at > 0.7 * LEASE
    (lost,) = node.said("lost")
    assert (
        lost == f"the meeting point {cast.endpoint} has not answered for {LEASE:g} s: "
        "its machine or the network is gone"
    )


@pytest.mark.slow
def test_when_everything_stood_still_nobody_is_given_up(cast: Cast) -> None:
    """A machine that was suspended, or a job under Ctrl-Z."""
    node = cast.node("a")
    cast.all_see("a", "host")
    for actor in (node, cast.host):
        stop(actor)
    pause(2 * LEASE)
    for actor in (cast.host, node):
        go_on(actor)
    pause(LEASE)
    cast.all_see("a", "host", within=0.1)
    assert node.said("lost") == []
    assert cast.host.said("sees") == ["host", "a host"]


# ---- connections


@pytest.mark.slow
@with_and_without_secret
def test_connections_that_were_reset_are_forgiven(cast: Cast, proxy: Proxy) -> None:
    nodes = [cast.node(name, proxy.endpoint) for name in ("a", "b")]
    cast.all_see("a", "b", "host")
    for round_ in range(1, 4):
        proxy.reset()
        for node in nodes:
            eventually(lambda node=node, round_=round_: len(node.said("up")) == 1 + round_)
    pause(2 * EARLY)
    assert cast.host.said("sees")[-1] == "a b host"
    assert "host" not in cast.host.said("sees")[2:], "nobody was ever missing"
    for node in nodes:
        assert node.said("up") == ["True", "False", "False", "False"]
        assert not [why for why in node.said("down") if "no answer for" not in why], "a busy machine is slow"


@pytest.mark.slow
def test_a_cut_shorter_than_the_lease_is_forgiven(cast: Cast, proxy: Proxy) -> None:
    node = cast.node("a", proxy.endpoint)
    cast.all_see("a", "host")
    proxy.cut()
    pause(0.6 * LEASE)
    proxy.heal()
    pause(LEASE)
    assert cast.host.said("sees") == ["host", "a host"]
    assert node.said("up") in (["True"], ["True", "False"])
    cast.node("b")
    node.wait_for("sees a b host")


@pytest.mark.slow
def test_a_cut_longer_than_the_lease_is_known_on_both_sides(cast: Cast, proxy: Proxy) -> None:
    node = cast.node("a", proxy.endpoint)
    cast.all_see("a", "host")
    proxy.cut()
    cut_at = time.monotonic()
    cast.host.wait_for("sees host", within=LEASE + SLACK)
    assert time.monotonic() - cut_at > 0.7 * LEASE
    eventually(lambda: node.said("lost"), within=1.5 * LEASE)
    assert "has not answered" in node.said("lost")[0]


@pytest.mark.slow
def test_a_node_whose_store_is_not_there_yet_waits_for_it(tmp_path: Path, stack: ExitStack) -> None:
    with Proxy("127.0.0.1:1") as nothing:
        endpoint = nothing.endpoint
    node = stack.enter_context(Actor(tmp_path, "node", endpoint, "a", LEASE, ""))
    eventually(lambda: node.said("down"))
    pause(1.5)
    assert node.said("down") == [f"{endpoint}: Connection refused"]
    assert node.said("lost") == []


@pytest.mark.slow
def test_waiting_costs_next_to_nothing(tmp_path: Path, stack: ExitStack) -> None:
    def used(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    with Proxy("127.0.0.1:1") as nothing:
        endpoint = nothing.endpoint
    node = stack.enter_context(Actor(tmp_path, "node", endpoint, "a", LEASE, ""))
    eventually(lambda: node.said("down"))
    pause(1.5)  # first it tries more often
    before = used(node.popen.pid)
    pause(3.0)
    assert used(node.popen.pid) - before <= 0.06
