"""The stacks of all, whoever ends, hides or hangs meanwhile; and those in the logs."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fleetrun.stacks.__main__ import MOST_GROUPS, summary
from fleetrun.stacks.collect import PYSPY_MISSING, Collection, Means, collect, take
from fleetrun.stacks.frames import Target
from fleetrun.stacks.text import write_into_logs
from tests.stacks.made import taken
from tests.support.stacks import WAITS, program, target_of, waiting
from tests.support.waiting import eventually, state_of

ANSWER = json.dumps(
    [{"pid": 1, "os_thread_id": 1, "frames": [{"name": "wait", "filename": "/t.py", "line": 3}]}]
)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes its time, for what answers and for what was killed."""
    monkeypatch.setattr("fleetrun.stacks.collect._EACH", 60.0)
    monkeypatch.setattr("fleetrun.stacks.collect._PATIENCE", 60.0)
    monkeypatch.setattr("fleetrun.stacks.collect._DEAF", 60.0)


@pytest.fixture
def answers(tmp_path: Path) -> str:
    """A py-spy that finds the same everywhere."""
    return program(tmp_path, f"echo '{ANSWER}'")


@pytest.fixture
def refuses(tmp_path: Path) -> str:
    return program(tmp_path, "echo 'Permission Denied' >&2; exit 1", "refuses")


def test_each_in_its_order(answers: str, tmp_path: Path):
    me = target_of(os.getpid(), tmp_path / "log")
    other = dataclasses.replace(me, rank=1, title="trainer 1")
    found = collect([other, me], 60.0, answers)
    assert [each.target.rank for each in found.processes if not each.below] == [1, 0]
    assert [each.threads[0].frames[0].function for each in found.processes if not each.below] == ["wait"] * 2
    assert (found.whole, found.hint) == (True, "")


def test_what_is_no_python_is_told_so_and_nothing_is_missing(answers: str, tmp_path: Path):
    with subprocess.Popen(["sleep", "1000"]) as process:
        found = collect([target_of(process.pid, tmp_path / "log")], 60.0, answers)
        process.kill()
    (sleep,) = found.processes
    assert (sleep.command, sleep.threads, sleep.note) == ("sleep", (), "it is not Python")
    assert found.whole


def test_what_has_ended_is_told_so(answers: str, tmp_path: Path):
    (gone,) = collect([target_of(2**22 + 1, tmp_path / "log")], 60.0, answers).processes
    assert (gone.note, gone.threads) == ("it has ended", ())


@pytest.mark.slow
def test_where_py_spy_may_not_look_a_script_writes_its_stacks_itself(refuses: str, tmp_path: Path):
    with waiting(tmp_path, f"import trainers\n{WAITS}") as (target, _):
        found = collect([target], 60.0, refuses)
    (one,) = found.processes
    assert one.threads[0].frames[0].function == "deep"
    assert found.whole


def means(program: str, age: float) -> Means:
    return Means(program=program, env=os.environ, deadline=time.monotonic() + 60.0, age=lambda pid: age)


@pytest.mark.slow
def test_where_nothing_helps_it_says_why(refuses: str, tmp_path: Path):
    with waiting(tmp_path) as (target, _):
        one = take(target, target.pid, means(refuses, 100.0))
    assert one.threads == ()
    assert "this user may not look into it" in one.note
    assert "import trainers" in one.note


def test_without_py_spy_it_says_how_to_get_it(tmp_path: Path):
    found = collect([target_of(os.getpid(), tmp_path / "log")], 0.2, None)
    assert (found.whole, found.hint) == (False, PYSPY_MISSING)


def test_py_spies_that_hang_take_no_longer_than_was_said(tmp_path: Path):
    os.mkfifo(tmp_path / "never")
    hangs = program(tmp_path, f'read line <"{tmp_path}/never"')
    me = target_of(os.getpid(), tmp_path / "log")
    found = collect([me] * 30, 0.3, hangs)
    notes = {each.note.partition(";")[0] for each in found.processes}
    assert "there was no time left for it" in notes
    assert not found.whole


@pytest.mark.slow
def test_a_process_that_just_began_gets_time_to_begin(tmp_path: Path):
    """A py-spy that finds something the second time."""
    once = f'[ -e "{tmp_path}/once" ] || {{ touch "{tmp_path}/once"; exit 1; }}; '
    with waiting(tmp_path) as (target, _):
        one = take(target, target.pid, means(program(tmp_path, f"{once}echo '{ANSWER}'"), 0.5))
    assert one.threads[0].frames[0].function == "wait"


# ---- in the logs


def test_the_logs_get_what_belongs_to_them(tmp_path: Path):
    one, two = tmp_path / "one.log", tmp_path / "two.log"
    one.write_text("step 1\nstep 2")
    two.write_text("")
    first = taken(0, "wait /t.py 3")
    first = dataclasses.replace(first, target=dataclasses.replace(first.target, log=str(one)))
    second = taken(1, note="it has ended")
    second = dataclasses.replace(second, target=dataclasses.replace(second.target, log=str(two)))
    assert write_into_logs([first, second], "it hangs", 0.0) == 2
    lines = one.read_text().splitlines()
    assert lines[:2] == ["step 1", "step 2"]
    assert lines[2].startswith("--- fleetrun: it hangs: the stacks of trainer 0, 19")
    assert lines[3:6] == [
        "trainer 0, pid 100:", "  MainThread, most recent call first:", "    wait (/t.py:3)"
    ]  # fmt: skip
    assert lines[-1] == "--- fleetrun: end of the stacks ---"
    assert two.read_text().startswith("--- fleetrun: it hangs: the stacks of trainer 1")
    assert "  python: it has ended\n" in two.read_text()


def hang_fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    "make", [hang_fifo, Path.mkdir, lambda path: path.symlink_to("/dev/null"), lambda path: None]
)
def test_what_is_no_log_is_left_alone(tmp_path: Path, make):
    log = tmp_path / "log"
    make(log)
    one = taken(0, "wait /t.py 3")
    one = dataclasses.replace(one, target=dataclasses.replace(one.target, log=str(log)))
    assert write_into_logs([one], "it hangs", 0.0) == 0


# ---- the process of a launcher


def asked(targets: list[Target]) -> dict[str, Any]:
    request = json.dumps({"targets": [each.as_json() for each in targets], "why": "it hangs", "within": 60.0})
    done = subprocess.run(
        [sys.executable, "-m", "fleetrun.stacks"], input=request + "\n", capture_output=True, text=True,
        timeout=250, check=True,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
def test_it_writes_the_stacks_and_says_where_all_stand(tmp_path: Path):
    with waiting(tmp_path, f"import trainers\n{WAITS}") as (target, process):
        process.send_signal(signal.SIGCONT)
        answer = asked([target])
        (where,) = answer["stacks"]
        held_up = "deaf in the kernel, in "  # by a disk, perhaps, at that moment
        assert (where.replace(held_up, ""), answer["written"]) == ("trainer 0: deep (train.py:4)", 1)
        assert "--- fleetrun: it hangs: the stacks of trainer 0" in Path(target.log).read_text()
        eventually(lambda: state_of(target.pid) == "S")


def test_of_many_places_the_first():
    found = Collection(
        tuple(taken(rank, f"wait /t.py {rank}") for rank in range(MOST_GROUPS + 3)), "no py-spy"
    )
    lines = summary(found)
    assert lines[0] == "trainer 0: wait (t.py:0)"
    assert lines[-2:] == ["and 3 places more", "no py-spy"]
    assert len(lines) == MOST_GROUPS + 2
