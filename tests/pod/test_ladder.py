"""The stop ladder over real processes that obey, and that do not."""

import os
import signal

import pytest

from fleetrun.pod.container import Container
from fleetrun.pod.loop import Loop
from fleetrun.pod.supervisor import Ladder
from tests.support.pods import Clock, spec_of
from tests.support.waiting import eventually, state_of


class Climb:
    """A ladder over containers in groups, driven by a loop as the supervisor does."""

    def __init__(self, groups, grace):
        self.clock = Clock()
        self.loop = Loop(self.clock)
        self.ended = []
        self.done = 0
        self.on_exit = lambda container: None
        self.ladder = Ladder(self.loop, groups, grace, self._then)
        for container in [each for group in groups for each in group if each.alive]:
            self.loop.add(container.process.fileno(), lambda container=container: self._exited(container))

    def run(self):
        self.ladder.step()
        if not self.done:
            self.loop.run()
        self.loop.close()

    def _exited(self, container):
        self.on_exit(container)
        self.loop.remove(container.process.fileno())
        self.ended.append((container, container.collect(lambda pid: False).exit.code))
        self.ladder.step()

    def _then(self):
        self.done += 1
        self.loop.stop()


READY = 'echo >"$NOTES/ready.$NAME"; '


@pytest.fixture
def running(tmp_path):
    made = []

    def make(*scripts):
        found = []
        for script in scripts:
            container = Container(spec_of(tmp_path, script.format(READY), rank=len(made)))
            container.prepare()
            made.append(container)
            found.append(container)
            os.mkfifo(tmp_path / f"ready.{container.spec.name}")
            container.start()
            (tmp_path / f"ready.{container.spec.name}").read_text()
        return found

    yield make
    for each in made:
        if each.alive:
            each.process.signal_group(signal.SIGKILL)
            each.process.reap()


OBEYS = "{}exec sleep 100"
DEAF = "trap '' TERM; {}while :; do sleep 100; done"


def test_who_obeys_is_not_killed(running):
    climb = Climb([running(OBEYS, OBEYS)], grace=1000.0)
    climb.run()
    assert [code for _, code in climb.ended] == [-15, -15]
    assert climb.done == 1


def test_who_does_not_is_killed_after_the_grace(running):
    deaf, obedient = running(DEAF, OBEYS)
    climb = Climb([[deaf, obedient]], grace=1000.0)
    climb.on_exit = lambda container: climb.clock.advance(1000.0)
    climb.run()
    assert climb.ended == [(obedient, -15), (deaf, -9)]


def test_one_group_after_the_other(running):
    first, second = running(DEAF, OBEYS)
    climb = Climb([[first], [second]], grace=1000.0)
    climb.loop.after(0.0, lambda: climb.clock.advance(1000.0))
    climb.run()
    assert climb.ended == [(first, -9), (second, -15)], "the second was asked after the first had gone"


def test_each_group_has_its_own_grace(running):
    climb = Climb([running(DEAF), running(DEAF)], grace=0.05)
    climb.run()
    assert [code for _, code in climb.ended] == [-9, -9]


def test_the_grace_of_the_first_does_not_end_that_of_the_second(running, tmp_path):
    slow = (
        "trap 'while [ ! -e \"$NOTES/leave\" ]; do sleep 0.005; done; exit 0' TERM; "
        "{}while :; do sleep 0.01; done"
    )
    first, second = running(OBEYS, slow)
    climb = Climb([[first], [second]], grace=1000.0)

    def almost_over(container):
        if container is first:
            climb.clock.advance(900.0)
            climb.loop.after(0.0, over)

    def over():
        climb.clock.advance(200.0)
        climb.loop.after(0.0, (tmp_path / "leave").touch)

    climb.on_exit = almost_over
    climb.run()
    assert climb.ended == [(first, -15), (second, 0)]


def test_a_stopped_process_hears_its_sigterm(running):
    (made,) = running(OBEYS)
    made.process.signal_leader(signal.SIGSTOP)
    eventually(lambda: state_of(made.process.pid) == "T")
    climb = Climb([[made]], grace=1000.0)
    climb.run()
    assert climb.ended == [(made, -15)]


def test_no_more_patience(running):
    first, second = running(DEAF, DEAF)
    climb = Climb([[first], [second]], grace=1000.0)
    climb.loop.after(0.0, climb.ladder.kill)
    climb.run()
    assert [code for _, code in climb.ended] == [-9, -9]


def test_nobody_to_stop():
    climb = Climb([[], []], grace=1000.0)
    climb.run()
    assert climb.done == 1
