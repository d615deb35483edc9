"""Restarts: how many, of whom, told as they happen, and visible to the script."""

import json
import re
import sys

import pytest

from tests.support.command import Fleetrun, Launch

START = (
    'tell("start", os.environ["PADDLE_RESTART_COUNT"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "-"))\n'
)


def starts(launch: Launch) -> list[str]:
    return sorted(line.replace(" start", "") for line in launch.told(" start "))


def told_restarts(launch: Launch) -> list[str]:
    return re.findall(r"LAUNCH ERROR \S+ \S+ (.*restart \d+ of \d+.*)", launch.err)


def test_collective_restarts_all_exactly_so_often(fleetrun: Fleetrun):
    script = fleetrun.script(f"""
{START}
leave_on_term()
meet(3)
if RANK == 1:
    raise ValueError(f"attempt {{ATTEMPT}} failed")
stay()
""")
    launch = fleetrun.run("--max_restart", "2", "--nproc_per_node", "3", script)
    assert launch.code == 1
    assert starts(launch) == sorted(f"trainer.{rank} {n} {n}" for rank in range(3) for n in range(3))
    lines = told_restarts(launch)
    assert len(lines) == 2, launch
    for number, line in enumerate(lines):
        assert line.startswith("trainer 1 exited with code 1 after")
        assert f"ValueError: attempt {number} failed; restart {number + 1} of 2" in line
    assert "First failure: trainer 1" in launch.err
    assert "ValueError: attempt 2 failed" in launch.err.partition("First failure: ")[2]


@pytest.mark.slow
def test_three_times_by_default(fleetrun: Fleetrun):
    launch = fleetrun.run(fleetrun.script(f"{START}\nsys.exit(9)"))
    assert launch.code == 9
    assert starts(launch) == [f"trainer.0 {n} {n}" for n in range(4)]
    told = re.findall(r"restart (\d) of 3 .* (now|in \S+ s);", launch.err)
    assert told == [("1", "now"), ("2", "in 0.5 s"), ("3", "in 1 s")]


def test_an_attempt_that_came_further_does_not_count(fleetrun: Fleetrun):
    script = fleetrun.script(f"""
{START}
from trainers import progress
for step in range(10 * ATTEMPT, 10 * ATTEMPT + 12):
    progress.report(step=step)
if ATTEMPT < 4:
    raise ValueError(f"attempt {{ATTEMPT}} failed")
""")
    launch = fleetrun.run("--max_restart", "1", script)
    assert launch.code == 0, launch
    assert len(starts(launch)) == 5
    assert [line.partition("; ")[2].partition(";")[0] for line in told_restarts(launch)] == [
        f"restart 1 of 1 of all processes now (after progress to step {step})" for step in (11, 21, 31, 41)
    ]


def test_one_that_came_no_further_does(fleetrun: Fleetrun):
    script = fleetrun.script(f"""
{START}
from trainers import progress
progress.report(step=9 - ATTEMPT)
sys.exit(9)
""")
    launch = fleetrun.run("--max_restart", "1", script)
    assert (launch.code, len(starts(launch))) == (9, 2), launch


def test_restarts_of_long_ago_do_not_count(fleetrun: Fleetrun):
    script = fleetrun.script(f"{START}\ntime.sleep(0.3)\nsys.exit(9 if ATTEMPT < 3 else 0)")
    launch = fleetrun.run("--max_restart", "1", "--restart_window", "0.1", script)
    assert (launch.code, len(starts(launch))) == (0, 4), launch


def test_the_same_error_at_the_same_step_ends_the_job(fleetrun: Fleetrun):
    """A script of torch alone; each attempt comes to the same bad batch."""
    script = fleetrun.script(f"""
{START}
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for batch in range(5):
    weight.sum().backward()
    optimizer.step()
    if batch == 2:
        raise ValueError(f"bad batch in {{object()}}")
""")
    launch = fleetrun.run("--max_restart", "5", script)
    assert (launch.code, len(starts(launch))) == (1, 2), launch
    assert "the same error twice after step 3: a restart will not help" in " ".join(launch.err.split())


@pytest.mark.parametrize("jobs", ["ps", "ps that saves", "collective"])
def test_the_same_error_as_many_steps_further_each_time(fleetrun: Fleetrun, jobs: str):
    """A trainer of a parameter server counts on from the servers' step: it would be restarted for ever. Where
    a checkpoint was made, or has brought it there, it is progress.
    """
    script = fleetrun.script(f"""
import os, time
while os.environ.get("TRAINING_ROLE") == "PSERVER":
    time.sleep(100)
{START}
from trainers import progress
progress.report(step=5 * (ATTEMPT + 1))
if {jobs == "ps that saves"}:
    progress.meter.saved(5 * (ATTEMPT + 1))
    progress.meter.flush()
if ATTEMPT < 3:
    raise ValueError("id 274 is out of range")
""")
    servers = [] if jobs == "collective" else ["--server_num", "1", "--trainer_num", "1"]
    launch = fleetrun.run("--max_restart", "5", *servers, script)
    ends = jobs == "ps"
    assert (launch.code, len(starts(launch))) == ((1, 3) if ends else (0, 4)), launch
    assert ("the same error again 5 steps further, as before" in " ".join(launch.err.split())) == ends


