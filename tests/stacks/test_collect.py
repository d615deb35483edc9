"""The stacks of all, whoever ends, hides or hangs meanwhile; and those in the logs."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fleetrun.envs.channels import STACKS_SIGNAL
from fleetrun.stacks.__main__ import MOST_GROUPS, summary
from fleetrun.stacks.__main__ import main as stacks_main
from fleetrun.stacks.collect import (
    PYSPY_MISSING,
    Collection,
    Means,
    SpyError,
    ask_process,
    can_ask,
    collect,
    dump_pyspy,
    find_pyspy,
    take,
)
from fleetrun.stacks.frames import Target
from fleetrun.stacks.text import write_into_logs
from tests.stacks.samples import taken
from tests.support.stacks import WAITS, may_look, program, target_of, waiting
from tests.support.waiting import eventually, state_of
from trainers.process import hooks

ANSWER = json.dumps(
    [{"pid": 1, "os_thread_id": 1, "frames": [{"name": "wait", "filename": "/t.py", "line": 3}]}]
)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine takes its time, for what answers and for what was killed."""
    monkeypatch.setattr("fleetrun.stacks.collect._EACH", 60.0)
    monkeypatch.setattr("fleetrun.stacks.collect._PATIENCE", 60.0)
    monkeypatch.setattr("fleetrun.stacks.collect._UNINTERRUPTIBLE", 60.0)


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
        before = Path(target.log).read_bytes()
        routine = collect([target], 60.0, refuses, asks=False)
        assert Path(target.log).read_bytes() == before
    (one,) = found.processes
    assert one.threads[0].frames[0].function == "deep"
    assert found.whole
    assert not routine.whole


def means(program: str, age: float) -> Means:
    return Means(program=program, env=os.environ, deadline=time.monotonic() + 60.0, age=lambda pid: age)


@pytest.mark.slow
def test_where_nothing_helps_it_says_why(refuses: str, tmp_path: Path):
    with waiting(tmp_path) as (target, _):
        one = take(target, target.pid, means(refuses, 100.0))
    assert one.threads == ()
    assert "this user may not look into it" in one.note
    assert "--probe on" in one.note


def test_without_py_spy_it_says_how_to_get_it(tmp_path: Path):
    found = collect([target_of(os.getpid(), tmp_path / "log")], 0.2, None)
    assert (found.whole, found.hint) == (False, PYSPY_MISSING)


def test_py_spies_that_hang_take_no_longer_than_was_said(tmp_path: Path):
    os.mkfifo(tmp_path / "never")
    hangs = program(tmp_path, f'read line <"{tmp_path}/never"')
    me = target_of(os.getpid(), tmp_path / "log")
    found = collect([me] * 30, 0.3, hangs)
    notes = {each.note.partition(";")[0] for each in found.processes}
    assert "the time ran out" in notes
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
    request = json.dumps(
        {
            "targets": [dataclasses.asdict(each) for each in targets],
            "ranks": [],
            "why": "it hangs",
            "within": 60.0,
        }
    )
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
        held_up = "uninterruptible, in the kernel, in "  # by a disk, perhaps, at that moment
        assert (where.replace(held_up, ""), answer["written"]) == ("trainer 0: deep (train.py:4)", 1)
        assert "--- fleetrun: it hangs: the stacks of trainer 0" in Path(target.log).read_text()
        eventually(lambda: state_of(target.pid) == "S")


