"""Jobs that hang: --hang_timeout, and `fleetrun stacks` of one that runs."""

from __future__ import annotations

import json

import pytest

from tests.support.command import Fleetrun

pytestmark = pytest.mark.slow

STUCK = """
import trainers  # so that the stacks can be had where nobody may look into processes

def stuck_here():
    stay()

def stuck_there():
    stay()

print("begins", flush=True)
"""
SECONDS = 8  # longer than a Python takes to start on a busy machine
LIMIT = ("--hang_timeout", str(SECONDS))


def test_a_hang_ends_with_124_and_the_stacks_in_the_logs(fleetrun: Fleetrun):
    script = fleetrun.script(f"{STUCK}leave_on_term()\nstuck_there() if RANK == 1 else stuck_here()")
    launch = fleetrun.run("--nproc_per_node", "3", *LIMIT, "--max_restart", "0", script)
    assert launch.code == 124
    assert f"Hang: no trainer printed or reported anything for {SECONDS} s (--hang_timeout)" in launch.said
    assert "stuck_there" in fleetrun.log("trainer.1")
    for name in ("trainer.0", "trainer.2"):
        assert f"--- fleetrun: no sign of life for {SECONDS} s (--hang_timeout)" in fleetrun.log(name)
        assert "stuck_here" in fleetrun.log(name)
    first, then = launch.said.index("trainer 1:"), launch.said.index("trainers 0, 2:")
    assert first < then, "the odd one comes first"


def test_a_hang_is_answered_with_a_restart(fleetrun: Fleetrun):
    script = fleetrun.script(f"{STUCK}leave_on_term()\nif ATTEMPT == 0:\n    stuck_here()\ntell('again')")
    launch = fleetrun.run("--nproc_per_node", "2", *LIMIT, "--max_restart", "3", script)
    assert launch.code == 0
    assert len(launch.told("again")) >= 2
    assert "; restart 1 of 3 of all processes now" in launch.said
    (journal,) = fleetrun.logs("*.events.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    hung = [each for each in events if each["event"] == "hung"]
    assert (hung[0]["restart"], hung[0]["silent_for"]) == (True, SECONDS)
    assert hung[0]["containers"] == ["trainer.0", "trainer.1"]


BEATS = f"""
from trainers import progress
publish_pid()
meet(2)
if RANK == 1:
    wait_for_end_of(pid_of("trainer.0"))
    sys.exit()
end = time.monotonic() + {SECONDS + 2}
while time.monotonic() < end:
    progress.heartbeat()
    time.sleep(0.1)
"""


def test_heartbeats_keep_a_job_alive_that_prints_nothing(fleetrun: Fleetrun):
    """For longer than the limit, and of one process: the other is silent."""
    launch = fleetrun.run("--nproc_per_node", "2", *LIMIT, "--max_restart", "0", fleetrun.script(BEATS))
    assert launch.code == 0, launch


def test_the_stacks_of_a_job_that_runs(fleetrun: Fleetrun):
    script = fleetrun.script(f"{STUCK}leave_on_term()\nstuck_there() if RANK == 1 else stuck_here()")
    launch = fleetrun.start("--nproc_per_node", "3", "--job_id", "mine", script)
    launch.until_ready(3)
    shown = fleetrun.run("stacks")
    assert shown.code == 0, shown
    places = [line.partition(": ")[0] for line in shown.out.splitlines() if line[:7] == "trainer"]
    assert places == ["trainer 1", "trainers 0, 2"]
    assert shown.out.index("stuck_there") < shown.out.index("stuck_here")
    one = fleetrun.run("stacks", "min", "--rank", "1", "--json")
    (process,) = json.loads(one.out)["processes"]
    assert (process["title"], process["rank"]) == ("trainer 1", 1)
    assert "stuck_there" in [each["function"] for each in process["threads"][0]["frames"]]
    none = fleetrun.run("stacks", "--rank", "7")
    assert (none.code, "there is no such process here" in none.err) == (2, True)
    launch.send(15)
    assert launch.wait() == 143
    gone = fleetrun.run("stacks", "mine")
    assert (gone.code, "runs here" in gone.err) == (1, True)