@pytest.mark.parametrize(
    ("line", "error"),
    [("import no_such_module", "ModuleNotFoundError"), ("exec('a b')", "SyntaxError"),
     ("import torch\nassert not ATTEMPT < 9", "AssertionError")],
)  # fmt: skip
def test_a_mistake_in_the_script_ends_the_job(fleetrun: Fleetrun, line: str, error: str):
    launch = fleetrun.run(fleetrun.script(f"{START}\n{line}"))
    assert (launch.code, len(starts(launch))) == (1, 1), launch
    assert f"{error} before the first step: a restart will not help" in " ".join(launch.err.split())


def test_never_with_0(fleetrun: Fleetrun):
    script = fleetrun.script(f"{START}\nsys.exit(9)")
    launch = fleetrun.run("--max_restart", "0", "--nproc_per_node", "2", script)
    assert launch.code == 9
    assert not told_restarts(launch)
    assert {line.split()[1] for line in starts(launch)} == {"0"}
    assert "--max_restart 0" in launch.err


@pytest.mark.parametrize("code", [2, 126, 127])
def test_not_for_codes_that_cannot_heal(fleetrun: Fleetrun, code: int):
    launch = fleetrun.run(fleetrun.script(f"{START}\nsys.exit({code})"))
    assert launch.code == code
    assert starts(launch) == ["trainer.0 0 0"]
    assert f"exit code {code}" in launch.err


@pytest.mark.quick
def test_a_job_that_heals_ends_with_0_and_its_log_goes_on_after_a_mark(fleetrun: Fleetrun):
    script = fleetrun.script("print('attempt', ATTEMPT)\nif ATTEMPT == 0: sys.exit(3)\n")
    launch = fleetrun.run(script)
    assert launch.code == 0
    assert "First failure" not in launch.err
    log = fleetrun.log("trainer.0")
    assert re.fullmatch(
        r"attempt 0\n--- fleetrun: restart 1 of trainer 0, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d ---\nattempt 1\n",
        log,
    )
    assert launch.out == log


def test_each_failure_is_told_as_it_happens(fleetrun: Fleetrun):
    script = fleetrun.script("if ATTEMPT == 0: sys.exit(3)\nleave_on_term()\nstay()")
    launch = fleetrun.start("--nproc_per_node", "2", script)
    launch.until_ready(2)
    launch.until_err("restart 1 of 3 of all processes")
    launch.send(15)
    assert launch.wait() == 143


@pytest.mark.quick
def test_ps_restarts_only_the_trainer_that_failed(fleetrun: Fleetrun):
    script = fleetrun.script(f"""
{START}
if WHO == "trainer.1" and ATTEMPT == 0:
    sys.exit(3)
leave_on_term()
if WHO == "ps.0":
    stay()
tell("ready", os.getpid())
wait_for_go()
""")
    launch = fleetrun.start("--server_num", "1", "--trainer_num", "2", script)
    launch.until_ready(3)
    launch.go()
    assert launch.wait() == 0, launch
    assert starts(launch) == ["ps.0 0 -", "trainer.0 0 0", "trainer.1 0 0", "trainer.1 1 1"]
    (line,) = told_restarts(launch)
    assert "restart 1 of 3 of trainer 1" in line


def test_ps_restarts_only_the_server_that_failed_and_on_the_same_port(fleetrun: Fleetrun):
    script = fleetrun.script("""
tell("start", ATTEMPT, os.environ["PADDLE_CURRENT_ENDPOINT"])
if WHO == "ps.1" and ATTEMPT == 0:
    os.kill(os.getpid(), signal.SIGKILL)
leave_on_term()
if WHO.startswith("ps"):
    stay()
tell("ready", os.getpid())
wait_for_go()
""")
    launch = fleetrun.start("--server_num", "2", "--trainer_num", "1", script)
    launch.until_ready(3)
    launch.go()
    assert launch.wait() == 0, launch
    by_name = [line.split()[0] for line in launch.told(" start ")]
    assert sorted(by_name) == ["ps.0", "ps.1", "ps.1", "trainer.0"]
    assert len({line.split()[3] for line in launch.told("ps.1 start ")}) == 1


def test_a_signal_between_two_attempts_ends_the_job(fleetrun: Fleetrun):
    launch = fleetrun.start(fleetrun.script("if ATTEMPT == 2: stay()\nsys.exit(7)"))
    launch.until_err("restart 2 of 3 of all processes")
    launch.send(2)
    assert launch.wait() == 130
    (record,) = fleetrun.logs("*.events.jsonl")
    names = [json.loads(line)["event"] for line in record.read_text().splitlines()]
    assert "ending" in names
    assert "started" not in names[names.index("ending") :]


