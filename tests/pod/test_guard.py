"""Signals as numbers in a file descriptor."""

import os
import select
import signal
import time

import pytest

from fleetrun.pod.guard import Signals, _guard, governed
from fleetrun.pod.process import children_of
from tests.support.isolated import isolated


@pytest.fixture
def signals():
    made = Signals({signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM})
    yield made
    made.close()


def test_nothing_came(signals):
    assert signals.read() == b""
    assert not select.select([signals], [], [], 0)[0]


def test_signals_do_nothing_but_arrive_in_order(signals):
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        os.kill(os.getpid(), number)
    assert select.select([signals], [], [], 60.0)[0]
    assert list(signals.read()) == [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]
    assert signals.read() == b""


@pytest.mark.slow
def test_a_thousand_unread_signals_stop_nothing(signals):
    for _ in range(100_000):
        signal.raise_signal(signal.SIGUSR1)
    assert signals.read()


def test_closing_gives_the_signals_back():
    before = signal.getsignal(signal.SIGUSR1)
    made = Signals({signal.SIGUSR1})
    assert signal.getsignal(signal.SIGUSR1) is not before
    made.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_what_fleetrun_acts_on():
    numbers = governed()
    ends = {"INT", "TERM", "HUP", "QUIT", "ABRT", "USR1", "USR2", "TSTP", "CONT", "ALRM", "RTMIN"}
    assert numbers >= {getattr(signal, f"SIG{name}") for name in ends}


def test_what_it_leaves_alone():
    never = {
        "KILL",
        "STOP",
        "SEGV",
        "BUS",
        "FPE",
        "ILL",
        "CHLD",
        "PIPE",
        "WINCH",
        "TTOU",
        "TTIN",
        "URG",
        "IO",
    }
    assert not governed() & {getattr(signal, f"SIG{name}") for name in never}


def test_nohup_stays_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in governed()
    finally:
        signal.signal(signal.SIGHUP, before)


def after_the_job_only_endings_arrive():
    signals = Signals(
        {signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD, signal.SIGIO, signal.SIGINT, signal.SIGALRM}
    )
    for number in (signal.SIGUSR1, signal.SIGIO, signal.SIGINT, signal.SIGCHLD):
        signal.raise_signal(number)
    signals.only_endings()
    for number in (signal.SIGUSR1, signal.SIGIO, signal.SIGTERM, signal.SIGCHLD):
        signal.raise_signal(number)
    assert list(signals.read()) == [signal.SIGINT, signal.SIGTERM]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0), "nobody has read that it shall end"


def after_an_ending_that_was_read_the_last_words_have_a_moment():
    signals = Signals({signal.SIGTERM, signal.SIGALRM})
    signal.raise_signal(signal.SIGTERM)
    signals.read()
    signals.only_endings()
    assert select.select([signals], [], [], 60.0)[0]
    assert list(signals.read()) == [signal.SIGALRM]


def a_guard_reaps_strangers():
    """Such as those of `kubectl exec pod -- sh -c 'x &'`, if it is the first process of a container."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    read, write = os.pipe()
    launcher = os.fork()
    if not launcher:
        os._exit(os.read(read, 1)[0])
    watcher = os.fork()
    if not watcher:
        for _ in range(3):
            if not os.fork() and os.fork() >= 0:  # its child is an orphan, and becomes the guard's
                os._exit(0)
            os.wait()
        until = time.monotonic() + 60
        while set(children_of(os.getppid())) != {launcher, os.getpid()} and time.monotonic() < until:
            time.sleep(0.01)
        os.write(write, b"\x07" if time.monotonic() < until else b"\x08")
        os._exit(0)
    assert _guard(launcher, {signal.SIGUSR1}) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        after_the_job_only_endings_arrive,
        after_an_ending_that_was_read_the_last_words_have_a_moment,
        a_guard_reaps_strangers,
    ],
)
def test_the_last_moments(case):
    isolated(case)
