"""A process that SIGKILL does not end, here in a frozen cgroup (version 1): fleetrun goes on without it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_together import Nodes
from tests.support.command import Fleetrun
from tests.support.traces import wait_until

FREEZER = Path("/sys/fs/cgroup/freezer")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.access(FREEZER / "cgroup.procs", os.W_OK), reason="no cgroup freezer to write to"
    ),
]


class Freezer:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state = folder / "freezer.state"

    def freeze(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))
        self._state.write_text("FROZEN")
        wait_until(lambda: self._state.read_text().strip() == "FROZEN")

    def thaw(self) -> None:
        self._state.write_text("THAWED")

    def close(self) -> None:
        self.thaw()
        wait_until(lambda: not (self._folder / "cgroup.procs").read_text())
        self._folder.rmdir()


@pytest.fixture
def freezer(fleetrun: Fleetrun) -> Iterator[Freezer]:
    """It thaws before anything looks whether a process is left."""
    folder = FREEZER / f"fleetrun-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("no cgroup freezer to write to")
    made = Freezer(folder)
    yield made
    made.close()
    fleetrun.run(fleetrun.script("pass", "next.py"))  # takes away the cgroup that the process was left in


LEFT = "trainer 1 did not end within 15 s after SIGKILL"
SOON = ("--stop_timeout", "1")


@pytest.mark.parametrize("restarts", ["0", "3"])
def test_the_job_ends_without_a_process_that_cannot_be_killed(
    fleetrun: Fleetrun, freezer: Freezer, restarts: str
):
    script = fleetrun.script(
        'tell("ready", os.getpid())\nwait_for_go()\nsys.exit(7) if RANK == 0 else stay()'
    )
    launch = fleetrun.start("--nproc_per_node", "2", "--max_restart", restarts, *SOON, script)
    launch.until_ready(2)
    (line,) = launch.told("trainer.1 ready")
    freezer.freeze(int(line.split()[-1]))
    launch.go()
    assert launch.wait() == (7 if restarts == "0" else 125)
    freezer.thaw()
    assert launch.said.count(LEFT) >= 1
    assert "stray processes" not in launch.said


def test_sigterm_ends_the_job(fleetrun: Fleetrun, freezer: Freezer):
    launch = fleetrun.start("--nproc_per_node", "2", *SOON, fleetrun.script("stay()"))
    launch.until_ready(2)
    (line,) = launch.told("trainer.1 ready")
    freezer.freeze(int(line.split()[-1]))
    launch.send(15)
    assert launch.wait() == 143
    freezer.thaw()
    assert launch.said.count(LEFT) == 1


def test_another_node_takes_the_place_of_one_with_such_a_process(fleetrun: Fleetrun, freezer: Freezer):
    script = fleetrun.script("""
if ATTEMPT:
    sys.exit()
tell("ready", os.getpid())
wait_for_go()
sys.exit(7) if RANK == 0 else stay()
""")
    nodes = Nodes(fleetrun, "--nnodes=2", "--spares=1", "--max_restart=1")
    launches = [nodes.start("--rank=0", script), nodes.start("--rank=1", script)]
    for launch in launches:
        launch.until_ready(1)
    spare = nodes.start(script)
    spare.until(lambda: "this node waits as a spare" in spare.said, "it waits")
    (line,) = launches[1].told("trainer.1 ready")
    freezer.freeze(int(line.split()[-1]))
    launches[0].go()
    assert [each.wait() for each in (launches[0], spare, launches[1])] == [0, 0, 125]
    freezer.thaw()
    assert LEFT in launches[1].said
    (kept,) = fleetrun.folder.glob("log/2/nodes.json")
    assert [fault[2][: len(LEFT)] for fault in json.loads(kept.read_text())["faults"]] == [LEFT]
