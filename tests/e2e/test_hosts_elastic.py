"""On three hosts: a job of two to three nodes goes on while nodes come, go and are lost."""

import os
import re
import signal

import pytest

from tests.support.command import Launch
from tests.support.hosts import needs_hosts
from tests.support.nodes import Nodes, codes, go

pytestmark = [*needs_hosts, pytest.mark.slow]

WORK = """
leave_on_term()
tell("in", "world", os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"])
wait_for_go()
tell("done")
"""
QUICK = "1"
"""Seconds for those that are missing: where nobody comes. One that stands still for longer has gone, too."""


def start(nodes: Nodes, number: int, patience: str = "60") -> Launch:
    return nodes.start(number, "--elastic_timeout", patience, nnodes="2:3")


def last(launch: Launch) -> list[str]:
    """World size and node rank of the process that it started last; nothing before the first."""
    return "".join(launch.told("in world")[-1:]).split()[-2:]


def in_world(launches: list[Launch], size: int) -> None:
    """Until the last process of each is in a world of so many. There may have been others before."""
    for launch in launches:
        launch.until(lambda launch=launch: last(launch)[:1] == [str(size)], f"in world {size}")


def last_node_rank(launch: Launch) -> str:
    return last(launch)[1]


def test_a_node_joins(three: Nodes):
    three.script(WORK)
    launches = [start(three, 0, QUICK), start(three, 1, QUICK)]
    in_world(launches, 2)
    ranks = [last_node_rank(launch) for launch in launches]
    launches.append(start(three, 2, QUICK))
    in_world(launches, 3)
    assert [last_node_rank(launch) for launch in launches] == [*ranks, "2"], "ranks are kept"
    go(launches)
    assert codes(launches) == [0, 0, 0], launches


@pytest.mark.parametrize("how", ["killed", "told to leave"])
def test_a_node_goes(three: Nodes, how: str):
    three.script(WORK)
    launches = [start(three, number) for number in range(3)]
    in_world(launches, 3)
    launches[1].send(signal.SIGKILL if how == "killed" else signal.SIGTERM)
    rest = [launches[0], launches[2]]
    in_world(rest, 2)
    assert sorted(map(last_node_rank, rest)) == ["0", "1"]
    go(rest)
    assert codes(rest) == [0, 0], launches
    assert launches[1].wait() == (-signal.SIGKILL if how == "killed" else 143), launches[1]
    assert not launches[1].told("done")


def test_a_node_that_was_cut_off_comes_back(three: Nodes):
    """As a newcomer: the job had gone on without it."""
    three.script(WORK)
    launches = [start(three, number) for number in range(3)]
    in_world(launches, 3)
    three.hosts[1].link_down()
    rest = [launches[0], launches[2]]
    in_world(rest, 2)
    assert sorted(map(last_node_rank, rest)) == ["0", "1"]
    assert launches[1].wait() in (124, 125), "without a store its own processes end"
    three.hosts[1].heal()
    again = start(three, 1)
    everybody = [launches[0], again, launches[2]]
    in_world(everybody, 3)
    go(everybody)
    assert codes(everybody) == [0, 0, 0], launches
    assert not launches[1].told("done")


def test_too_few_are_left(three: Nodes):
    three.script(WORK)
    launches = [start(three, number, QUICK) for number in range(2)]
    in_world(launches, 2)
    os.kill(launches[1].popen.pid, signal.SIGKILL)
    launches[1].wait()
    assert launches[0].wait() == 124, launches[0]
    assert "1 of 2 nodes joined again" in launches[0].said
    assert three.title(1) in launches[0].said


def test_another_takes_the_place_of_one_that_was_lost(three: Nodes):
    """Level 0: with its rank."""
    three.script(WORK)
    words = ("--elastic_level", "0", "--elastic_timeout", "60")
    launches = [three.start(number, *words, nnodes="2", script="train.py") for number in range(2)]
    in_world(launches, 2)
    ranks = [last_node_rank(launch) for launch in launches]
    os.kill(launches[1].popen.pid, signal.SIGKILL)
    launches[1].wait()
    other = three.start(2, *words, nnodes="2")
    in_world([other], 2)
    launches[0].until_told("in world 2", 2)
    assert [last_node_rank(launch) for launch in (launches[0], other)] == ranks
    go([launches[0], other])
    assert codes([launches[0], other]) == [0, 0]


def test_a_failure_counts_and_a_loss_does_not(three: Nodes):
    three.script("""
leave_on_term()
tell("in", "world", os.environ["WORLD_SIZE"], os.environ["GROUP_RANK"])
wait_for_go()
sys.exit(9)
""")
    launches = [start(three, number) for number in range(3)]
    in_world(launches, 3)
    os.kill(launches[2].popen.pid, signal.SIGKILL)
    launches[2].wait()
    in_world(launches[:2], 2)
    launches[0].go()
    assert codes(launches[:2]) == [9, 9], launches


@pytest.mark.parametrize("bad", [1, 3])
def test_a_host_that_loses_packets_is_left_out_before_the_start(five: Nodes, bad: int):
    """Of four nodes and a spare, by two turns: its partner in the first is not blamed."""
    five.script('tell("at", RANK, SIZE)\nwait_for_go()')
    five.hosts[bad].lossy(20)
    words = ("--spares", "1", "--check", "fast")
    launches = [five.start(number, "--rank", str(number), *words, nnodes="4") for number in range(4)]
    launches[0].until_err("checking this node and the link to")
    launches.append(five.start(4, *words, nnodes="4"))
    assert launches[bad].wait() == 123
    assert re.search(
        rf"{re.escape(five.title(bad))} is excluded from this job after 2 faults: check 1 of 2: "
        "(the link to its partner|the node did not answer)",
        launches[bad].said,
    )
    others = [each for number, each in enumerate(launches) if number != bad]
    go(others)
    assert codes(others) == [0] * 4
    assert sorted(line.partition(" at ")[2] for each in others for line in each.told(" at ")) == [
        "0 4",
        "1 4",
        "2 4",
        "3 4",
    ]
