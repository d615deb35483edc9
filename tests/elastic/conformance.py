"""What every store promises, as tests: a class to derive from, and what is needed to run a loop under them.

    class TestMemoryStore(StoreConformance):
        @pytest.fixture
        def world(self, loop): ...          # something with `client(name)` and `vanish(store)`

Waits are by condition, with a bound. Leases are so long that a process that is suspended for a while keeps
its own; the tests of their end call `hurry` first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from fleetrun.elastic.store import ABSENT, Entry, Store
from fleetrun.errors import LaunchError
from fleetrun.pod.loop import Loop

BOUND = 60.0
_LOOK_EVERY = 0.002
_LONGEST_STEP = 0.1


class SteadyClock:
    """Seconds, without those in which it was not read, so that a suspended process misses nothing."""

    def __init__(self) -> None:
        self._now = self._looked = time.monotonic()

    def __call__(self) -> float:
        looked = time.monotonic()
        self._now += min(looked - self._looked, _LONGEST_STEP)
        self._looked = looked
        return self._now


def steady_loop() -> Loop:
    """For stores and clients that live in one process: none of their leases ends because that stood still."""
    loop = Loop(SteadyClock())

    def look() -> None:
        loop.after(_LONGEST_STEP / 5, look)

    look()
    return loop


def until(loop: Loop, condition: Callable[[], object], within: float = BOUND) -> None:
    """Run the loop until the condition holds; AssertionError after `within` seconds."""
    deadline = loop.clock() + within

    def look() -> None:
        if condition() or loop.clock() > deadline:
            loop.stop()
        else:
            loop.after(_LOOK_EVERY, look)

    loop.after(0.0, look)
    loop.run()
    assert condition(), f"not within {within} s"


def run_for(loop: Loop, seconds: float) -> None:
    """Run the loop for a while: for what must not happen."""
    loop.after(seconds, loop.stop)
    loop.run()


class Recorder:
    """A listener that writes down what it is told, and how the mirror looked."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.changes: list[dict[str, bytes]] = []
        self.ups: list[bool] = []
        self.downs: list[str] = []
        self.errors: list[LaunchError] = []

    @property
    def values(self) -> dict[str, bytes]:
        return {key: entry.value for key, entry in self.store.mirror.items()}

    def changed(self) -> None:
        self.changes.append(self.values)

    def up(self, *, fresh: bool) -> None:
        self.ups.append(fresh)

    def down(self, why: str) -> None:
        self.downs.append(why)

    def lost(self, error: LaunchError) -> None:
        self.errors.append(error)


class Answers(list[bool]):
    """Collects what `then` was told."""

    def __call__(self, done: bool) -> None:
        self.append(done)


class World(Protocol):
    """What a kind of store brings along."""

    lease: float
    """Of its clients: so long that its end has nothing to do with a test."""

    def hurry(self) -> None:
        """Before the first client: from now on a lease is so short that one can wait for its end."""
        ...

    def client(self, name: str) -> Store:
        """A new, unopened client of one and the same job."""
        ...

    def vanish(self, store: Store) -> None:
        """The client's process is killed, as far as the others can tell."""
        ...


