"""On three hosts: a job of two to three nodes goes on while nodes come, go and are lost."""

import os
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
QUICK = ("--heartbeat_timeout", "4", "--elastic_timeout", "1")


def start(nodes: Nodes, number: int, *words: str, nnodes: str = "2:3") -> Launch:
    return nodes.start(number, *QUICK, *words, nnodes=nnodes)


def in_world(launches: list[Launch], size: int) -> None:
    """Until each has a process in a world of so many."""
    for launch in launches:
        launch.until_told(f"in world {size}")


def last_node_rank(launch: Launch) -> str:
    return launch.told("in world")[-1].split()[-1]


def test_a_node_joins(three: Nodes):
    three.script(WORK)
    launches = [start(three, 0), start(three, 1)]
    in_world(launches, 2)
    ranks = [last_node_rank(launch) for launch in launches]
    launches.append(start(three, 2))
    in_world(launches, 3)
    assert [last_node_rank(launch) for launch in launches] == [*ranks, "2"], "ranks are kept"
    go(launches)
    assert codes(launches) == [0, 0, 0], launches


@pytest.mark.parametrize("how", ["killed", "cut off", "told to leave"])
def test_a_node_goes(three: Nodes, how: str):
    three.script(WORK)
    launches = [start(three, number) for number in range(3)]
    in_world(launches, 3)
    if how == "killed":
        os.kill(launches[1].popen.pid, signal.SIGKILL)
    elif how == "cut off":
        three.hosts[1].link_down()
    else:
        launches[1].send(signal.SIGTERM)
    rest = [launches[0], launches[2]]
    in_world(rest, 2)
    assert sorted(map(last_node_rank, rest)) == ["0", "1"]
    go(rest)
    assert codes(rest) == [0, 0], launches
    expected = {"killed": {-signal.SIGKILL}, "cut off": {124, 125}, "told to leave": {143}}
    assert launches[1].wait() in expected[how], launches[1]
    assert not launches[1].told("done")


def test_a_node_that_was_cut_off_comes_back(three: Nodes):
    """As a newcomer: the job had gone on without it."""
    three.script(WORK)
    launches = [start(three, number) for number in range(3)]
    in_world(launches, 3)
    three.hosts[1].link_down()
    in_world([launches[0], launches[2]], 2)
    assert launches[1].wait() in (124, 125), "without a store its own processes end"
    three.hosts[1].heal()
    again = start(three, 1)
    launches[0].until(lambda: len(launches[0].told("in world 3")) == 2)
    everybody = [launches[0], again, launches[2]]
    in_world(everybody, 3)
    go(everybody)
    assert codes(everybody) == [0, 0, 0], launches


def test_too_few_are_left(three: Nodes):
    three.script(WORK)
    launches = [start(three, number) for number in range(2)]
    in_world(launches, 2)
    os.kill(launches[1].popen.pid, signal.SIGKILL)
    launches[1].wait()
    assert launches[0].wait() == 124, launches[0]
    assert "1 of 2 nodes met again" in launches[0].said
    assert three.title(1) in launches[0].said


def test_another_takes_the_place_of_one_that_was_lost(three: Nodes):
    """Level 0: with its rank."""
    three.script(WORK)
    words = ("--elastic_level", "0", "--elastic_timeout", "60")
    launches = [
        three.start(number, "--heartbeat_timeout", "4", *words, nnodes="2", script="train.py")
        for number in range(2)
    ]
    in_world(launches, 2)
    ranks = [last_node_rank(launch) for launch in launches]
    os.kill(launches[1].popen.pid, signal.SIGKILL)
    launches[1].wait()
    other = three.start(2, "--heartbeat_timeout", "4", *words, nnodes="2")
    in_world([other], 2)
    launches[0].until(lambda: len(launches[0].told("in world 2")) == 2)
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
