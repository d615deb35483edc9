"""The live view of a job, `fleetrun top`, at a terminal: what it shows, which keys do what, how it ends."""

import getpass
import json
import os
import re
import signal
import termios
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.command import Fleetrun, Launch
from tests.support.ports import free_port
from tests.support.top_view import ESCAPE, XTERM, View
from tests.support.traces import wait_until

pytestmark = pytest.mark.slow

WORKS = """
from trainers import progress

rank = int(os.environ["RANK"])

def work_as_a_user_does():
    for step in range(1, 3000):
        time.sleep(0.05)
        progress.report(step=step * (rank + 1), of=9000)
        if step == 2:
            print("epoch", 10 + rank, flush=True)
            tell("ready", os.getpid(), ATTEMPT)

leave_on_term()
work_as_a_user_does()
stay()
"""


def asked(fleetrun: Fleetrun) -> Any:
    done: list[Launch] = []
    wait_until(lambda: done.append(fleetrun.run("status", "--json")) or done[-1].code == 0)
    return json.loads(done[-1].out)


@pytest.fixture
def job(fleetrun: Fleetrun) -> Iterator[Launch]:
    """Three trainers; rank 2 makes three steps at a time."""
    made = fleetrun.start("--nproc_per_node", "3", "--job_id", "resnet", fleetrun.script(WORKS))
    made.until_told(" ready", 3)
    yield made
    if made.popen.poll() is None:
        made.send(signal.SIGTERM)
        made.wait()


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_processes_are_listed_sorted_and_filtered(fleetrun: Fleetrun, job: Launch, columns: int, rows: int):
    view = View(fleetrun, columns=columns, rows=rows)
    view.until_ranks("0", "1", "2")
    shown = view.until_text("resnet (", "3 of 3 processes up", "STEP TIME", " ms ", " of 9,000 (", "q Quit")
    assert len(shown) == rows
    assert any("LAST LINE" in row for row in shown) == (columns == 200)
    assert any(row.rstrip().endswith("epoch 12") for row in shown) == (columns == 200)
    view.type_in("ss")
    view.until_text("sorted by step")
    view.until_ranks("0", "1", "2")
    view.type_in("S")
    view.until_ranks("2", "1", "0")
    view.type_in("/state=running 1-\r")
    view.until_text("2 of 3 processes")
    view.until_ranks("2", "1")
    view.type_in(ESCAPE)
    view.until_ranks("2", "1", "0")
    view.quit()
    assert job.popen.poll() is None


def test_one_process_has_its_stack_and_its_log_and_the_terminal_is_restored(fleetrun: Fleetrun, job: Launch):
    view = View(fleetrun)
    view.until_ranks("0", "1", "2")
    view.type_in("j\r")
    view.until_text("trainer 1, state running", "work_as_a_user_does", "epoch 11")
    view.type_in(ESCAPE)
    view.until_ranks("0", "1", "2")
    view.type_in("?")
    view.until_text("restart the process")
    view.type_in(ESCAPE)
    view.until_ranks("0", "1", "2")
    view.quit()
    assert b"\x1b[?1049l" in view.launch.raw
    assert b"\x1b[?25h" in view.launch.raw
    flags = termios.tcgetattr(view.master)[3]
    assert flags & termios.ICANON
    assert flags & termios.ECHO


def test_a_stop_is_asked_for_and_the_view_stays_to_say_how_the_job_ended(fleetrun: Fleetrun, job: Launch):
    view = View(fleetrun)
    view.until_ranks("0", "1", "2")
    view.type_in("x")
    view.until_text("Stop resnet (", "3 processes", "y: yes")
    view.type_in("n")
    view.until_ranks("0", "1", "2")
    assert asked(fleetrun)["state"] == "running"
    view.type_in("x")
    view.until_text("y: yes")
    view.type_in("y")
    assert job.wait() == 143
    who = f"asked to end by `fleetrun stop` of {getpass.getuser()}"
    assert who in job.err
    view.until_text("has ended: ", "exit code 143", "trainer 2 completed")
    view.quit()
    assert who in " ".join(view.launch.out.rpartition("\x1b[?1049l")[2].split())


def test_a_restart_of_a_collective_job_is_one_of_all_and_no_failure(fleetrun: Fleetrun, job: Launch):
    view = View(fleetrun)
    view.until_ranks("0", "1", "2")
    view.type_in("r")
    view.until_text("Restart all processes of resnet", "cannot start again alone")
    view.type_in("y")
    job.until_told(" 1", 3)  # their attempt
    view.until_text("restarts: 0 of", "trainer 0 starts again")
    who = rf"`fleetrun top` of {getpass.getuser()} \(pid \d+\)"
    assert re.search(f"restart of all 3 processes by {who}", job.err)
    status = asked(fleetrun)
    assert [each["attempt"] for each in status["containers"]] == [1, 1, 1]
    assert status["restarts"] == 0
    view.quit()


