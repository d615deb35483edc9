"""A job on several machines is asked on one of them how all of it stands."""

import os
import signal
from typing import Any

import pytest

from tests.e2e.test_asking import answered, asked
from tests.e2e.test_together import Nodes
from tests.support.command import Fleetrun, Launch
from tests.support.traces import state_of, wait_until

pytestmark = pytest.mark.slow

STAY = "leave_on_term()\nstay()"
PATIENT = ("--heartbeat_timeout", "600")


def pair(fleetrun: Fleetrun) -> list[Launch]:
    """Two nodes that run two trainers each, in the order of their ranks."""
    nodes = Nodes(fleetrun, "--nnodes", "2", "--nproc_per_node", "2", *PATIENT)
    script = fleetrun.script(STAY)
    launches = [nodes.start("--rank", str(rank), script) for rank in range(2)]
    for each in launches:
        each.until_ready(2)
    return launches


def pod_of(fleetrun: Fleetrun, launch: Launch) -> str:
    (pod,) = (each["pod"] for each in asked(fleetrun, "ps") if each["pid"] == launch.launcher)
    return pod


def end(launches: list[Launch]) -> None:
    for each in launches:
        each.send(signal.SIGTERM)
    for each in launches:
        each.wait()


def test_each_node_tells_of_all(fleetrun: Fleetrun):
    launches = pair(fleetrun)
    pids = [each.until_ready(2) for each in launches]
    pods = [pod_of(fleetrun, each) for each in launches]
    found: list[Any] = []

    def all_told() -> bool:
        """On a machine that is very busy an answer may come too late."""
        found[:] = [asked(fleetrun, "status", pod)["nodes"] for pod in pods]
        return all(node["silent"] is None for nodes in found for node in nodes)

    wait_until(all_told)
    for here, nodes in enumerate(found):
        assert [node["this"] for node in nodes] == [here == 0, here == 1]
        assert [(node["pod"], node["state"]) for node in nodes] == [(pod, "running") for pod in pods]
        assert [[each["pid"] for each in node["containers"]] for node in nodes] == pids
        assert [[each["rank"] for each in node["containers"]] for node in nodes] == [[0, 1], [2, 3]]
        assert [node["states"] for node in nodes] == [{"running": 2}] * 2
    wait_until(lambda: "4 of 4 processes up" in fleetrun.run("status", pods[0]).out)
    other: list[str] = []
    wait_until(lambda: other.append(fleetrun.run("status", pods[0], "--node", "1").out) or "up" in other[-1])
    assert [line.split()[:4] for line in other[-1].splitlines() if "trainer." in line] == [
        ["1", f"trainer.{number}", str(2 + number), str(pid)] for number, pid in enumerate(pids[1])
    ]
    none = answered(fleetrun, "status", pods[0], "--node", "2")
    assert (none.code, "no node 2: this job has nodes 0 to 1" in none.err) == (2, True)
    end(launches)


@pytest.mark.parametrize("stopped", [0, 1], ids=["the one with the store", "another"])
def test_one_that_does_not_answer_is_named(fleetrun: Fleetrun, stopped: int):
    launches = pair(fleetrun)
    pods = [pod_of(fleetrun, each) for each in launches]
    launcher = launches[stopped].launcher
    os.kill(launcher, signal.SIGSTOP)
    try:
        wait_until(lambda: state_of(launcher) == "T")
        nodes = asked(fleetrun, "status", pods[1 - stopped])["nodes"]
        assert nodes[stopped]["silent"] == "no answer within 2 s"
        assert nodes[1 - stopped]["silent"] is None
        shown = answered(fleetrun, "status", pods[1 - stopped])
        assert shown.code == 0
        (line,) = (line for line in shown.out.splitlines() if "no answer within 2 s" in line)
        assert line.split()[0] == str(stopped)
        assert "2 of 2 processes up" in shown.out
    finally:
        os.kill(launcher, signal.SIGCONT)
    end(launches)
