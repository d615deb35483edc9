"""No descriptors, no processes: said in one line, and nothing stays."""

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from tests.support.command import Fleetrun
from tests.support.traces import left_behind

SIXTY_FOUR = ("--nproc_per_node", "64")

needs_prlimit = pytest.mark.skipif(shutil.which("prlimit") is None, reason="needs prlimit")


@needs_prlimit
@pytest.mark.parametrize("limit", [14, 20, 64, 140, 160, 180])
def test_too_few_descriptors(fleetrun: Fleetrun, limit: int):
    script = fleetrun.script("stay()")
    launch = fleetrun.run(*SIXTY_FOUR, script, prefix=("prlimit", f"--nofile={limit}"))
    assert launch.code == 125, launch
    assert not left_behind(launch.token)
    assert "Traceback" not in launch.err
    assert "fleetrun: error: " in launch.err
    assert "ulimit -n" in launch.err


@needs_prlimit
@pytest.mark.parametrize("limit", [1, 2, 20])
def test_too_few_processes(as_nobody: Fleetrun, limit: int):
    script = as_nobody.script("stay()")
    launch = as_nobody.run(*SIXTY_FOUR, script, prefix=("prlimit", f"--nproc={limit}"))
    assert launch.code == 125, launch
    assert not left_behind(launch.token)
    assert "Traceback" not in launch.err
    assert "Resource temporarily unavailable" in launch.err
    assert "ulimit -u" in launch.err


def test_a_restart_that_cannot_start(fleetrun: Fleetrun):
    """The limit comes down while the job runs: to what is in use."""
    script = fleetrun.script("tell('ready', os.getpid())\nwait_for_go()\nsys.exit(3)")
    launch = fleetrun.start("--nproc_per_node", "4", script)
    launch.until_ready(4)
    launch.until_err("Watching Pod")  # it has no descriptor open that is only for a start
    used = {int(path.name) for path in Path(f"/proc/{launch.launcher}/fd").iterdir()}
    lowest_free = min(set(range(len(used) + 1)) - used)
    resource.prlimit(launch.launcher, resource.RLIMIT_NOFILE, (lowest_free, lowest_free))
    launch.go()
    assert launch.wait() == 125, launch
    assert "the restart failed" in launch.said
    assert "Too many open files" in launch.said
    assert "exited with code 3" in launch.err
    assert "Traceback" not in launch.err


@pytest.mark.slow
def test_a_hundred_processes(fleetrun: Fleetrun):
    script = fleetrun.script("tell('ready', os.getpid())\nwait_for_go()\nsys.exit(RANK == 77)", "many.py")
    launch = fleetrun.start("--max_restart", "0", "--nproc_per_node", "100", script)
    pids = launch.until_ready(100)
    assert len(set(pids)) == 100
    os.kill(pids[0], 0)
    launch.go()
    assert launch.wait() in (1, 128 + signal.SIGTERM)
