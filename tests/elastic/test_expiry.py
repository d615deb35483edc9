"""Leases end in time, and nobody's ends because the host was asleep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleetrun.elastic.embedded.client import Silence
from fleetrun.elastic.memory_store import Expiry
from fleetrun.elastic.store import Ledger
from fleetrun.pod.loop import Loop

LEASE = 10.0


class World:
    def __init__(self) -> None:
        self.now = 1000.0
        self.loop = Loop(lambda: self.now)
        self.ledger = Ledger()
        self.session = self.ledger.grant("a", LEASE, self.now)
        self.expiry = Expiry(self.ledger, self.loop, LEASE)

    def pass_(self, seconds: float, step: float) -> None:
        """Time passes, and the loop sees it in such steps."""
        end = self.now + seconds
        while self.now < end:
            self.now += step
            self.loop.after(0.0, self.loop.stop)
            self.loop.run()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.expiry.close()
    made.loop.close()


def test_a_lease_that_is_not_renewed_ends_in_time(world: World) -> None:
    world.pass_(LEASE - 0.2, 0.1)
    assert world.session.open
    world.pass_(0.9, 0.1)
    assert not world.session.open


@pytest.mark.parametrize("asleep", [LEASE / 2, LEASE, 100 * LEASE])
def test_who_slept_gives_everybody_a_whole_lease(world: World, asleep: float) -> None:
    world.pass_(LEASE - 1, 0.1)
    world.pass_(asleep, asleep)
    world.pass_(LEASE - 1, 0.1)
    assert world.session.open
    world.pass_(2, 0.1)
    assert not world.session.open


def test_a_loop_that_is_a_little_late_all_the_time_still_ends_leases(world: World) -> None:
    world.pass_(LEASE + 3, LEASE / 5)
    assert not world.session.open


def test_no_more_after_the_end(world: World) -> None:
    world.expiry.close()
    world.pass_(2 * LEASE, 0.1)
    assert world.session.open


def test_silence() -> None:
    assert Silence(5.0, now=100.0).look(105.0) == 0.0, "the first look was late"
    silence = Silence(5.0, now=100.0)
    assert [silence.look(now) for now in (102.5, 105.0, 107.4)] == [2.5, 5.0, pytest.approx(7.4)]
    silence.heard(108.0)
    assert silence.look(110.0) == 2.0
    assert silence.look(150.0) == 0.0, "nobody looked"
    assert silence.look(153.0) == 3.0
