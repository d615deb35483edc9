"""On three hosts: what the network does to a job. What heals within --heartbeat_timeout is forgiven; what
does not ends the job everywhere, on the side that was cut off too.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.command import Launch
from tests.support.hosts import Host, needs_hosts
from tests.support.nodes import Nodes, codes, go, nodes, ready, until_store_back, until_store_lost

pytestmark = [*needs_hosts, pytest.mark.slow]

WORK = """
leave_on_term()
tell("ready", os.getpid())
wait_for_go()
tell("done")
"""

LONG = 60
"""Seconds. What ends before them is in time, however slow a machine is."""

SOON = 10
"""Seconds. A host whose network works is not silent for that long, though its launcher stands still for a
while.
"""

Fault = Callable[[Host, Host, Host], None]
FAULTS: dict[str, Fault] = {
    "partition": lambda store, victim, third: victim.partition_from(store, third),
    "nothing arrives": lambda store, victim, third: victim.drop_from(store, third),
    "nothing leaves": lambda store, victim, third: victim.drop_to(store, third),
    "no link": lambda store, victim, third: victim.link_down(),
}


def started(those: Nodes, heartbeat: int) -> list[Launch]:
    those.script(WORK)
    launches = those.start_all("--heartbeat_timeout", str(heartbeat))
    ready(launches)
    return launches


def completed(launches: list[Launch]) -> None:
    """All go on to the end as if nothing had been."""
    go(launches)
    assert codes(launches) == [0] * len(launches), launches
    assert all(len(launch.told("ready")) == len(launch.told("done")) == 1 for launch in launches)


@pytest.mark.parametrize("fault", ["partition", "no link"])
def test_a_network_that_comes_back_in_time_is_forgiven(three: Nodes, fault: str):
    """The connection breaks too: silence over one would be noticed after half of --heartbeat_timeout only."""
    launches = started(three, LONG)
    FAULTS[fault](three.hosts[0], three.hosts[1], three.hosts[2])
    three.hosts[1].reset_connections()
    until_store_lost(launches[1])
    three.hosts[1].heal()
    until_store_back(launches[1])
    completed(launches)


def test_the_link_of_the_stores_host_may_come_back_too(three: Nodes):
    launches = started(three, LONG)
    three.hosts[0].link_down()
    for host, launch in zip(three.hosts[1:], launches[1:], strict=True):
        host.reset_connections()
        until_store_lost(launch)
    three.hosts[0].link_up()
    for launch in launches[1:]:
        until_store_back(launch)
    completed(launches)


def test_a_host_that_stays_away_ends_the_job(tmp_path: Path):
    """All faults at once, each in a network of its own: together they take no longer than one."""
    with ExitStack() as stack:
        jobs = {}
        for fault, strike in FAULTS.items():
            folder = tmp_path / fault
            folder.mkdir()
            found = stack.enter_context(nodes(3, folder))
            jobs[fault] = found, started(found, SOON)
            strike(*found.hosts)
        for fault, (found, launches) in jobs.items():
            assert codes(launches) == [125, 125, 125], (fault, launches)
            for launch in (launches[0], launches[2]):
                assert f"node 1, {found.title(1)}" in launch.said, (fault, launch)
                assert f"{SOON} s" in launch.said
            assert found.master in launches[1].said, (fault, launches[1])


def test_the_stores_host_stays_away(three: Nodes):
    launches = started(three, SOON)
    three.hosts[0].link_down()
    assert codes(launches) == [125, 125, 125], launches
    for launch in launches[1:]:
        assert three.master in launch.said, launch


def test_a_failure_that_nobody_hears_of_ends_all_the_same(three: Nodes):
    """The host that is cut off has a failure of its own meanwhile."""
    three.script("""
leave_on_term()
tell("ready", os.getpid())
wait_for_go()
sys.exit(7)
""")
    launches = three.start_all("--heartbeat_timeout", "10")
    ready(launches)
    three.hosts[1].link_down()
    launches[1].go()
    assert codes([launches[1]]) == [7]
    assert codes([launches[0], launches[2]]) == [125, 125]


@pytest.mark.parametrize("percent", [30])
def test_much_is_lost(three: Nodes, percent: int):
    for host in three.hosts[1:]:
        host.lossy(percent)
    completed(started(three, LONG))


@pytest.mark.parametrize("number", [0, 1])
def test_every_connection_is_reset(three: Nodes, number: int):
    launches = started(three, LONG)
    for _ in range(5):
        three.hosts[number].reset_connections()
    completed(launches)


def test_connections_are_reset_all_the_while(three: Nodes):
    """From before the nodes meet until they have ended."""
    three.script(WORK)
    launches = three.start_all("--heartbeat_timeout", str(LONG))
    while not all(launch.told("ready") for launch in launches):
        for host in three.hosts:
            host.reset_connections()
    go(launches)
    while any(launch.popen.poll() is None for launch in launches):
        three.hosts[0].reset_connections()
    assert codes(launches) == [0, 0, 0], launches


def test_a_way_that_takes_200_ms(three: Nodes):
    """Two nodes, and between them and the store a long way."""
    three.script(WORK)
    store = three.start(0, "--rank", "0", nnodes="2")
    launches = [
        store,
        three.start(1, "--rank", "1", nnodes="2", master=three.hosts[2].proxy(three.master, 0.2)),
    ]
    ready(launches)
    completed(launches)


def test_a_failure_over_a_way_that_takes_200_ms(three: Nodes):
    three.script("leave_on_term()\ntell('ready', os.getpid())\nwait_for_go()\nsys.exit(7)")
    far = three.hosts[2].proxy(three.master, 0.2)
    launches = [
        three.start(0, "--rank", "0", nnodes="2"),
        three.start(1, "--rank", "1", nnodes="2", master=far),
    ]
    ready(launches)
    launches[1].go()
    assert codes(launches) == [7, 7], launches
    assert all(f"node 1, {three.title(1)}" in launch.said for launch in launches)
