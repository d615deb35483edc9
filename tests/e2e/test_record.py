"""What a launch leaves on record, and what `logs` and `report` make of it: while it runs, and afterwards."""

import json
import os
import signal

from tests.support.command import CHILD_MODULES, Fleetrun
from tests.support.traces import wait_until

TWO = ("--nproc_per_node", "2", "--job_id", "night")

IN_TURN = """
if RANK:
    wait_for_go()
print("line of", RANK)
if RANK:
    raise ValueError("bad luck")
stay()
"""


def events(fleetrun: Fleetrun) -> list[dict]:
    (path,) = fleetrun.logs("*.events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def marks(fleetrun: Fleetrun) -> str:
    return "".join(path.read_text() for path in fleetrun.logs("*.marks"))


def test_everything_that_happened_is_on_record_and_can_be_told_again(fleetrun: Fleetrun):
    script = fleetrun.script(IN_TURN)
    launch = fleetrun.start(*TWO, "--max_restart", "1", script, "--flag")
    launch.until_ready(1)
    wait_until(lambda: " 0:" in marks(fleetrun), "a note of the first line")
    launch.go()
    assert launch.wait() == 1
    record = events(fleetrun)
    first, last = record[0], record[-1]
    assert (first["event"], first["job"], first["argv"][-2:]) == ("launch", "night", [script, "--flag"])
    assert first["cwd"] == str(fleetrun.folder)
    assert [each["name"] for each in first["containers"]] == ["trainer.0", "trainer.1"]
    told = [each["event"] for each in record if each["event"] not in ("progress", "node")]
    assert told[:4] == ["launch", "ready", "started", "started"]
    assert told.count("failed") == 2
    assert told.count("restarting") == 1
    assert (last["event"], last["code"], last["restarts"]) == ("over", 1, 1)
    assert [each["time"] for each in record] == sorted(each["time"] for each in record)

    report = fleetrun.run("report")
    assert report.code == 0
    assert "First failure: trainer 1 exited with code 1" in report.out
    assert "restart 1 of 1" in report.out
    for line in last["report"]:
        assert line in report.out.splitlines()
    assert json.loads(fleetrun.run("report", "nig", "--json").out)["code"] == 1

    logs = fleetrun.run("logs")
    shown = [line for line in logs.out.splitlines() if "line of" in line]
    assert shown[:2] == ["trainer.0 | line of 0", "trainer.1 | line of 1"], "the second waited for the first"
    assert shown.count("trainer.1 | line of 1") == 2
    assert (
        fleetrun.run("logs", "--rank", "1", "--grep", "bad luck", "-n", "1").out == "ValueError: bad luck\n"
    )


def test_the_peak_memory_of_a_process_that_was_killed(fleetrun: Fleetrun):
    script = fleetrun.script("data = bytearray(b'x') * (300 << 20)\nos.kill(os.getpid(), signal.SIGKILL)")
    assert fleetrun.run("--job_id", "night", "--max_restart", "0", script).code == 137
    (exited,) = [each for each in events(fleetrun) if each["event"] == "exited"]
    assert 300 << 20 < exited["peak_memory"] < 500 << 20
    assert "peak memory 3" in fleetrun.run("report").out


def test_following_shows_what_comes_until_the_job_is_over(fleetrun: Fleetrun):
    script = fleetrun.script("""
print("before")
tell("ready", os.getpid())
wait_for_go()
print("after")
""")
    launch = fleetrun.start(*TWO, script)
    launch.until_ready(2)
    logs = fleetrun.start("logs", "-f")
    logs.until(lambda: logs.out.count("before") == 2, "what was there")
    launch.go()
    assert launch.wait() == 0
    assert logs.wait() == 0
    assert sorted(logs.out.splitlines()) == [
        f"trainer.{rank} | {word}" for rank in (0, 1) for word in ("after", "before")
    ]
    assert fleetrun.run("report").out.startswith("Job night (")


def test_following_ends_when_nobody_reads(fleetrun: Fleetrun):
    launch = fleetrun.start(*TWO, fleetrun.script("stay()"))
    launch.until_ready(2)
    read, write = os.pipe()
    logs = fleetrun.start("logs", "-f", stdout=write)
    os.close(write)
    os.close(read)
    assert logs.wait() == 141
    assert logs.err == ""
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143


def test_a_launcher_that_was_killed_is_known_as_such(fleetrun: Fleetrun):
    launch = fleetrun.start(*TWO, fleetrun.script("print('alive')\nstay()"))
    launch.until_ready(2)
    assert ": running\n" in fleetrun.run("report").out
    os.kill(launch.launcher, signal.SIGKILL)
    launch.wait()
    launch.gone()
    report = fleetrun.run("report")
    assert "launcher was killed" in report.out
    assert fleetrun.run("logs", "-f").out.count("alive") == 2, "and is not waited for"


def test_what_could_not_be_started_is_on_record_too(fleetrun: Fleetrun):
    program = fleetrun.folder / "program"
    program.write_text("#!/nowhere/interpreter\n")
    program.chmod(0o755)
    launch = fleetrun.run("./program")
    assert launch.code not in (0, 1)
    last = events(fleetrun)[-1]
    assert (last["event"], last["code"]) == ("over", launch.code)
    assert last["reason"] in launch.said

    log = fleetrun.folder / "log"
    os.mkfifo(log / "night.abcdef.events.jsonl")
    os.mkfifo(log / "night.abcdef.marks")
    launch = fleetrun.run("--log_overwrite", *TWO, fleetrun.script("print('done')"))
    assert launch.code == 0
    assert fleetrun.run("report").out.startswith("Job night ("), "and a log directory with traps stops none"


def test_times_are_noted_while_a_job_prints(fleetrun: Fleetrun):
    launch = fleetrun.start("--job_id", "night", fleetrun.script("print('one')\nstay()"))
    launch.until_ready(1)
    wait_until(lambda: " 0:" in marks(fleetrun), "a note of the line")
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    names, rest, *_, last = marks(fleetrun).splitlines()
    assert (names, rest, last.split()[1]) == ("# trainer.0", "rest 0.01", "0:4")


STEPS = """
import time
from pathlib import Path

_real = time.time
time.time = lambda: _real() - 3600 * Path({stepped!r}).exists()
"""
BACK = """
import time
if RANK:
    wait_for_go()
print("line", RANK, flush=True)
if not RANK:
    Path({stepped!r}).touch()
    print("after the step", flush=True)
    wait_for_go()
raise ValueError("bad luck")
"""


def test_a_step_of_the_clock_changes_no_duration_and_no_order(fleetrun: Fleetrun):
    """As when a machine boots with a wrong time, and the network's arrives while a job runs."""
    stepped = str(fleetrun.folder / "stepped")
    (fleetrun.folder / "steps").mkdir()
    (fleetrun.folder / "steps" / "sitecustomize.py").write_text(STEPS.format(stepped=stepped))
    path = f"{fleetrun.folder / 'steps'}{os.pathsep}{CHILD_MODULES}"
    script = fleetrun.script("from pathlib import Path" + BACK.format(stepped=stepped))
    launch = fleetrun.start(*TWO, "--max_restart", "0", script, env={"PYTHONPATH": path})
    wait_until(lambda: " 0:" in marks(fleetrun), "a note of the first line")
    wait_until(lambda: "after the step" in fleetrun.log("trainer.0"), "the step")
    launch.go()
    assert launch.wait() == 1
    times = [each["time"] for each in events(fleetrun)]
    assert times == sorted(times)
    assert times[-1] - times[0] < 600
    assert all(0 < each["seconds"] < 600 for each in events(fleetrun) if each["event"] == "exited")
    lines = fleetrun.run("logs").out.splitlines()
    assert [each.partition("|")[2].strip() for each in lines if "line" in each or "after" in each][:2] == [
        "line 0",
        "after the step",
    ]