def test_how_processes_have_ended(fleetrun: Fleetrun):
    script = fleetrun.script(
        "print('last words', RANK)\ntell('ready', os.getpid())\nwait_for_go()\nsys.exit(3 * RANK)"
    )
    job = fleetrun.start("--nproc_per_node", "2", "--max_restart", "0", "--job_id", "resnet", script)
    job.until_ready(2)
    view = View(fleetrun)
    view.until_ranks("0", "1")
    job.go()
    assert job.wait() == 3
    view.until_text("has ended: exit code 3; see `fleetrun report ", "exit 3")
    view.type_in("x")
    view.until_text("the job has ended")
    view.type_in("j\r")
    view.until_text("last words 1", "Back")
    view.quit()


def test_with_servers_one_process_starts_again(fleetrun: Fleetrun):
    script = fleetrun.script("leave_on_term()\ntell('ready', ATTEMPT)\nstay()")
    job = fleetrun.start("--server_num", "1", "--trainer_num", "2", "--job_id", "ads", script)
    job.until_told("ready 0", 3)
    view = View(fleetrun)
    view.until_ranks("0", "1")
    view.type_in("t")
    view.until_text("No server has reported a table")
    view.type_in(ESCAPE)
    view.until_ranks("0", "1")
    view.type_in("jr")
    view.until_text("Restart trainer 1 alone?")
    view.type_in("y")
    view.until_text("trainer 1 starts again")
    job.until_told("ready 1")
    job.until_err("restart of trainer 1 by")
    assert {each["name"]: each["attempt"] for each in asked(fleetrun)["containers"]} == {
        "ps.0": 0, "trainer.0": 0, "trainer.1": 1,
    }  # fmt: skip
    view.quit()
    job.send(signal.SIGTERM)
    assert job.wait() == 143


def test_two_nodes_that_meet_and_start_again(fleetrun: Fleetrun):
    script = fleetrun.script(WORKS)
    meet = ("--job_id", "resnet", "--nnodes", "2", "--master", f"127.0.0.1:{free_port()}")
    first = fleetrun.start(*meet, script)
    first.until_err("1 of 2 nodes")
    view = View(fleetrun)
    view.until_text("meeting", "1 of 2 nodes")
    second = fleetrun.start(*meet, "--log_dir", "log2", script)
    view.until_text("2 nodes", "0 trainer 0 running", "1 trainer 1 running")
    view.type_in(b"\x1b[F\r")
    view.until_text("trainer 1 (", "work_as_a_user_does", "epoch 11")
    view.type_in("r")
    view.until_text("on all nodes?")
    view.type_in("y")
    for launch in (first, second):
        launch.until_told(" 1", 1)
    view.type_in(ESCAPE)
    view.until_text("restarts: 0 of 3", "0 trainer 0 running", "1 trainer 1 running")
    view.type_in("x")
    view.until_text("Stop ", "on 2 nodes get SIGTERM")
    view.type_in("y")
    assert [first.wait(), second.wait()] == [143, 143]
    view.until_text("has ended: ")
    view.quit()


def test_a_launcher_that_is_stopped_is_told_and_the_view_remains_usable(fleetrun: Fleetrun, job: Launch):
    view = View(fleetrun)
    view.until_ranks("0", "1", "2")
    os.kill(job.launcher, signal.SIGSTOP)
    view.until_text("no answer for", "it is stopped (Ctrl-Z)")
    view.type_in("s")
    view.until_text("sorted by state")
    view.type_in("\r")
    view.until_text("epoch 1")
    view.type_in(ESCAPE)
    view.until_text("no answer for")
    os.kill(job.launcher, signal.SIGCONT)
    view.until(lambda rows: "no answer" not in " ".join(rows), "an answer")
    view.quit()


@pytest.mark.parametrize("gone", ["terminal", "SIGTERM", "Ctrl-C", "Ctrl-Z"])
def test_what_ends_or_suspends_the_view(fleetrun: Fleetrun, job: Launch, gone: str):
    view = View(fleetrun)
    view.until_ranks("0", "1", "2")
    if gone == "terminal":
        view.launch.send(signal.SIGHUP)
        assert view.launch.wait() == 129
    elif gone == "SIGTERM":
        view.launch.send(signal.SIGTERM)
        assert view.launch.wait() == 143
    elif gone == "Ctrl-C":
        view.type_in(b"\x03")
        assert view.launch.wait() == 0
    else:
        view.type_in(b"\x1a")
        wait_until(lambda: os.waitid(os.P_PID, view.launch.popen.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT))
        view.until(lambda _: b"\x1b[?1049l" in view.launch.raw, "the screen from before")
        view.launch.send(signal.SIGCONT)
        view.until(lambda _: b"trainer" in view.launch.raw.rpartition(b"\x1b[?1049h")[2], "it again")
        view.quit()
    assert b"\x1b[?1049l" in view.launch.raw
    assert job.popen.poll() is None


def test_without_a_terminal_it_names_what_works_there(fleetrun: Fleetrun):
    piped = fleetrun.run("top")
    assert (piped.code, piped.out) == (2, "")
    dumb, _ = fleetrun.at_terminal("top", env={"TERM": "dumb"})
    assert dumb.wait() == 2
    for said in (piped.err, dumb.out):
        assert "terminal" in said
        assert "fleetrun status" in said
    old, _ = fleetrun.at_terminal("status", "--watch", env=XTERM)
    assert old.wait() == 2
    assert "fleetrun top" in old.out
