"""`fleetrun profile`: where a process of a running job spends its time."""

from __future__ import annotations

import json

import pytest

from tests.support.command import Fleetrun
from tests.support.traces import state_of

pytestmark = pytest.mark.slow

LOADS = """
import time

def load_batch():
    time.sleep(0.02)

def train_step():
    sum(range(10000))

tell("ready", os.getpid())
while not os.path.exists("over"):
    load_batch()
    train_step()
"""


def test_where_ranks_spend_their_time(fleetrun: Fleetrun):
    launch = fleetrun.start("--nproc_per_node", "2", "--max_restart", "0", fleetrun.script(LOADS))
    pids = launch.until_ready(2)
    done = fleetrun.run("profile", "--rank", "0,1", "--seconds", "1")
    assert done.code == 0, done
    graphs = [fleetrun.folder / line for line in done.out.splitlines()]
    assert [graph.name.split(".", 2)[2] for graph in graphs] == ["trainer.0.svg", "trainer.1.svg"]
    for graph in graphs:
        assert "load_batch" in graph.read_text(), done

    done = fleetrun.run("profile", "--rank", "1", "--seconds", "1", "-o", "one.json")
    assert done.code == 0, done
    frames = json.loads((fleetrun.folder / "one.json").read_text())["shared"]["frames"]
    assert "load_batch" in {each["name"] for each in frames}

    for words, nouns in (
        (("--rank", "7"), ("--rank 7", "trainer 0-1")),
        (("--rank", "0,1", "-o", "x.svg"), ("x.svg", "choose one with --rank")),
        (("-o", "x.txt"), ("x.txt", ".svg or .json")),
        (("-o", "gone/x.svg"), ("gone",)),
    ):
        wrong = fleetrun.run("profile", "--seconds", "1", *words)
        assert wrong.code == 2, wrong
        assert all(noun in wrong.said for noun in nouns), wrong
    assert not [*fleetrun.folder.glob("x.*"), *fleetrun.folder.glob(".*.svg.*")]

    assert all(state_of(pid) not in "Tt" for pid in pids), "py-spy leaves no process stopped"
    (fleetrun.folder / "over").touch()
    assert launch.wait() == 0, launch
