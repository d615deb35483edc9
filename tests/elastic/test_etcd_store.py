"""A client of a real etcd: the promises of every store, and what is particular to this one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleetrun.elastic.etcd.store import EtcdStore
from fleetrun.elastic.store import ABSENT
from fleetrun.pod.loop import Loop
from tests.elastic.conformance import Answers, Recorder, StoreConformance, until
from tests.support.etcd import Etcd, needs_etcd

pytestmark = [pytest.mark.etcd, needs_etcd, pytest.mark.slow]


class EtcdWorld:
    lease = 60.0

    def __init__(self, loop: Loop, url: str, job_id: str) -> None:
        self._loop = loop
        self._url = url
        self._job_id = job_id

    def hurry(self) -> None:
        self.lease = 5.0

    def client(self, name: str) -> EtcdStore:
        return EtcdStore(self._loop, self._url, job_id=self._job_id, node_id=name, lease=self.lease)

    def vanish(self, store: EtcdStore) -> None:
        store._stop()
        store._worker.end(0.0)  # no time to revoke its lease


def renewed(loop: Loop, *stores: EtcdStore) -> None:
    """Until an etcd has given the lease of each its whole time once more."""
    before = [store._worker._renew_at for store in stores]
    until(
        loop,
        lambda: all(store._worker._renew_at > then for store, then in zip(stores, before, strict=True)),
    )


def kept(seen: Recorder) -> bool:
    """Whether it has had one lease all the time; an etcd may have been slow to answer now and then."""
    return seen.ups[:1] == [True] and True not in seen.ups[1:] and not seen.errors


def troubles(seen: Recorder) -> list[str]:
    """What it was told of, but for an etcd that stood still for a while."""
    return [why for why in seen.downs if "no answer within" not in why]


COUNT = 25
"""Clients at once, each with its two threads."""


class TestEtcdStore(StoreConformance):
    @pytest.fixture
    def world(self, loop: Loop, shared_etcd: Etcd, request: pytest.FixtureRequest) -> EtcdWorld:
        return EtcdWorld(loop, shared_etcd.url, request.node.name)

    def test_a_lease_holds_as_long_as_its_client_lives(self, loop, world, join):
        world.lease = 16.0  # longer than any process is suspended
        store, seen = join("a")
        store.watch("n/")
        store.put("n/a", b"", leased=True)
        until(loop, lambda: seen.values)
        renewed(loop, store)
        assert seen.values == {"n/a": b""}
        assert kept(seen)

    def test_many_changes_that_come_together_are_few_calls(self, loop, join, shared_etcd):
        """Writes of this client take etcd a while each; those of one transaction do come together."""
        reader, seen = join("a")
        reader.watch("k/")
        until(loop, lambda: seen.changes)
        del seen.changes[:]
        key = reader._keys.one
        puts = [{"request_put": {"key": key(f"k/{number}")}} for number in range(100)]
        shared_etcd.ask("/kv/txn", {"success": puts})
        until(loop, lambda: len(seen.values) == 100)
        assert len(seen.changes) == 1

    def test_changes_in_quick_succession_are_not_so_many_calls(self, loop, join):
        writer, _ = join("a")
        reader, seen = join("b")
        reader.watch("k/")
        until(loop, lambda: seen.changes)
        del seen.changes[:]
        started = loop.clock()
        for number in range(200):
            writer.put(f"k/{number}", b"")
        until(loop, lambda: len(seen.values) == 200)
        assert len(seen.changes) <= (loop.clock() - started) / 0.01 + 2

    # ---- particular to an etcd

    def test_the_others_see_that_a_client_has_gone(self, loop, join, world):
        world.lease = 1000.0  # its end is no reason here
        (leaves, _), (stays, seen) = join("b"), join("c")
        stays.watch("n/")
        leaves.put("n/b", b"", leased=True)
        world.hurry()
        dies, _ = join("a")
        dies.put("n/a", b"", leased=True)
        until(loop, lambda: len(seen.values) == 2)
        leaves.close()
        until(loop, lambda: "n/b" not in seen.values)
        world.vanish(dies)
        until(loop, lambda: not seen.values)

    def test_of_two_that_race_exactly_one_wins_each_round(self, loop, join):
        a, b = (join(name) for name in "ab")
        for store, _ in (a, b):
            store.watch("r")
        assert self.done(loop, lambda then: a[0].put("r", b"0", then=then))
        until(loop, lambda: a[1].values and b[1].values)
        wins = [0, 0]
        for number in range(200):
            answers = [Answers(), Answers()]
            racers = [0, 1] if number % 2 else [1, 0]
            for racer in racers:
                store = (a, b)[racer][0]
                value = f"{number} {racer}".encode()
                store.put("r", value, expect=store.mirror["r"].revision, then=answers[racer])
            until(loop, lambda answers=answers: answers[0] and answers[1])
            assert sorted(answers) == [[False], [True]]
            winner = answers.index([True])
            wins[winner] += 1
            value = f"{number} {winner}".encode()
            until(loop, lambda value=value: a[1].values == b[1].values == {"r": value})
        assert sum(wins) == 200

    def test_writes_of_one_client_keep_their_order(self, loop, join):
        writer, _ = join("a")
        reader, seen = join("b")
        reader.watch("k/")
        for number in range(100):
            writer.put(f"k/{number % 3}", str(number).encode())
            writer.put("k/x", b"") if number % 2 else writer.delete("k/x")
        assert self.done(loop, lambda then: writer.put("k/end", b"", then=then))
        until(loop, lambda: "k/end" in seen.values)
        assert seen.values == {"k/0": b"99", "k/1": b"97", "k/2": b"98", "k/x": b"", "k/end": b""}
        newest = [max(map(int, filter(None, values.values())), default=0) for values in seen.changes]
        assert newest == sorted(newest)

    def test_what_happens_under_several_prefixes_is_seen_in_its_order(self, loop, join):
        """A report is there before its writer is gone."""
        reader, seen = join("r")
        reader.watch("nodes/")
        reader.watch("reports/")
        writers = [join(f"n{number}")[0] for number in range(20)]
        for number, store in enumerate(writers):
            store.put(f"nodes/{number}", b"", leased=True)
        until(loop, lambda: len(seen.values) == 20)
        for number, store in enumerate(writers):
            store.put(f"reports/{number}", b"done")
            store.close()
        until(loop, lambda: len(seen.values) == 20 and all("reports" in key for key in seen.values))
        for values in seen.changes[seen.changes.index(next(v for v in seen.changes if len(v) == 20)) :]:
            for number in range(20):
                assert f"nodes/{number}" in values or f"reports/{number}" in values

    def test_a_client_sees_its_own_write_as_soon_as_it_is_told(self, loop, join):
        store, seen = join("a")
        store.watch("k/")
        until(loop, lambda: seen.changes)
        looks = []
        for number in range(50):
            value = str(number).encode()
            store.put("k/1", value, then=lambda done, value=value: looks.append(seen.values["k/1"] == value))
            store.delete("k/1", then=lambda done: looks.append(not seen.values))
        until(loop, lambda: len(looks) == 100)
        assert all(looks)

    def test_who_is_refused_sees_the_reason_at_once(self, loop, join):
        (a, _), (b, seen) = join("a"), join("b")
        b.watch("k")
        until(loop, lambda: seen.changes)
        assert self.done(loop, lambda then: a.put("k", b"a", expect=ABSENT, then=then))
        looks = []
        b.put("k", b"b", expect=ABSENT, then=lambda done: looks.append((done, seen.values)))
        until(loop, lambda: looks)
        assert looks == [(False, {"k": b"a"})]

    @pytest.mark.timeout(180)
    def test_many_clients(self, loop, join, world):
        world.lease = 20.0
        stores = [world.client(f"n{number}") for number in range(COUNT)]
        seen = [Recorder(store) for store in stores]
        for number, store in enumerate(stores):
            store.watch("nodes/")
            store.put(f"nodes/{number}", b"x" * 500, leased=True)
            store.open(seen[number])
        until(loop, lambda: all(len(each.values) == COUNT for each in seen))
        renewed(loop, *stores)
        assert all(kept(each) and len(each.values) == COUNT for each in seen)
        for store in stores[1:]:
            store.close()
        until(loop, lambda: len(seen[0].values) == 1)
        stores[0].close()


class TestJobs:
    """Of one etcd, side by side."""

    @pytest.fixture
    def loop(self) -> Iterator[Loop]:
        made = Loop()
        yield made
        made.close()

    @pytest.mark.parametrize(
        ("one", "other"), [("px", "px1"), ("px", "px/1"), ("a%2Fb", "a/b"), ("ü ber", "ü"), ("..", ".")]
    )
    def test_they_never_touch_each_other(self, loop, shared_etcd, one, other):
        stores = [EtcdWorld(loop, shared_etcd.url, job).client("a") for job in (one, other)]
        seen = [Recorder(store) for store in stores]
        for store, job, recorder in zip(stores, (one, other), seen, strict=True):
            store.watch("")
            store.put("state/job", job.encode())
            store.put("1/job", job.encode(), leased=True)
            store.open(recorder)
        until(loop, lambda: all(len(recorder.values) == 2 for recorder in seen))
        for recorder, job in zip(seen, (one, other), strict=True):
            assert recorder.values == {"state/job": job.encode(), "1/job": job.encode()}
        stores[0].delete_prefix("")
        until(loop, lambda: not seen[0].values)
        read = []
        stores[1].read("1/job", read.append)
        until(loop, lambda: read)
        assert read[0].value == other.encode()
        assert len(seen[1].values) == 2
        stores[1].delete_prefix("")
        until(loop, lambda: not seen[1].values)
        for store in stores:
            store.close()
