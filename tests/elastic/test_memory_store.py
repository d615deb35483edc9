"""A client of a ledger in the same process, and the timer that ends leases."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from fleetrun.elastic.memory_store import Expiry
from fleetrun.elastic.store import Ledger
from fleetrun.errors import LaunchError
from fleetrun.pod.loop import Loop
from tests.elastic.conformance import Answers, StoreConformance, run_for, until
from tests.support.simulation import BreakableStore, SimulatedLoop


class JumpingLoop(SimulatedLoop):
    """No time passes: nothing of this store happens outside of the loop."""

    def run(self) -> None:
        self._running = True
        self.run_until(lambda: not self._running, within=math.inf)

    def stop(self) -> None:
        self._running = False


class MemoryWorld:
    lease = 0.4
    """Of a time that only passes when the test says so."""

    def __init__(self, loop: JumpingLoop) -> None:
        self.ledger = Ledger()
        self.expiry = Expiry(self.ledger, loop, self.lease)
        self._loop = loop

    def hurry(self) -> None:
        return

    def client(self, name: str) -> BreakableStore:
        return BreakableStore(self.ledger, self._loop, name, lease=self.lease)

    def vanish(self, store: BreakableStore) -> None:
        store.cut()


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def loop(self) -> JumpingLoop:
        return JumpingLoop()

    @pytest.fixture
    def world(self, loop: JumpingLoop) -> Iterator[MemoryWorld]:
        made = MemoryWorld(loop)
        yield made
        made.expiry.close()

    def test_a_short_cut_is_forgiven_and_the_mirror_is_whole_after_it(self, loop, world, join):
        store, seen = join("a")
        other, _ = join("b")
        store.watch("n/")
        store.put("n/a", b"", leased=True)
        store.put("n/x", b"")
        until(loop, lambda: len(seen.values) == 2)
        store.cut("the cable")
        other.delete("n/x")
        other.put("n/y", b"")
        answers = Answers()
        store.put("n/late", b"", then=answers)
        until(loop, lambda: seen.downs)
        run_for(loop, world.lease / 4)
        assert (seen.downs, answers, sorted(seen.values)) == (["the cable"], [], ["n/a", "n/x"])
        store.heal()
        until(loop, lambda: sorted(seen.values) == ["n/a", "n/late", "n/y"])
        assert (seen.ups, answers) == ([True, False], [True])

    def test_after_a_long_cut_the_lease_is_another(self, loop, world, join):
        store, seen = join("a")
        other, others = join("b")
        other.watch("n/")
        store.put("n/a", b"", leased=True)
        until(loop, lambda: others.values)
        store.cut()
        until(loop, lambda: not others.values)
        store.heal()
        until(loop, lambda: seen.ups == [True, True])
        store.put("n/a", b"again", leased=True)
        until(loop, lambda: others.values == {"n/a": b"again"})

    def test_a_store_that_is_lost_says_so_once(self, loop, world, join):
        store, seen = join("a")
        store.lose(LaunchError("gone"))
        until(loop, lambda: seen.errors)
        run_for(loop, world.lease)
        assert [str(error) for error in seen.errors] == ["gone"]


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
def test_after_a_suspension_all_leases_are_renewed(world: World, asleep: float) -> None:
    world.pass_(LEASE - 1, 0.1)
    world.pass_(asleep, asleep)
    world.pass_(LEASE - 1, 0.1)
    assert world.session.open
    world.pass_(2, 0.1)
    assert not world.session.open


def test_a_loop_that_is_a_little_late_all_the_time_still_ends_leases(world: World) -> None:
    world.pass_(LEASE + 3, LEASE / 5)
    assert not world.session.open


def test_no_lease_ends_after_close(world: World) -> None:
    world.expiry.close()
    world.pass_(2 * LEASE, 0.1)
    assert world.session.open