class StoreConformance:
    @pytest.fixture
    def loop(self) -> Iterator[Loop]:
        made = steady_loop()
        yield made
        made.close()

    @pytest.fixture
    def world(self, loop: Loop) -> Iterator[World]:
        raise NotImplementedError

    @pytest.fixture
    def join(self, loop: Loop, world: World) -> Iterator[Callable[[str], tuple[Store, Recorder]]]:
        """`store, seen = join("a")`: a client that is up."""
        joined: list[Store] = []

        def make(name: str) -> tuple[Store, Recorder]:
            store = world.client(name)
            joined.append(store)
            seen = Recorder(store)
            store.open(seen)
            until(loop, lambda: seen.ups)
            return store, seen

        yield make
        for store in joined:
            store.close()

    def done(self, loop: Loop, ask: Callable[[Answers], None]) -> bool:
        """Ask for one write and wait for its answer."""
        answers = Answers()
        ask(answers)
        until(loop, lambda: answers)
        assert len(answers) == 1
        return answers[0]

    def entry(self, loop: Loop, store: Store, key: str) -> Entry | None:
        got: list[Entry | None] = []
        store.read(key, got.append)
        until(loop, lambda: got)
        return got[0]

    # ---- keys

    def test_it_comes_up_once_under_a_fresh_lease(self, loop, join):
        _, seen = join("a")
        assert (seen.ups, seen.downs, seen.errors) == ([True], [], [])

    def test_what_was_asked_before_it_is_up_is_done_then(self, loop, world):
        store = world.client("a")
        seen, answers = Recorder(store), Answers()
        store.watch("k/")
        store.put("k/1", b"x", then=answers)
        store.open(seen)
        until(loop, lambda: answers and seen.values == {"k/1": b"x"})
        store.close()

    def test_values_are_bytes_and_come_back_as_they_were(self, loop, join):
        store, _ = join("a")
        for value in (b"", b"\0\xff\n", bytes(range(256)) * 5000):
            assert self.done(loop, lambda then, value=value: store.put("k", value, then=then))
            assert self.entry(loop, store, "k").value == value

    def test_what_is_not_there_reads_as_none(self, loop, join):
        store, _ = join("a")
        assert self.entry(loop, store, "nothing") is None

    def test_revisions_grow_over_all_keys_and_the_first_is_kept(self, loop, join):
        store, _ = join("a")
        for key in ("k", "other", "k"):
            assert self.done(loop, lambda then, key=key: store.put(key, b"", then=then))
        k, other = (self.entry(loop, store, key) for key in ("k", "other"))
        assert 0 < k.created < other.revision < k.revision
        assert other.created == other.revision

    def test_a_key_that_was_made_again_is_younger(self, loop, join):
        store, _ = join("a")
        self.done(loop, lambda then: store.put("k", b"", then=then))
        first = self.entry(loop, store, "k")
        self.done(loop, lambda then: store.delete("k", then=then))
        self.done(loop, lambda then: store.put("k", b"", then=then))
        assert self.entry(loop, store, "k").created > first.revision

    def test_writing_on_a_condition(self, loop, join):
        store, _ = join("a")
        assert self.done(loop, lambda then: store.put("k", b"1", expect=ABSENT, then=then))
        assert not self.done(loop, lambda then: store.put("k", b"2", expect=ABSENT, then=then))
        revision = self.entry(loop, store, "k").revision
        assert not self.done(loop, lambda then: store.put("k", b"2", expect=revision + 1, then=then))
        assert self.done(loop, lambda then: store.put("k", b"3", expect=revision, then=then))
        assert not self.done(loop, lambda then: store.put("k", b"4", expect=revision, then=then))
        assert not self.done(loop, lambda then: store.put("none", b"5", expect=revision, then=then))
        assert self.entry(loop, store, "k").value == b"3"
        assert self.entry(loop, store, "none") is None

    def test_of_many_that_write_on_one_condition_one_succeeds(self, loop, join):
        clients = [join(f"n{number}")[0] for number in range(5)]
        answers = Answers()
        for number, store in enumerate(clients):
            store.put("leader", str(number).encode(), expect=ABSENT, then=answers)
        until(loop, lambda: len(answers) == 5)
        assert sorted(answers) == [False, False, False, False, True]

    def test_deleting(self, loop, join):
        store, _ = join("a")
        assert self.done(loop, lambda then: store.delete("k", then=then)), "it is not there: done"
        self.done(loop, lambda then: store.put("k", b"", then=then))
        revision = self.entry(loop, store, "k").revision
        assert not self.done(loop, lambda then: store.delete("k", expect=revision + 1, then=then))
        assert self.entry(loop, store, "k") is not None
        assert self.done(loop, lambda then: store.delete("k", expect=revision, then=then))
        assert self.entry(loop, store, "k") is None
        assert not self.done(loop, lambda then: store.delete("k", expect=revision, then=then))

    def test_deleting_a_prefix_takes_what_it_covers_and_nothing_else(self, loop, join):
        store, seen = join("a")
        store.watch("")
        keys = ["k", "k/1", "k/1/x", "k/2", "k2", "kk/1"]
        for key in keys:
            store.put(key, b"")
        until(loop, lambda: sorted(seen.values) == keys)
        store.delete_prefix("k/")
        until(loop, lambda: sorted(seen.values) == ["k", "k2", "kk/1"])
        store.delete_prefix("k")
        until(loop, lambda: sorted(seen.values) == ["k2", "kk/1"])
        store.delete_prefix("")
        until(loop, lambda: seen.values == {})

    # ---- watches

    def test_a_watch_shows_what_is_there_and_what_comes(self, loop, join):
        writer, _ = join("a")
        reader, seen = join("b")
        self.done(loop, lambda then: writer.put("k/1", b"x", then=then))
        reader.watch("k/")
        until(loop, lambda: seen.values == {"k/1": b"x"})
        writer.put("k/2", b"y")
        until(loop, lambda: seen.values == {"k/1": b"x", "k/2": b"y"})
        writer.put("k/1", b"z")
        until(loop, lambda: seen.values == {"k/1": b"z", "k/2": b"y"})
        writer.delete("k/2")
        until(loop, lambda: seen.values == {"k/1": b"z"})
        assert seen.changes[-1] == {"k/1": b"z"}, "the mirror and the last call agree"
        assert reader.mirror["k/1"] == self.entry(loop, writer, "k/1")

    def test_a_watch_of_nothing_is_answered_too(self, loop, join):
        store, seen = join("a")
        store.watch("k/")
        until(loop, lambda: seen.changes)
        assert seen.changes[-1] == {}

    def test_a_watch_of_a_key_covers_no_longer_key(self, loop, join):
        store, seen = join("a")
        store.watch("n/1")
        for key in ("n/10", "n/1/x", "n/2", "n/1"):
            store.put(key, key.encode())
        until(loop, lambda: "n/1" in seen.values)
        assert seen.values == {"n/1": b"n/1"}

    def test_overlapping_watches(self, loop, join):
        store, seen = join("a")
        store.watch("k/")
        store.watch("k/1")
        store.put("k/1", b"x")
        store.put("k/2", b"y")
        until(loop, lambda: len(seen.values) == 2)
        store.unwatch("k/")
        until(loop, lambda: seen.values == {"k/1": b"x"})
        store.put("k/1", b"z")
        until(loop, lambda: seen.values == {"k/1": b"z"})

    def test_what_is_no_longer_watched_leaves_the_mirror(self, loop, join):
        store, seen = join("a")
        store.watch("k/")
        store.put("k/1", b"x")
        until(loop, lambda: seen.values)
        store.unwatch("k/")
        assert self.done(loop, lambda then: store.put("k/2", b"y", then=then))
        until(loop, lambda: seen.values == {})
        store.watch("k/")
        until(loop, lambda: seen.values == {"k/1": b"x", "k/2": b"y"})

    def test_no_client_misses_a_change_between_two_watches(self, loop, join):
        """Everybody watches while somebody writes; all end with the same."""
        writer, _ = join("w")
        readers = [join(f"r{number}") for number in range(4)]
        for number in range(50):
            writer.put(f"k/{number % 7}", str(number).encode())
            if number % 10 == 5:
                readers[number // 10 % 4][0].watch("k/")
        for store, _ in readers:
            store.watch("k/")
        assert self.done(loop, lambda then: writer.put("k/end", b"", then=then))
        until(loop, lambda: all("k/end" in seen.values for _, seen in readers))
        expected = {f"k/{number % 7}": str(number).encode() for number in range(50)} | {"k/end": b""}
        for _, seen in readers:
            until(loop, lambda seen=seen: seen.values == expected)

    # ---- leases

    def test_what_is_leased_goes_with_its_client_and_the_rest_stays(self, loop, join):
        leaver, _ = join("a")
        stays, seen = join("b")
        stays.watch("n/")
        leaver.put("n/a", b"", leased=True)
        leaver.put("n/kept", b"")
        stays.put("n/b", b"", leased=True)
        until(loop, lambda: len(seen.values) == 3)
        leaver.close()
        until(loop, lambda: sorted(seen.values) == ["n/b", "n/kept"])

    def test_what_was_asked_for_before_the_end_is_done(self, loop, join):
        leaver, _ = join("a")
        _, seen = watcher = join("b")
        watcher[0].watch("k/")
        for number in range(20):
            leaver.put(f"k/{number}", b"last words")
        leaver.close()
        until(loop, lambda: len(seen.values) == 20)

    @pytest.mark.slow
    def test_a_lease_holds_as_long_as_its_client_lives(self, loop, world, join):
        world.hurry()
        store, seen = join("a")
        store.watch("n/")
        store.put("n/a", b"", leased=True)
        until(loop, lambda: seen.values)
        run_for(loop, world.lease * 1.25)
        assert seen.values == {"n/a": b""}
        assert (True in seen.ups[1:], seen.errors) == (False, [])

    def test_the_lease_of_one_that_vanishes_ends(self, loop, world, join):
        world.hurry()
        gone, _ = join("a")
        stays, seen = join("b")
        stays.watch("n/")
        gone.put("n/a", b"", leased=True)
        until(loop, lambda: seen.values)
        world.vanish(gone)
        until(loop, lambda: not seen.values)
        assert seen.errors == []

    def test_a_key_written_anew_without_a_lease_outlives_its_first_writer(self, loop, join):
        first, _ = join("a")
        second, seen = join("b")
        second.watch("k")
        assert self.done(loop, lambda then: first.put("k", b"1", leased=True, then=then))
        assert self.done(loop, lambda then: second.put("k", b"2", then=then))
        first.close()
        assert self.done(loop, lambda then: second.put("after", b"", then=then))
        run_for(loop, 0.1)
        assert seen.values == {"k": b"2"}

    # ---- being told

    def test_a_client_that_was_closed_says_nothing_more(self, loop, join):
        store, seen = join("a")
        other, _ = join("b")
        answers = Answers()
        store.watch("k/")
        store.put("k/1", b"", then=answers)
        store.close()
        told = (list(seen.changes), list(answers))
        assert self.done(loop, lambda then: other.put("k/2", b"", then=then))
        run_for(loop, 0.05)
        assert (seen.changes, answers) == told

    def test_closing_from_inside_a_call_is_fine(self, loop, join):
        store, seen = join("a")
        other, others = join("b")
        other.watch("k/")
        store.watch("k/")
        store.put("k/1", b"", then=lambda done: store.close())
        store.put("k/2", b"", then=lambda done: pytest.fail("it was closed"))
        until(loop, lambda: others.values)
        run_for(loop, 0.05)
        assert seen.errors == []

    def test_many_changes_that_come_together_are_few_calls(self, loop, join):
        writer, _ = join("a")
        reader, seen = join("b")
        reader.watch("k/")
        until(loop, lambda: seen.changes)
        del seen.changes[:]
        for number in range(200):
            writer.put(f"k/{number}", b"")
        until(loop, lambda: len(seen.values) == 200)
        assert len(seen.changes) <= 100
