"""Waiting for launchers, and signals for those that cannot be asked. The processes are real."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fleetrun.control.client import Watched, ask_by_signal, guard_of
from tests.support.waiting import ended, eventually, state_of

# A guard by its name, which says what it got, and a launcher below it that stays.
GUARD = """
import os, signal, sys
open("/proc/self/comm", "w").write(sys.argv[1])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
read, write = os.pipe()
launcher = os.fork()
if launcher == 0:
    os.close(write)
    os.read(read, 1)  # until its guard is gone
    os._exit(0)
print(launcher, flush=True)
got = signal.sigwaitinfo({signal.SIGTERM, signal.SIGCHLD}).si_signo
os.kill(launcher, signal.SIGKILL)
print(signal.Signals(got).name, flush=True)
"""


@pytest.fixture
def guarded():
    """`guarded(name)`: the guard, and the pid of its launcher."""
    made = []

    def start(name: str = "fleetrun-guard") -> tuple[subprocess.Popen, int]:
        popen = subprocess.Popen([sys.executable, "-c", GUARD, name], stdout=subprocess.PIPE, text=True)
        made.append(popen)
        return popen, int(popen.stdout.readline())

    yield start
    for popen in made:
        popen.kill()
        popen.wait()
        popen.stdout.close()


def test_a_guard_is_known_by_its_name(guarded):
    guard, launcher = guarded()
    assert guard_of(launcher) == guard.pid
    other, below = guarded("make")
    assert guard_of(below) == 0
    os.kill(below, signal.SIGKILL)
    other.wait()


def test_what_is_not_there_has_no_guard_and_is_over():
    assert guard_of(1 << 30) == 0
    watched = Watched(1 << 30)
    assert watched.over()
    watched.wait()
    watched.close()


def test_both_have_to_be_gone(guarded):
    guard, launcher = guarded()
    watched = Watched(launcher)
    assert not watched.over()
    assert ask_by_signal(launcher, now=False)
    assert guard.stdout.readline() == "SIGTERM\n"
    watched.wait()
    guard.wait()
    assert watched.over()
    watched.close()


def test_at_once_is_the_end_of_the_launcher_and_the_guard_does_the_rest(guarded):
    guard, launcher = guarded()
    assert ask_by_signal(launcher, now=True)
    assert guard.stdout.readline() == "SIGCHLD\n"
    eventually(lambda: ended(launcher))


@pytest.mark.parametrize("now", [False, True])
def test_the_first_signal_may_be_their_end(guarded, monkeypatch, now):
    """They are gone before the second is sent, and their numbers may be those of others."""
    guard, launcher = guarded()
    watched = Watched(launcher)
    assert not watched.ending()
    sent = []

    def send(pidfd, number):
        sent.append(number)
        signal.pidfd_send_signal(pidfd, number)
        guard.wait()

    told = SimpleNamespace(**vars(signal) | {"pidfd_send_signal": send})
    monkeypatch.setattr("fleetrun.control.client.signal", told)
    assert ask_by_signal(launcher, now)
    assert sent == [signal.SIGKILL if now else signal.SIGTERM, signal.SIGCONT]
    assert watched.ending()
    watched.close()


def test_one_that_is_stopped_is_continued(guarded):
    guard, launcher = guarded()
    guard.send_signal(signal.SIGSTOP)
    eventually(lambda: state_of(guard.pid) == "T")
    assert ask_by_signal(launcher, now=False)
    assert guard.stdout.readline() == "SIGTERM\n"


def test_a_process_without_a_guard_is_left_alone(guarded):
    other, below = guarded("make")
    assert not ask_by_signal(below, now=True)
    assert not ended(below)
    os.kill(below, signal.SIGKILL)
    other.wait()
