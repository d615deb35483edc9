"""Processes that write their own stacks when they are asked, and those that must not be asked."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest

from fleetrun.envs.channels import STACKS_SIGNAL
from fleetrun.stacks.collect import ask_process, can_ask
from tests.support.stacks import WAITS, target_of, waiting
from tests.support.waiting import eventually, state_of
from trainers.process import hooks

ASKABLE = f"import trainers\n{WAITS}"


def slowly() -> float:
    """A clock that leaves a busy machine time."""
    return time.monotonic() / 4


@pytest.mark.slow
def test_a_script_that_imports_trainers_writes_its_stacks_and_goes_on(tmp_path: Path):
    with waiting(tmp_path, ASKABLE) as (target, process):
        assert can_ask(target, target.pid)
        (main,) = ask_process(target, target.pid, clock=slowly)
        assert [each.function for each in main.frames] == ["deep", "<module>"]
        assert process.poll() is None
        assert ask_process(target, target.pid, clock=slowly) == (main,), (
            "what it wrote before is not taken for an answer"
        )


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
def test_one_that_rests_before_it_has_written_all_is_waited_for(tmp_path: Path):
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

        part, main = ask_process(target, target.pid, clock=lambda: sum(looks), pause=pause)
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
