"""When a client of the embedded store sends heartbeats, and when it finds the store silent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleetrun.elastic.embedded.client import Heartbeat
from fleetrun.pod.loop import Loop


class World:
    def __init__(self) -> None:
        self.now = 50.0
        self.loop = Loop(lambda: self.now)
        self.beats: list[tuple[float, float, bool]] = []
        self.heartbeat = Heartbeat(self.loop, 8.0, lambda *told: self.beats.append((self.now, *told)))

    def pass_(self, seconds: float) -> list[tuple[float, float, bool]]:
        """What was felt while time passed, in steps of a second."""
        del self.beats[:]
        for _ in range(int(seconds)):
            self.now += 1.0
            self.loop.after(0.0, self.loop.stop)
            self.loop.run()
        return self.beats


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.loop.close()


def test_eight_beats_and_four_messages_in_a_lease(world: World) -> None:
    assert world.pass_(10) == []
    world.heartbeat.start()
    assert world.pass_(3) == [(61.0, 1.0, True), (62.0, 2.0, False), (63.0, 3.0, True)]
    world.heartbeat.note_message()
    assert world.pass_(1) == [(64.0, 1.0, False)]
    world.heartbeat.stop()
    assert world.pass_(10) == []


def test_time_asleep_does_not_count_as_silence(world: World) -> None:
    world.heartbeat.start()
    world.pass_(3)
    world.now += 100.0
    assert [beat[:2] for beat in world.pass_(2)] == [(154.0, 0.0), (155.0, 1.0)]


def test_a_new_lease_changes_the_rhythm(world: World) -> None:
    world.heartbeat.start()
    world.heartbeat.keep_to(8.0)
    assert [beat[0] for beat in world.pass_(2)] == [51.0, 52.0]
    world.heartbeat.keep_to(16.0)
    assert [beat[:2] for beat in world.pass_(4)] == [(54.0, 2.0), (56.0, 4.0)]
