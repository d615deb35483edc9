"""Jobs that run are asked how they stand, and to end: `fleetrun ps`, `status` and `stop`."""

import fcntl
import getpass
import json
import os
import re
import signal
import struct
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import Fleetrun, Launch
from tests.support.screen import Terminal
from tests.support.traces import state_of, wait_until

pytestmark = pytest.mark.slow

TWO = ("--nproc_per_node", "2", "--job_id", "resnet")
XTERM = {"TERM": "xterm-256color"}
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


def watching(fleetrun: Fleetrun, *words: str) -> tuple[Launch, int]:
    """The live view with its first picture, and the master of its terminal."""
    while True:
        view, master = fleetrun.at_terminal("status", "--watch", *words, env=XTERM)
        wait_until(lambda view=view: painted(view, 80, 40) or view.popen.poll() is not None, view)
        if view.popen.poll() is None:
            return view, master
        assert view.wait() == 3, view
        assert BUSY in " ".join(view.out.split()), view


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


def test_the_live_view_shows_the_job_and_leaves_the_terminal_as_it_was(fleetrun: Fleetrun):
    job = fleetrun.start(*TWO, fleetrun.script(STAY))
    pids = job.until_ready(2)
    view, master = watching(fleetrun, "--interval", "3600")
    rows = painted(view, 80, 40)
    assert rows[0].startswith("resnet (pod ")
    trainers = [row.split()[:3] for row in rows if row.startswith("trainer.") and "running" in row]
    assert trainers == [[f"trainer.{number}", str(pid), "running"] for number, pid in enumerate(pids)]
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("4H", 8, 60, 0, 0))
    view.until(lambda: painted(view, 60, 8), "a picture of the new size")
    view.type_in(b"q")
    assert view.wait() == 0
    fresh = os.openpty()
    assert termios.tcgetattr(master) == termios.tcgetattr(fresh[0])
    for fd in fresh:
        os.close(fd)
    assert view.raw.endswith(b"\x1b[?7h\x1b[?25h\x1b[?1049l"), view.raw[-100:]
    dumb, _ = fleetrun.at_terminal("status", "--watch", env={"TERM": "dumb"})
    assert dumb.wait() == 2
    job.send(signal.SIGTERM)
    job.wait()


def test_the_live_view_ends_with_the_job(fleetrun: Fleetrun):
    script = fleetrun.script("tell('ready', os.getpid())\nwait_for_go()\nsys.exit(RANK)")
    job = fleetrun.start("--max_restart", "0", *TWO, script)
    job.until_ready(2)
    view, _ = watching(fleetrun, "--interval", "0.1")
    job.go()
    assert (job.wait(), view.wait()) == (1, 0)
    assert "exit code 1" in view.out.rpartition("\x1b[?1049l")[2]


def painted(view: Launch, columns: int, rows: int) -> list[str]:
    """The rows of its last picture, once that is whole and fills a screen of this size."""
    last = view.raw.rpartition(b"\x1b[H")[2]
    shown = Terminal(columns, rows, raw=True).feed(last).rows
    whole = last.endswith(b"\x1b[0m") and len(shown) == rows and shown[-1].startswith("q: quit")
    return shown if whole else []
