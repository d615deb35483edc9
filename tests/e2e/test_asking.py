"""Jobs that run are asked how they stand, and to end: `fleetrun ps`, `status` and `stop`."""

import getpass
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Fleetrun, Launch
from tests.support.traces import state_of, wait_until

pytestmark = pytest.mark.slow

TWO = ("--nproc_per_node", "2", "--job_id", "resnet")
STAY = "print('epoch 1')\nleave_on_term()\nstay()"


def sockets(fleetrun: Fleetrun) -> list[Path]:
    return sorted((fleetrun.folder / "run" / "fleetrun").iterdir())


BUSY = "busy"


def answered(fleetrun: Fleetrun, *words: str) -> Launch:
    """The command, once the launchers answer in time: on a busy machine they may not."""
    done: list[Launch] = []
    wait_until(lambda: done.append(fleetrun.run(*words)) or BUSY not in done[-1].out + done[-1].said)
    return done[-1]


def asked(fleetrun: Fleetrun, *words: str) -> Any:
    done = answered(fleetrun, *words, "--json")
    assert done.code == 0, done
    return json.loads(done.out)


def test_a_job_tells_how_it_stands_and_ends_when_it_is_asked_to(fleetrun: Fleetrun):
    job = fleetrun.start(*TWO, fleetrun.script(STAY))
    pids = job.until_ready(2)
    (found,) = asked(fleetrun, "ps")
    assert (found["job"], found["pid"], found["guard"]) == ("resnet", job.launcher, job.popen.pid)
    status = asked(fleetrun, "status", "res")
    assert [each["pid"] for each in status["containers"]] == pids
    assert {each["last_line"] for each in status["containers"]} == {"epoch 1"}
    stop = fleetrun.run("stop")
    assert (stop.code, stop.err) == (0, ""), stop
    asker = rf"asked to end by `fleetrun stop` of {getpass.getuser()} \(pid \d+\)"
    assert re.search(f"has ended: {asker}, exit code 143\n$", stop.out), stop
    assert job.popen.poll() == 143, "stop has waited for it"
    job.wait()
    assert re.search(f"{asker}; stopping the job\n", job.err), job
    assert not re.search("ERROR|WARNING|SIGTERM", job.err), job
    assert sockets(fleetrun) == []
    assert fleetrun.run("status").code == 1


def test_a_job_that_does_not_want_to_end_is_killed_at_once(fleetrun: Fleetrun):
    script = fleetrun.script("on(signal.SIGTERM, lambda: None)\nstay()")
    job = fleetrun.start("--stop_timeout", "1h", *TWO, script)
    job.until_ready(2)
    patient = fleetrun.start("stop")
    job.until_told("got SIGTERM", 2)
    assert fleetrun.run("stop", "--now").code == 0
    assert (patient.wait(), job.wait()) == (0, 143)
    assert patient.out.endswith("exit code 143\n"), "it has waited for the end"
    assert "kill" in job.err


def test_a_killed_launcher_leaves_nothing_that_answers(fleetrun: Fleetrun):
    job = fleetrun.start(*TWO, fleetrun.script(STAY))
    job.until_ready(2)
    assert len(sockets(fleetrun)) == 3  # for requests, progress and memory
    os.kill(job.launcher, signal.SIGKILL)
    assert job.wait() == 125
    assert asked(fleetrun, "ps") == []
    assert sockets(fleetrun) == []


def test_a_job_that_ctrl_z_stopped_is_seen_and_can_be_ended(fleetrun: Fleetrun):
    job, _ = fleetrun.at_terminal(*TWO, fleetrun.script(STAY))
    job.until_ready(2)
    launcher = job.launcher
    job.type_in(b"\x1a")
    wait_until(lambda: state_of(job.popen.pid) == "T" and state_of(launcher) == "T")
    (found,) = asked(fleetrun, "ps")
    assert (found["job"], found["pid"], "Ctrl-Z" in found["silent"]) == ("resnet", launcher, True)
    status = answered(fleetrun, "status")
    assert (status.code, status.out) == (3, "")
    assert "stopped" in status.err
    assert fleetrun.run("stop", "resnet").code == 0
    assert job.wait() == 143
