"""A node that is suspended for so long that the others give it up, and then resumed: what its trainers did
not do before they were given up does not come between what the others have done since.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.test_resizing import COUNTING, numbers
from tests.e2e.test_together import Nodes
from tests.support.command import Fleetrun, Launch
from tests.support.traces import state_of, wait_until

pytestmark = pytest.mark.timeout(300)

ELASTIC = ("--nnodes", "1:2", "--elastic_timeout", "1", "--heartbeat_timeout", "2")
WHOLE, LAUNCHER = ("launcher", "trainer"), ("launcher",)


def pair(fleetrun: Fleetrun, script: str, *words: str, first: Sequence[str] = ()) -> list[Launch]:
    """Two nodes; the store is on the first."""
    nodes = Nodes(fleetrun, *ELASTIC, *words)
    launches = [nodes.start(*first, script)]
    launches[0].until_err("1 node has joined")
    second = ("--server_num", "0") if first else ()
    return [*launches, nodes.start(*second, script)]


def signal_node(launcher: int, trainer: int, which: Sequence[str], number: int) -> None:
    for name, pid in (("launcher", launcher), ("trainer", trainer)):
        if name in which:
            os.kill(pid, number)
            if number == signal.SIGSTOP:
                wait_until(lambda pid=pid: state_of(pid) == "T")


def size_of(launch: Launch) -> str:
    """That of the generation in which its trainer began last; empty before the first."""
    told = launch.told("began")
    return told[-1].split()[4] if told else ""


def rows(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


# As a user's checkpoint would, each step writes a file that all nodes share.
STEPPING = """
ignore(signal.SIGTERM) if RANK else leave_on_term()
tell("ready", os.getpid())
tell("began", ATTEMPT, RANK, SIZE)
step = 0
while not Path("enough").exists():
    with Path("steps").open("a") as file:
        file.write(f"{ATTEMPT} {RANK} {SIZE} {step}\\n")
    step += 1
    time.sleep(0.002)
tell("done")
"""


@pytest.mark.parametrize("which", [WHOLE, LAUNCHER], ids=["node", "launcher"])
def test_a_trainer_takes_no_step_after_its_node_has_learned_that_it_was_given_up(
    fleetrun: Fleetrun, which: Sequence[str]
) -> None:
    """Not even one that ignores SIGTERM and would have a long grace."""
    steps = fleetrun.folder / "steps"
    first, second = pair(fleetrun, fleetrun.script(STEPPING), "--stop_timeout", "1000")
    (trainer,) = second.until_ready(1)
    first.until(lambda: size_of(first) == "2")
    wait_until(lambda: any(row[1:3] == ["1", "2"] for row in rows(steps)))
    second.until_told("began")
    launcher, old = second.launcher, second.told("began")[0].split()[2]
    signal_node(launcher, trainer, which, signal.SIGSTOP)
    first.until(lambda: size_of(first) == "1")
    signal_node(launcher, trainer, which, signal.SIGCONT)
    second.until_err("was disconnected from the job")
    wait_until(lambda: state_of(trainer) in ("", "Z"))
    stale = [row for row in rows(steps) if row[0] == old]
    first.until(lambda: size_of(first) == "2")
    (fleetrun.folder / "enough").touch()
    assert [first.wait(), second.wait()] == [0, 0], (first, second)
    assert [row for row in rows(steps) if row[0] == old] == stale


def test_servers_refuse_the_pushes_of_trainers_that_were_given_up(fleetrun: Fleetrun) -> None:
    """Only the launcher is suspended: its trainer goes on to push, to servers that have new trainers."""
    script = fleetrun.script(COUNTING % "" + 'tell("ended")\n')
    first, second = pair(
        fleetrun, script, "--worker_num", "1", "--stop_timeout", "100", first=("--server_num", "1")
    )
    for each in (first, second):
        each.until_told("reached 2 5")
    launcher = second.launcher
    os.kill(launcher, signal.SIGSTOP)
    first.until_told("reached 1 20")
    (done,) = numbers([first], r"begins 1 trainers (\d+) done")[-1:]
    log = Path(next(fleetrun.folder.glob("log/2/*.trainer.*.log")))
    wait_until(lambda: "ServerError" in log.read_text() or "TrainerLostError" in log.read_text())
    (fleetrun.folder / "enough").touch()
    assert first.wait() == 0, first
    (values,) = [line.split()[2:] for line in first.told(" rows ") if line.split()[2:]]
    (pushed,) = numbers([first], r"pushed (\d+) of 1")
    assert values == [str(done + pushed)] * 4
    os.kill(launcher, signal.SIGCONT)
    assert second.wait() != 0, second


REDUCING = """
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
tell("ready", os.getpid())
tell("began", ATTEMPT, RANK, SIZE)
for step in range(1_000_000):
    enough = torch.tensor([float(Path("enough").exists())])
    dist.all_reduce(enough)
    with Path("steps").open("a") as file:
        file.write(f"{ATTEMPT} {RANK} {SIZE} {step}\\n")
    if enough.item():
        break
    time.sleep(0.005)
"""


@pytest.mark.parametrize("which", [WHOLE, LAUNCHER], ids=["node", "launcher"])
def test_no_collective_step_completes_without_the_others(fleetrun: Fleetrun, which: Sequence[str]) -> None:
    """But for the one whose exchange was complete when the node was suspended."""
    steps = fleetrun.folder / "steps"
    script = fleetrun.script(REDUCING)
    first, second = pair(fleetrun, script, "--max_restart", "10")
    second.until_told("began")
    (trainer,) = second.until_ready(1)
    first.until(lambda: size_of(first) == "2")
    wait_until(lambda: any(row[1:3] == ["1", "2"] for row in rows(steps)))
    launcher, old = second.launcher, second.told("began")[0].split()[2]
    signal_node(launcher, trainer, which, signal.SIGSTOP)
    first.until(lambda: size_of(first) == "1")
    before = max(int(row[3]) for row in rows(steps) if row[0] == old and row[1] == "0")
    (fleetrun.folder / "enough").touch()
    signal_node(launcher, trainer, which, signal.SIGCONT)
    wait_until(lambda: state_of(trainer) in ("", "Z"))
    late = [int(row[3]) for row in rows(steps) if row[0] == old and row[1] == "1"]
    assert max(late) <= before + 1
    for each in (first, second):
        each.wait()
    assert first.code == 0, first
