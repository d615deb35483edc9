"""Jobs that hang: --hang_timeout, and `fleetrun stacks` of one that runs."""

from __future__ import annotations

import json

import pytest

from tests.e2e.test_asking import answered
from tests.e2e.test_together import Nodes
from tests.support.command import Fleetrun, Launch
from tests.support.traces import wait_until

pytestmark = pytest.mark.slow

STUCK = """
import trainers  # so that the stacks can be had where nobody may look into processes

def stuck_here():
    stay()

def stuck_there():
    stay()

def begin(count):  # together, and not in silence: who waits for one that is slow to start does not hang
    Path(f"begun.{ATTEMPT}.{WHO}").touch()
    while len(list(Path().glob(f"begun.{ATTEMPT}.*"))) < count:
        print("begins", flush=True)
        time.sleep(0.1)
"""
SECONDS = 8  # longer than a Python takes to start on a busy machine
LIMIT = ("--hang_timeout", str(SECONDS))


def test_a_hang_ends_with_124_and_the_stacks_in_the_logs(fleetrun: Fleetrun):
    script = fleetrun.script(
        f"{STUCK}leave_on_term()\nbegin(3)\nstuck_there() if RANK == 1 else stuck_here()"
    )
    launch = fleetrun.run("--nproc_per_node", "3", *LIMIT, "--max_restart", "0", script)
    assert launch.code == 124
    assert f"{SECONDS} s (--hang_timeout)" in launch.said
    assert "stuck_there" in fleetrun.log("trainer.1")
    for name in ("trainer.0", "trainer.2"):
        assert f"{SECONDS} s (--hang_timeout)" in fleetrun.log(name)
        assert "stuck_here" in fleetrun.log(name)
    first, then = launch.said.index("trainer 1:"), launch.said.index("trainers 0, 2:")
    assert first < then, "the odd one comes first"


def test_a_hang_is_answered_with_a_restart(fleetrun: Fleetrun):
    script = fleetrun.script(
        f"{STUCK}leave_on_term()\nbegin(2)\nif ATTEMPT == 0:\n    stuck_here()\ntell('again')"
    )
    launch = fleetrun.run("--nproc_per_node", "2", *LIMIT, "--max_restart", "3", script)
    assert launch.code == 0
    assert len(launch.told("again")) >= 2
    assert "restart 1 of 3" in launch.said
    (journal,) = fleetrun.logs("*.events.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    hung = [each for each in events if each["event"] == "hung"]
    assert (hung[0]["restart"], hung[0]["silent_for"]) == (True, SECONDS)
    assert hung[0]["containers"] == ["trainer.0", "trainer.1"]


def test_one_that_hangs_while_others_go_on(fleetrun: Fleetrun):
    """One that polls, for a file say, is not taken for it."""
    fleetrun.script("""
for _ in range(100):
    print("step", flush=True)
    time.sleep(0.05)
while RANK == 2:
    time.sleep(0.02)
def stuck_here():
    time.sleep(600)
stuck_here()
""")
    shell = fleetrun.folder / "train.sh"  # it prints before a Python has started, however busy the machine is
    shell.write_text("""#!/bin/sh
while [ "$RANK" = 0 ]; do echo step; sleep 0.05; done
exec python train.py
""")
    shell.chmod(0o755)
    words = ("--nproc_per_node", "3", "--hang_timeout", "2", "--max_restart", "0")
    launch = fleetrun.run(*words, "./train.sh")
    assert launch.code == 124
    assert "trainer 1 has printed and reported nothing" in launch.said
    assert "stuck_here" in launch.said
    assert "trainer 2 has" not in launch.said


BEATS = f"""
from trainers import progress
if RANK == 1:
    while not Path("beats").exists():
        time.sleep(0.002)
    wait_for_end_of(pid_of("trainer.0"))
    sys.exit()
publish_pid()
Path("beats").touch()
end = time.monotonic() + {SECONDS + 2}
while time.monotonic() < end:
    progress.heartbeat()
    time.sleep(0.1)
"""


def test_heartbeats_keep_a_job_alive_that_prints_nothing(fleetrun: Fleetrun):
    """For longer than the limit, and of one process: the other is silent."""
    launch = fleetrun.run("--nproc_per_node", "2", *LIMIT, "--max_restart", "0", fleetrun.script(BEATS))
    assert launch.code == 0, launch


LAST_PRINTS = f"""
publish_pid()
if RANK == 0:
    while not Path("pid.trainer.1").exists() or not pid_of("trainer.1"):
        time.sleep(0.01)
    wait_for_end_of(pid_of("trainer.1"))
    sys.exit()
for _ in range(20 * {SECONDS}):
    print("step", flush=True)
    time.sleep(0.1)
"""


def on_two(fleetrun: Fleetrun, script: str) -> list[Launch]:
    """The launchers of two nodes, both here, when they have ended."""
    nodes = Nodes(fleetrun, "--nnodes=2", "--max_restart=0", *LIMIT)
    launches = [nodes.start("--rank", rank, fleetrun.script(script)) for rank in "01"]
    for launch in launches:
        launch.wait()
    return launches


def test_a_job_whose_last_node_alone_prints_does_not_hang(fleetrun: Fleetrun):
    """As a script does that logs on its last rank; no step of it is counted."""
    assert [launch.code for launch in on_two(fleetrun, LAST_PRINTS)] == [0, 0]


@pytest.mark.parametrize("ended", ["", "if RANK == 0:\n    sys.exit()\n"])
def test_a_job_on_two_nodes_hangs_when_all_trainers_that_run_are_silent(fleetrun: Fleetrun, ended: str):
    launches = on_two(fleetrun, f"{STUCK}leave_on_term()\n{ended}stuck_here()")
    assert [launch.code for launch in launches] == [124, 124], launches
    assert all(f"{SECONDS} s (--hang_timeout)" in launch.said for launch in launches)


def test_the_stacks_of_a_job_that_runs(fleetrun: Fleetrun):
    script = fleetrun.script(f"{STUCK}leave_on_term()\nstuck_there() if RANK == 1 else stuck_here()")
    launch = fleetrun.start("--nproc_per_node", "3", "--job_id", "mine", script)
    launch.until_ready(3)
    found: list[Launch] = []

    def all_stay() -> bool:
        """Who has just said "ready" may still be on its way there."""
        found.append(answered(fleetrun, "stacks"))
        assert found[-1].code == 0, found[-1]
        places = [line.partition(": ")[0] for line in found[-1].out.splitlines() if line[:7] == "trainer"]
        return places == ["trainer 1", "trainers 0, 2"]

    wait_until(all_stay, lambda: found[-1])
    assert found[-1].out.index("stuck_there") < found[-1].out.index("stuck_here")
    one = answered(fleetrun, "stacks", "min", "--rank", "1", "--json")
    (process,) = json.loads(one.out)["processes"]
    assert (process["title"], process["rank"]) == ("trainer 1", 1)
    assert "stuck_there" in [each["function"] for each in process["threads"][0]["frames"]]
    none = answered(fleetrun, "stacks", "--rank", "7")
    assert (none.code, "fleetrun: error: " in none.err) == (2, True)
    launch.send(15)
    assert launch.wait() == 143
    gone = fleetrun.run("stacks", "mine")
    assert (gone.code, "fleetrun: error: " in gone.err) == (1, True)
