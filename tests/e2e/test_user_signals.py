"""SIGUSR1 and SIGUSR2 are the scripts'; they reach who waits for them and end nobody."""

import os
import re
import signal

import pytest

from tests.support.command import Fleetrun
from tests.support.traces import state_of


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_reaches_handlers_and_spares_those_without(fleetrun: Fleetrun, name: str):
    script = fleetrun.script(f"""
if RANK != 1:
    on(signal.{name}, lambda: None)
tell("ready", os.getpid())
wait_for_go()
""")
    launch = fleetrun.start("--nproc_per_node", "3", script)
    pids = launch.until_ready(3)
    launch.send(signal.Signals[name])
    launch.until_told(f"got {name}", 2)
    launch.until(lambda: re.search(rf"{name} .*trainer 0, trainer 2; .*trainer 1", launch.err))
    assert all(map(state_of, pids))
    launch.go()
    assert launch.wait() == 0
    assert len(launch.told(f"got {name}")) == 2


def test_before_anything_has_started_it_does_nothing(fleetrun: Fleetrun):
    """The disposition is set before Python has imported fleetrun: wait for the first sign of that."""
    launch = fleetrun.start(fleetrun.script("leave_on_term()\nstay()"))
    launch.until_err("Job: ")
    launch.send(signal.SIGUSR1)
    launch.until_ready(1)
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143


def test_many_in_a_row_are_handed_on(fleetrun: Fleetrun):
    launch = fleetrun.start(fleetrun.script("on(signal.SIGUSR1, lambda: None)\nstay()"))
    launch.until_ready(1)
    for number in range(1, 6):
        launch.send(signal.SIGUSR1)
        launch.until_told("got SIGUSR1", number)
    launch.send(signal.SIGINT)
    assert launch.wait() == 130


def test_harmless_signals_do_nothing(fleetrun: Fleetrun):
    launch = fleetrun.start(fleetrun.script("tell('ready', os.getpid())\nwait_for_go()"))
    launch.until_ready(1)
    for number in (signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH, signal.SIGCONT, signal.SIGPIPE):
        launch.send(number)
        os.kill(launch.launcher, number)
    launch.go()
    assert launch.wait() == 0, launch
