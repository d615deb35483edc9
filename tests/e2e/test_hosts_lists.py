"""On three hosts: endpoint lists, which say what runs where."""

import signal

import pytest

from tests.support.hosts import needs_hosts
from tests.support.nodes import Nodes, codes, go

pytestmark = [*needs_hosts, pytest.mark.slow]

WORK = """
tell("at", os.environ["TRAINING_ROLE"], os.environ["PADDLE_CURRENT_ENDPOINT"], os.environ["PADDLE_NNODES"])
leave_on_term()
if os.environ["TRAINING_ROLE"] == "PSERVER":
    stay()
wait_for_go()
"""


def test_servers_and_trainers_run_where_the_lists_say(three: Nodes):
    """Servers on two hosts, trainers on two: one host has both, and the list's order gives the ranks."""
    three.script(WORK)
    a, b, c = (host.address for host in three.hosts)
    lists = ("--servers", f"{b}:7001,{a}:7001", "--trainers", f"{c}:7002,{b}:7002,{c}:7003")
    launches = [command.start(*lists, "--max_restart", "0", "train.py") for command in three.commands]
    for launch, count in zip(launches, (1, 2, 2), strict=True):
        launch.until_told(" at ", count)
    told = {line.split()[0]: line.split()[2:] for launch in launches for line in launch.told(" at ")}
    assert told == {
        "ps.0": ["PSERVER", f"{b}:7001", "3"],
        "ps.1": ["PSERVER", f"{a}:7001", "3"],
        "trainer.0": ["TRAINER", f"{c}:7002", "3"],
        "trainer.1": ["TRAINER", f"{b}:7002", "3"],
        "trainer.2": ["TRAINER", f"{c}:7003", "3"],
    }
    go(launches)
    assert codes(launches) == [0, 0, 0]


def test_a_host_that_is_in_no_list_is_told_both(three: Nodes):
    three.script(WORK)
    a, b, c = (host.address for host in three.hosts)
    launch = three.commands[2].run("--servers", f"{a}:7001", "--trainers", f"{b}:7002", "train.py")
    assert launch.code == 2
    assert c in launch.err
    assert f"{a}, {b}" in launch.err


def test_a_port_that_is_taken_is_told_before_anything_starts(three: Nodes):
    three.script(WORK)
    a, b, _ = (host.address for host in three.hosts)
    code = (
        "import socket, sys, time\ns = socket.create_server((sys.argv[1], 7001))\nprint('on', flush=True)\n"
    )
    holder = three.hosts[0].start(["python3", "-c", f"{code}time.sleep(1000)", a])
    holder.until_out("on")
    launch = three.commands[0].run("--servers", f"{a}:7001", "--trainers", f"{b}:7002", "train.py")
    assert launch.code == 125
    assert "port 7001" in launch.err
    assert not launch.told(" at ")
    holder.send(signal.SIGKILL)
    holder.wait()
