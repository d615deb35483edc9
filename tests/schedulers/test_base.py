"""What engines that take jobs have in common."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from fleetrun.errors import LaunchError, UsageError
from fleetrun.pod.guard import Guard, Signals
from fleetrun.schedulers.base import (
    Answer,
    Options,
    asked_to_end,
    gpus,
    processes,
    program_output,
    run_program,
    scheduler,
)
from tests.support.submissions import submission


def test_every_scheduler_that_takes_a_job_is_there():
    names = ("slurm", "srun", "kubernetes", "ssh")
    assert [scheduler(name).name for name in names] == list(names)


def test_options_may_be_written_with_either_dash():
    job = submission(
        "--scheduler", "slurm", "--scheduler_option", "cpus_per_task=4", "--scheduler_option", "x=a=b", "t.py"
    )
    assert job.options.rest() == {"cpus-per-task": "4", "x": "a=b"}


def test_an_option_that_nobody_takes_is_refused_with_those_that_there_are():
    options = Options({"knd": "job"})
    options.take("kind")
    with pytest.raises(UsageError, match="knd: kubernetes has no such option; it has kind"):
        options.refuse_rest("kubernetes")


def test_a_number_must_be_one():
    with pytest.raises(UsageError, match="gpus=two: it must be a whole number"):
        Options({"gpus": "two"}).number("gpus")


def test_words_leave_out_the_engine_and_what_it_settles():
    job = submission(
        "--scheduler=ssh", "--scheduler_option", "port=22", "--ips=h1,h2", "--nproc_per_node", "2",
        "--dry_run", "t.py", "--lr", "1", environ={"PADDLE_JOB_ID": "seven"},
    )  # fmt: skip
    assert job.command("ips") == ("--nproc_per_node=2", "--job_id=seven", "--", "t.py", "--lr", "1")


def test_variables_that_would_be_inherited_are_named():
    environ = {"FLEETRUN_SCHEDULER": "slurm", "PADDLE_NNODES": "2", "PADDLE_NPROC_PER_NODE": "1"}
    job = submission("t.py", environ=environ)
    assert job.variables("nnodes", "master") == ["FLEETRUN_SCHEDULER", "PADDLE_NNODES"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (1, 0)),
        (["--nproc_per_node", "4"], (4, 0)),
        (["--gpus", "0,1"], (2, 2)),
        (["--gpus", "0,1,2,3", "--nproc_per_node", "2"], (2, 4)),
        (["--server_num", "2", "--trainer_num", "3"], (5, 0)),
        (["--nproc_per_node", "gpu", "--scheduler_option", "gpus=8", "--scheduler=slurm"], (1, 8)),
    ],
)
def test_processes_and_devices_of_a_machine(words: list[str], expected: tuple[int, int]):
    job = submission(*words, "t.py")
    assert (processes(job.settings), gpus(job)) == expected


def test_as_many_as_there_are_is_no_number_to_ask_for():
    job = submission("--nproc_per_node", "gpu", "t.py")
    with pytest.raises(UsageError, match="gives no number of GPUs"):
        gpus(job)


# ---- Client programs: to their end, or until a signal or a lost guard says stop.

ENVIRON = {"PATH": os.environ["PATH"]}


@pytest.fixture
def signals() -> Iterator[Signals]:
    made = Signals({signal.SIGTERM, signal.SIGUSR1})
    yield made
    made.close()


@pytest.fixture
def guard() -> Guard:
    return Guard.of_this_process(os.getppid())


def test_an_answer_has_all_three(signals: Signals, guard: Guard):
    argv = ["sh", "-c", "cat; echo no >&2; exit 3"]
    assert run_program(argv, "text \udc80", ENVIRON, signals, guard) == Answer(3, "text \ufffd", "no\n")


def test_a_lot_on_both_sides_is_no_trouble(signals: Signals, guard: Guard):
    text = "x" * 300_000
    assert run_program(["cat"], text, ENVIRON, signals, guard).out == text


def test_without_the_program_it_says_so(signals: Signals, guard: Guard):
    with pytest.raises(LaunchError, match="cannot run no-such-program: No such file"):
        run_program(["no-such-program"], "", ENVIRON, signals, guard)


def test_a_signal_ends_it(signals: Signals, guard: Guard):
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(KeyboardInterrupt):
        run_program(["sleep", "100"], "", ENVIRON, signals, guard)


def test_a_lost_guard_ends_it(signals: Signals):
    with pytest.raises(KeyboardInterrupt):
        run_program(["sleep", "100"], "", ENVIRON, signals, Guard.of_this_process(4_000_000))


def test_a_signal_that_means_something_else_does_not():
    numbers = bytes([signal.SIGUSR1, signal.SIGINT, signal.SIGCHLD, signal.SIGTSTP, signal.SIGTERM])
    assert asked_to_end(numbers) == [signal.SIGINT, signal.SIGTERM]


def test_a_question_without_an_answer_is_none():
    assert program_output(["echo", "yes"], ENVIRON, within=60) == "yes\n"
    assert program_output(["false"], ENVIRON, within=60) is None
    assert program_output(["no-such-program"], ENVIRON) is None
    assert program_output(["sleep", "100"], ENVIRON, within=0.05) is None
