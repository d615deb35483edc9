"""On three hosts: how nodes meet, whoever comes too late, too often, under a wrong rank or not at all."""

import os
import re
import signal
from typing import Any

import pytest

from tests.support.command import Launch
from tests.support.hosts import needs_hosts
from tests.support.nodes import Nodes, codes, go, ready

pytestmark = [*needs_hosts, pytest.mark.slow]

WORK = """
leave_on_term()
tell("ready", os.getpid(), "world", os.environ["WORLD_SIZE"], "node", os.environ["GROUP_RANK"])
wait_for_go()
"""
OUTSIDE = "10.77.0.99"
"""No host has it."""


def here(launch: Launch, count: int) -> None:
    """Until it says that so many nodes are there."""
    launch.until_err(f"{count} of ")


def test_the_store_comes_last(three: Nodes):
    three.script(WORK)
    launches = [three.start(number) for number in (1, 2)]
    for launch in launches:
        launch.until_err("Connection refused")
    launches.append(three.start(0))
    ready(launches)
    go(launches)
    assert codes(launches) == [0, 0, 0]


def test_without_a_master_the_first_says_where(three: Nodes):
    three.script(WORK)
    first = three.commands[0].start("--nnodes", "2", "train.py")
    first.until_err("--master=")
    typed = re.search(r"fleetrun (--master=\S+ .*)", first.err)
    assert typed is not None, first
    other = three.commands[1].start(*typed[1].split())
    ready([first, other])
    go([first, other])
    assert codes([first, other]) == [0, 0]


def test_by_name(three: Nodes):
    three.script(WORK)
    launches = [three.start(number, master="h1:6768") for number in range(3)]
    ready(launches)
    go(launches)
    assert codes(launches) == [0, 0, 0]


def test_by_a_list_of_machines(three: Nodes):
    """Ranks follow the list, whoever comes first."""
    three.script(WORK)
    listed = ",".join(host.name for host in three.hosts)
    launches = [three.commands[number].start("--ips", listed, "train.py") for number in (2, 1, 0)]
    ready(launches)
    told = [launch.told("ready")[0].split() for launch in launches]
    assert [row[-1] for row in told] == ["2", "1", "0"]
    go(launches)
    assert codes(launches) == [0, 0, 0]


def test_a_third_node_of_a_full_job_is_told_so(three: Nodes):
    three.script(WORK)
    pair = [three.start(number, nnodes="2") for number in range(2)]
    ready(pair)
    third = three.start(2, nnodes="2")
    assert third.wait() == 123, third
    assert "full" in third.said
    assert "2 of 2" in third.said
    assert not third.told("ready")
    assert [launch.popen.poll() for launch in pair] == [None, None]
    go(pair)
    assert codes(pair) == [0, 0]
    assert all(len(launch.told("ready")) == 1 for launch in pair), "it did not disturb them"


def test_one_that_dies_while_they_meet_is_replaced(three: Nodes):
    three.script(WORK)
    first = three.start(0)
    ghost = three.start(1)
    here(first, 2)
    os.kill(ghost.popen.pid, signal.SIGKILL)
    assert ghost.wait() == -signal.SIGKILL
    again = three.start(1)
    last = three.start(2)
    launches = [first, again, last]
    ready(launches)
    go(launches)
    assert codes(launches) == [0, 0, 0]
    assert not ghost.told("ready")


def test_one_that_is_cut_off_while_they_meet_is_no_member(three: Nodes):
    """Its link goes; a fourth in its place makes the job."""
    three.script(WORK)
    first = three.start(0)
    ghost = three.start(1, "--rdzv_timeout", "10")
    here(first, 2)
    three.hosts[1].link_down()
    launches = [first, *(three.start(2) for _ in range(2))]
    ready(launches)
    go(launches)
    assert codes(launches) == [0, 0, 0]
    assert ghost.wait() in (124, 125), ghost
    assert not ghost.told("ready")


def test_two_claim_the_same_rank(three: Nodes):
    """The first has it."""
    three.script(WORK)
    words = ("--heartbeat_timeout", "8")
    launches = [three.start(0, "--rank", "0", *words), three.start(1, "--rank", "1", *words)]
    here(launches[0], 2)
    wrong = three.start(2, "--rank", "1", *words)
    assert wrong.wait() not in (0, -9), wrong
    assert three.title(1) in wrong.said, wrong
    assert "rank 1" in wrong.said
    launches.append(three.start(2, "--rank", "2", *words))
    ready(launches)
    go(launches)
    assert codes(launches) == [0, 0, 0]