def test_an_attempt_finds_nothing_left_of_the_one_before(fleetrun: Fleetrun):
    script = fleetrun.script("""
import socket
where = os.environ["PADDLE_CURRENT_ENDPOINT"].split(":")
server = socket.create_server((where[0], int(where[1])))
if ATTEMPT == 0:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        ignore(signal.SIGTERM)
        stay()
    time.sleep(3600) if RANK else None
    wait_for_go()
    sys.exit(3)
tell("bound")
""")
    launch = fleetrun.start("--nproc_per_node", "2", "--stop_timeout", "0.2", script)
    launch.until_ready(2)
    launch.go()
    assert launch.wait() == 0, launch
    assert len(launch.told("bound")) == 2


def test_the_pre_hook_runs_before_every_start(fleetrun: Fleetrun):
    fleetrun.script("tell('hook')", "hook.py")
    script = fleetrun.script("sys.exit(3) if ATTEMPT == 0 else tell('trained')")
    launch = fleetrun.run("--elastic_pre_hook", "python3 hook.py", script)
    assert launch.code == 0, launch
    assert len(launch.told("hook")) == 2
    assert len(launch.told("trained")) == 1
    fleetrun.script("sys.exit(4)", "hook.py")
    launch = fleetrun.run("--elastic_pre_hook", "python3 hook.py", "--max_restart", "0", script)
    assert launch.code == 4
    assert not launch.told("trained")


def test_the_report_tells_what_the_time_went_into(fleetrun: Fleetrun):
    script = fleetrun.script("""
import time
from trainers import progress
for step in range(1 + 5 * ATTEMPT, 11 + 5 * ATTEMPT):
    progress.report(step=step)
    time.sleep(0.15)
if ATTEMPT < 1:
    sys.exit(9)
""")
    launch = fleetrun.run("--nproc_per_node", "2", script)
    assert launch.code == 0, launch
    told = fleetrun.run("report")
    assert re.search(r"\n  goodput \d+\.\d %; lost: .*steps done again", told.out), told
    spent = json.loads(fleetrun.run("report", "--json").out)["goodput"]
    assert 0 < spent["share"] < 0.9
    seconds = spent["seconds"]
    assert 0 < seconds["steps done again"] < seconds["steps"]
    assert seconds["steps"] > 1.5, "of 14 steps"
    fleetrun.run("--nproc_per_node", "2", script)
    both = fleetrun.run("report", "default", "--all").out
    assert "Job default: 2 launches, " in both
    assert both.count(": completed, goodput ") == 2


LOST = """
import pathlib, time
from trainers.process import hooks
hooks.install_exit_hooks()
if RANK == 0:
    print("ready to train", flush=True)
    raise RuntimeError("gloo: Connection closed by peer")
(log,) = pathlib.Path("log").glob("*.trainer.0.log")
while log.read_text().count("Connection closed by peer\\n") <= ATTEMPT:
    time.sleep(0.01)
raise ValueError("a bad batch")
"""


PATIENT = (
    sys.executable,
    "-c",
    "import sys; import fleetrun.launcher.victims as victims; victims._PATIENCE = 60.0; "
    "from fleetrun.__main__ import main; sys.exit(main())",
)
"""The command, which gives a process with a traceback a minute to end."""


def test_the_traceback_of_a_victim_stays_in_its_log(fleetrun: Fleetrun):
    script = fleetrun.script(LOST)
    launch = fleetrun.run("--max_restart", "1", "--nproc_per_node", "2", script, command=PATIENT)
    assert launch.code == 1
    assert launch.out.count("ready to train") == 2
    assert "Traceback" not in launch.out
    assert "Connection closed" not in launch.out
    (log,) = fleetrun.logs("*.trainer.0.log")
    assert log.read_text().count("Connection closed by peer\n") == 2
    assert launch.err.count(f"trainer 0 failed because of another process; its traceback is in {log}") == 2


def test_without_another_failure_the_traceback_is_shown(fleetrun: Fleetrun):
    script = fleetrun.script(
        'if RANK == 0:\n    raise RuntimeError("gloo: Connection closed by peer")\nstay()'
    )
    launch = fleetrun.run("--max_restart", "0", "--nproc_per_node", "2", script)
    assert "RuntimeError: gloo: Connection closed by peer" in launch.out
    assert "because of another" not in launch.err


def test_a_traceback_that_a_script_logs_is_shown_while_it_runs(fleetrun: Fleetrun):
    script = fleetrun.script("""
import traceback
try:
    raise TimeoutError("the mirror timed out")
except TimeoutError:
    traceback.print_exc(file=sys.stdout)
print("next mirror", flush=True)
wait_for_go()
""")
    launch = fleetrun.start("--nproc_per_node", "2", script)
    launch.until_out("next mirror")
    assert "TimeoutError: the mirror timed out" in launch.out
    launch.go()
    assert launch.wait() == 0