@pytest.mark.slow
def test_a_look_without_a_reason_leaves_the_log_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without py-spy too: what the process writes when it is asked would count as a sign of life."""
    monkeypatch.setattr("fleetrun.stacks.__main__.find_pyspy", lambda: None)
    answer = io.StringIO()
    with waiting(tmp_path, ASKABLE) as (target, _):
        rank = {"title": target.title, "role": target.role, "rank": 0, "alive": True, "probe": "", "log": ""}
        asks = {"targets": [dataclasses.asdict(target)], "ranks": [rank], "why": "", "within": 30.0}
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asks) + "\n"))
        monkeypatch.setattr("sys.stdout", answer)
        before = Path(target.log).read_bytes()
        stacks_main()
        assert Path(target.log).read_bytes() == before
    assert "py-spy is not" in answer.getvalue()


def test_of_many_places_the_first():
    found = Collection(
        tuple(taken(rank, f"wait /t.py {rank}") for rank in range(MOST_GROUPS + 3)), "no py-spy"
    )
    lines = summary(found)
    assert lines[0] == "trainer 0: wait (t.py:0)"
    assert lines[-2:] == ["and 3 places more", "no py-spy"]
    assert len(lines) == MOST_GROUPS + 2


# ---- Processes that write their own stacks when they are asked, and those that must not be asked.

ASKABLE = f"import trainers\n{WAITS}"


def slowly() -> float:
    """A clock that leaves a busy machine time."""
    return time.monotonic() / 4


@pytest.mark.slow
def test_a_script_that_imports_trainers_writes_its_stacks_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fleetrun.stacks.collect.time", SimpleNamespace(monotonic=slowly, sleep=time.sleep))
    with waiting(tmp_path, ASKABLE) as (target, process):
        assert can_ask(target, target.pid)
        (main,) = ask_process(target, target.pid)
        assert [each.function for each in main.frames] == ["deep", "<module>"]
        assert process.poll() is None
        assert ask_process(target, target.pid) == (main,), "what it wrote before is not taken for an answer"


RESTS = """
import os, signal, time, trainers
def deep():
    signal.pthread_sigmask(signal.SIG_BLOCK, {int(os.environ["NUMBER"])})
    print('ready', flush=True)
    while not os.path.exists(os.environ["GO"]): time.sleep(0.005)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    time.sleep(1000)
deep()
"""


@pytest.mark.slow
def test_one_that_rests_before_it_has_written_all_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As for a slow disk: there is a part, and long nothing."""
    go, looks = tmp_path / "go", []
    with waiting(tmp_path, RESTS, {"GO": str(go), "NUMBER": str(int(STACKS_SIGNAL))}) as (target, _):
        log = Path(target.log)

        def pause(_: float) -> None:
            looks.append(0.1)
            if len(looks) == 1:
                with log.open("a") as file:
                    file.write('Thread 0x1f (most recent call first):\n  File "/x.py", line 1 in part\n')
            elif len(looks) == 10:
                go.touch()
                eventually(lambda: "in deep" in log.read_text())

        still = SimpleNamespace(monotonic=lambda: sum(looks), sleep=pause)
        monkeypatch.setattr("fleetrun.stacks.collect.time", still)
        part, main = ask_process(target, target.pid)
    assert [each.frames[-1].function for each in (part, main)] == ["part", "<module>"]


@pytest.mark.slow
def test_who_would_die_of_it_is_not_asked(tmp_path: Path):
    with waiting(tmp_path) as (target, process):
        assert not can_ask(target, target.pid)
        assert ask_process(target, target.pid) == ()
        assert process.poll() is None


@pytest.mark.slow
def test_a_pid_that_is_another_process_now_is_not_asked(tmp_path: Path):
    with waiting(tmp_path, ASKABLE) as (target, _):
        other = dataclasses.replace(target, mark="abcdef.trainer.1")
        assert not can_ask(other, target.pid)


@pytest.mark.slow
def test_a_stopped_process_is_not_asked(tmp_path: Path):
    with waiting(tmp_path, ASKABLE) as (target, process):
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: state_of(target.pid) == "T")
        assert not can_ask(target, target.pid)


def test_a_process_that_has_gone_is_not_asked(tmp_path: Path):
    log = tmp_path / "log"
    log.touch()
    target = target_of(2**22 + 1, log)
    assert not can_ask(target, target.pid)
    assert ask_process(target, target.pid) == ()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("make", [fifo, link, Path.mkdir, lambda path: None])
def test_nothing_is_read_from_what_is_no_log(tmp_path: Path, make):
    path = tmp_path / "log"
    make(path)
    assert ask_process(target_of(os.getpid(), path), os.getpid()) == ()


# ---- the side of the script


def test_the_signal_is_not_one_of_the_scripts():
    assert STACKS_SIGNAL not in (signal.SIGUSR1, signal.SIGUSR2)


def test_outside_a_job_nothing_is_installed():
    assert not hooks.install_stack_dump({})
    assert signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL


def test_a_handler_of_the_scripts_own_is_left_alone():
    signal.signal(STACKS_SIGNAL, lambda number, frame: None)
    try:
        assert not hooks.install_stack_dump({"FLEETRUN_CONTAINER": "abcdef.trainer.0"})
    finally:
        signal.signal(STACKS_SIGNAL, signal.SIG_DFL)


