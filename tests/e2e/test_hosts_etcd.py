"""On three hosts that meet in an etcd on the first: no node is special, and etcd may be away for a while."""

import os
import signal

import pytest

from tests.support.command import Launch
from tests.support.hosts import needs_hosts
from tests.support.nodes import Etcd, Nodes, codes, go, needs_etcd, ready, until_store_back, until_store_lost
from tests.support.waiting import eventually

pytestmark = [
    *needs_hosts,
    pytest.mark.slow,
    needs_etcd,
]

WORK = """
leave_on_term()
tell("ready", os.getpid())
wait_for_go()
tell("done")
"""
LASTING = ("--heartbeat_timeout", "1000")
"""Nobody is missed because of it: neither a machine nor a process is ever so slow."""


@pytest.fixture
def etcd(three: Nodes) -> Etcd:
    made = Etcd(three.hosts[0])
    three.master = made.url
    return made


def started(nodes: Nodes, *words: str, nnodes: str = "3") -> list[Launch]:
    nodes.script(WORK)
    launches = nodes.start_all(*words, nnodes=nnodes)
    ready(launches)
    return launches


def test_a_job_leaves_nothing_behind_and_touches_no_other(three: Nodes, etcd: Etcd):
    others = ["/fleetrun/px/nodes/a", "/fleetrun/px11/nodes/a", "/paddle/px1"]
    for key in others:
        etcd.put(key)
    launches = started(three, "--job_id", "px1")
    assert len(etcd.keys()) > len(others)
    go(launches)
    assert codes(launches) == [0, 0, 0]
    # Whoever has no time left while etcd stands still leaves its lease to end by itself.
    eventually(lambda: sorted(etcd.keys()) == sorted(others))


@pytest.mark.parametrize("heartbeat", ["1000", "10"])
def test_etcd_is_killed_and_comes_back(three: Nodes, etcd: Etcd, heartbeat: str):
    launches = started(three, "--heartbeat_timeout", heartbeat)
    etcd.kill()
    for launch in launches:
        until_store_lost(launch)
    etcd.start()
    for launch in launches:
        until_store_back(launch)
    go(launches)
    assert codes(launches) == [0, 0, 0], launches
    assert all(len(launch.told("ready")) == 1 for launch in launches), "nobody started again"


def test_a_failure_while_etcd_is_away_ends_that_node_and_then_all(three: Nodes, etcd: Etcd):
    three.script("leave_on_term()\ntell('ready', os.getpid())\nwait_for_go()\nsys.exit(7)")
    launches = three.start_all(*LASTING)
    ready(launches)
    etcd.kill()
    launches[1].go()
    assert launches[1].wait() == 7
    etcd.start()
    etcd.expire(three.hosts[1])
    ended = codes([launches[0], launches[2]])
    assert all(code in (7, 125) for code in ended), launches


@pytest.mark.parametrize("number", [0, 2])
def test_any_launcher_may_be_killed(three: Nodes, etcd: Etcd, number: int):
    launches = started(three, *LASTING)
    os.kill(launches[number].popen.pid, signal.SIGKILL)
    launches[number].wait()
    rest = [launch for launch in launches if launch is not launches[number]]
    assert codes(rest) == [125, 125]
    for launch in rest:
        assert f"node {number}, {three.title(number)}" in launch.said, launch


def test_an_elastic_job_survives_any_of_its_nodes(three: Nodes, etcd: Etcd):
    words = (*LASTING, "--elastic_timeout", "20")
    launches = started(three, *words, nnodes="2:3")
    os.kill(launches[0].popen.pid, signal.SIGKILL)
    launches[0].wait()
    for launch in launches[1:]:
        launch.until_told("ready", 2)
    again = three.start(0, *words, nnodes="2:3")
    everybody = [again, *launches[1:]]
    for launch, times in zip(everybody, (1, 3, 3), strict=True):
        launch.until_told("ready", times)
    go(everybody)
    assert codes(everybody) == [0, 0, 0]


def test_a_host_is_cut_off_from_etcd(three: Nodes, etcd: Etcd):
    launches = started(three, "--heartbeat_timeout", "10")
    three.hosts[2].partition_from(three.hosts[0])
    assert codes(launches[:2]) == [125, 125], launches
    for launch in launches[:2]:
        assert f"node 2, {three.title(2)}" in launch.said, launch
    three.hosts[2].heal()
    assert launches[2].wait() == 125, launches[2]


def test_no_etcd_there(three: Nodes):
    three.script(WORK)
    launch = three.start(1, "--rdzv_timeout", "2", master=f"etcd://{three.hosts[0].address}:2379")
    assert launch.wait() == 124, launch
    assert f"{three.hosts[0].address}:2379" in launch.said