def test_one_never_comes(three: Nodes):
    three.script(WORK)
    launches = [three.start(number, "--rank", str(number), "--rdzv_timeout", "10") for number in (0, 2)]
    assert codes(launches) == [124, 124]
    for launch in launches:
        assert "2 of 3" in launch.said, launch
        assert "rank 1" in launch.said


def test_the_store_never_comes(three: Nodes):
    three.script(WORK)
    launch = three.start(1, "--rdzv_timeout", "5")
    assert launch.wait() == 124
    assert three.master in launch.said
    assert "Connection refused" in launch.said


def test_different_options(three: Nodes):
    three.script(WORK)
    launches = [three.start(0), three.start(1)]
    here(launches[0], 2)
    launches.append(three.start(2, "--max_restart", "5"))
    assert codes(launches) == [2, 2, 2], launches
    for launch in launches:
        assert f"--max_restart is 0 on {three.title(0)}" in launch.said, launch
        assert f"5 on {three.title(2)}" in launch.said
        assert not launch.told("ready")


def test_another_job(three: Nodes):
    three.script(WORK)
    first = three.start(0, nnodes="2")
    here(first, 1)
    wrong = three.start(1, "--job_id", "other", nnodes="2")
    assert wrong.wait() == 125, wrong
    assert "other" in wrong.said
    right = three.start(2, nnodes="2")
    ready([first, right])
    go([first, right])
    assert codes([first, right]) == [0, 0]


def test_a_secret(three: Nodes):
    three.script(WORK)
    right, wrong = (
        {"FLEETRUN_TOKEN": "a secret of 24 letters.."},
        {"FLEETRUN_TOKEN": "another of 24 letters..."},
    )
    first = three.start(0, nnodes="2", env=right)
    here(first, 1)
    for env in (wrong, {}):
        stranger = three.start(1, nnodes="2", env=env)
        assert stranger.wait() == 125, stranger
        assert "token" in stranger.said
        assert "24 letters" not in stranger.err
    other = three.start(2, nnodes="2", env=right)
    ready([first, other])
    go([first, other])
    assert codes([first, other]) == [0, 0]


def test_ctrl_c_while_they_meet(three: Nodes):
    three.script(WORK)
    launches = [three.start(0), three.start(1)]
    here(launches[0], 2)
    launches[1].send(signal.SIGINT)
    assert launches[1].wait() == 130
    others = [three.start(1), three.start(2)]
    ready([launches[0], *others])
    go([launches[0], *others])
    assert codes([launches[0], *others]) == [0, 0, 0]


@pytest.mark.parametrize("rank", [(), ("--rank", "0")], ids=["by arrival", "node 0"])
def test_the_name_of_the_first_node_gets_its_address_late(three: Nodes, rank: tuple[str, ...]):
    """As that of a pod behind a headless service of Kubernetes."""
    three.script(WORK)
    late: dict[str, Any] = {"nnodes": "2", "master": "late:6768", "env": {"KUBERNETES_SERVICE_HOST": "1"}}
    launches = [three.start(0, *rank, **late), three.start(1, **late)]
    launches[0].until_err("must serve the store at" if rank else "asking again")
    launches[1].until_err("asking again")
    with three.hosts[0].names.open("a") as names:
        names.write(f"{three.hosts[0].address} late\n")
    ready(launches)
    go(launches)
    assert codes(launches) == [0, 0]


@pytest.mark.parametrize("words", ["--rank 0", "--rdzv-conf is_host=1"])
def test_the_first_node_is_behind_another_address(three: Nodes, words: str):
    """That of a service, or of a NAT."""
    three.script(WORK)
    three.hosts[1].translate(OUTSIDE, three.hosts[0].address)
    behind: dict[str, Any] = {"nnodes": "2", "master": f"{OUTSIDE}:6768"}
    launches = [three.start(0, *words.split(), **behind), three.start(1, **behind)]
    ready(launches)
    go(launches)
    assert codes(launches) == [0, 0]


def test_a_listed_machine_is_behind_another_address(three: Nodes):
    """Then --rank says which one it is."""
    three.script(WORK)
    listed = ("--ips", f"{OUTSIDE},{three.hosts[1].address}", "--max_restart", "0", "train.py")
    three.hosts[1].translate(OUTSIDE, three.hosts[0].address)
    launches = [three.commands[0].start("--rank", "0", *listed), three.commands[1].start(*listed)]
    ready(launches)
    go(launches)
    assert codes(launches) == [0, 0]