# ---- py-spy on real processes, and what is made of one that refuses, hangs or talks nonsense.


@pytest.fixture(autouse=True)
def _patient_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine lets one wait that was killed."""
    monkeypatch.setattr("fleetrun.stacks.collect._UNINTERRUPTIBLE", 60.0)


@pytest.fixture
def real() -> str:
    if not may_look():
        pytest.skip("py-spy is not here, or may not look into another process")
    found = find_pyspy()
    assert found is not None
    return found


@pytest.mark.slow
def test_a_process_is_read_and_goes_on(real: str, tmp_path: Path):
    text = "import time\nprint('ready', flush=True)\nnumber = 0\nwhile True:\n    number += 1\n"
    with waiting(tmp_path, text) as (target, _):
        (main,) = dump_pyspy(real, target.pid, os.environ, 100.0)
        assert main.frames[-1].file.endswith("train.py")
        eventually(lambda: state_of(target.pid) == "R")


@pytest.mark.slow
def test_a_stopped_process_is_read_and_stays_stopped(real: str, tmp_path: Path):
    with waiting(tmp_path) as (target, process):
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: state_of(target.pid) == "T")
        (main,) = dump_pyspy(real, target.pid, os.environ, 100.0)
        assert main.frames[0].function == "deep"
        assert state_of(target.pid) == "T"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 'Error: Permission Denied: try sudo' >&2; exit 1", "this user may not look into it"),
        ("echo 'Operation not permitted (os error 1)' >&2; exit 1", "this user may not look into it"),
        ("echo 'Error: Failed to find python version' >&2; exit 1", "it is not Python"),
        ("echo 'No such file or directory (os error 2)' >&2; exit 1", "it has ended"),
        ("printf '\\n\\nError: odd\\nmore\\n' >&2; exit 1", "py-spy: Error: odd"),
        ("exit 3", "py-spy: no word"),
        ("kill -9 $$", "py-spy: no word"),
        ("echo hello", "cannot be read"),
        ("echo '{}'", "cannot be read"),
        ("printf '\\377\\376'", "cannot be read"),
    ],
)
def test_why_there_is_nothing(tmp_path: Path, text: str, why: str):
    with pytest.raises(SpyError, match=why):
        dump_pyspy(program(tmp_path, text), os.getpid(), os.environ, 60.0)


@pytest.mark.slow
def test_one_that_hangs_is_killed(tmp_path: Path):
    os.mkfifo(tmp_path / "never")
    hangs = program(tmp_path, f'read line <"{tmp_path}/never"')
    with pytest.raises(SpyError, match="did not answer within"):
        dump_pyspy(hangs, os.getpid(), os.environ, 0.5)
    assert not [each for each in psutil.Process().children() if hangs in each.cmdline()]


@pytest.mark.slow
def test_a_process_that_a_killed_py_spy_left_stopped_goes_on(tmp_path: Path):
    """py-spy stops what it reads; killed at that moment it cannot continue it."""
    with waiting(tmp_path) as (target, _):
        stops = program(tmp_path, f"kill -STOP {target.pid}; exec sleep 1000")
        with pytest.raises(SpyError):
            dump_pyspy(stops, target.pid, os.environ, 1.0)
        eventually(lambda: state_of(target.pid) == "S")


IN_THE_KERNEL = """
import os, time
print('ready', flush=True)
os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, 'fifo', os.O_RDONLY, 0)])
time.sleep(1000)
"""
"""Deaf until somebody opens the other end, for its child has its memory till then. A stop comes then."""


@pytest.mark.slow
def test_nor_does_one_stop_that_was_uninterruptible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    with waiting(tmp_path, IN_THE_KERNEL) as (target, _):
        eventually(lambda: state_of(target.pid) == "D")
        stops = program(tmp_path, f"kill -STOP {target.pid}; exec sleep 1000")
        with pytest.raises(SpyError):
            dump_pyspy(stops, target.pid, os.environ, 1.0)
        os.close(os.open("fifo", os.O_WRONLY))
        eventually(lambda: state_of(target.pid) == "S")


@pytest.mark.parametrize("name", ["nothing", "folder"])
def test_one_that_cannot_be_started(tmp_path: Path, name: str):
    (tmp_path / "folder").mkdir()
    with pytest.raises(SpyError, match="cannot be started"):
        dump_pyspy(str(tmp_path / name), os.getpid(), os.environ, 1.0)
