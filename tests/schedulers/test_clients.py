"""Client programs: to their end, or until a signal or a lost guard says stop."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from fleetrun.errors import LaunchError
from fleetrun.pod.guard import Guard, Signals
from fleetrun.schedulers.base import Answer, asked_to_end, program_output, run_program
from fleetrun.schedulers.local import ENGINE
from tests.support.submissions import submission

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


def test_the_local_engine_takes_no_job():
    with pytest.raises(LaunchError, match="hands no job over"):
        ENGINE.submit(submission("train.py"))
