"""An etcd that is killed, suspended, loses its data or cannot be reached for a while: the job continues, and
no change is missed.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fleetrun.elastic.etcd.store import LAST_MOMENT, EtcdStore
from fleetrun.elastic.store import ABSENT
from fleetrun.pod.loop import Loop
from tests.elastic.conformance import Answers, Recorder, run_for, until
from tests.elastic.test_etcd_store import kept, renewed, troubles
from tests.support.etcd import Etcd, etcd_cluster, needs_etcd
from tests.support.link import Link
from tests.support.waiting import eventually

pytestmark = [pytest.mark.etcd, needs_etcd, pytest.mark.slow]

LEASE = 8.0
"""One whose end is waited for: longer than any process is suspended, with what a client needs after that."""
LONG = 20.0
"""One that must not end. An etcd may take a quarter of it over an answer."""

Joined = tuple[EtcdStore, Recorder]


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    with etcd_cluster(tmp_path) as (member,):
        yield member


@pytest.fixture
def join(loop: Loop) -> Iterator[Callable[..., Joined]]:
    """`store, seen = join(url, name)`: a client that is up, mirrors `n/`, and has put `n/NAME`, leased."""
    joined: list[EtcdStore] = []

    def make(url: str, name: str, lease: float = LONG) -> Joined:
        store = EtcdStore(loop, url, job_id="job", node_id=name, lease=lease)
        joined.append(store)
        seen, done = Recorder(store), Answers()
        store.open(seen)
        store.watch("n/")
        store.put(f"n/{name}", b"", leased=True, then=done)
        # What is there, but was not answered, would be put once more, under another lease.
        until(loop, lambda: done and seen.ups and f"n/{name}" in seen.values)
        seen.ups[:], seen.downs[:] = [True], []  # what a slow disk did until then is not the test's matter
        return store, seen

    yield make
    for store in joined:
        store.close()


def ask(*stores: EtcdStore) -> None:
    """So that they notice at once what became of their etcd, and look at their leases when it is back."""
    for store in stores:
        store.read("n/any", lambda entry: None)


def refuses(etcd: Etcd, *everybody: Recorder) -> bool:
    """Whether all were told that no member answers."""
    return all(f"{etcd.endpoint}: Connection refused" in seen.downs for seen in everybody)


def test_a_killed_etcd_that_comes_back_is_only_an_interruption(loop, etcd, join):
    (a, seen), (b, others) = join(etcd.url, "a"), join(etcd.url, "b")
    etcd.kill()
    ask(a, b)
    until(loop, lambda: refuses(etcd, seen, others))
    answers = Answers()
    a.put("n/late", b"x", expect=ABSENT, then=answers)
    run_for(loop, 0.3)
    assert answers == []
    etcd.start()
    until(loop, lambda: seen.ups[1:] and others.ups[1:] and answers)
    until(loop, lambda: sorted(others.values) == ["n/a", "n/b", "n/late"])
    assert answers == [True]
    assert kept(seen)
    assert kept(others)


def test_an_etcd_that_is_away_for_longer_than_a_lease(loop, etcd, join):
    (a, seen), (b, others) = (join(etcd.url, name, LEASE) for name in "ab")
    etcd.kill()
    run_for(loop, 1.1 * LEASE)
    assert sorted(seen.values) == ["n/a", "n/b"], "the mirror is what was last known"
    etcd.start()
    until(loop, lambda: seen.ups[1:] and others.ups[1:])
    renewed(loop, a, b)
    assert sorted(others.values) == ["n/a", "n/b"], "an etcd that starts gives every lease its full time"
    assert kept(seen)
    assert kept(others)


def test_an_etcd_that_lost_its_data(loop, etcd, join):
    (a, seen), (b, others) = join(etcd.url, "a"), join(etcd.url, "b")
    answers = Answers()
    for number in range(20):
        a.put("n/x", str(number).encode(), then=answers)
    until(loop, lambda: others.values.get("n/x") == b"19" and len(answers) == 20)
    etcd.kill()
    ask(a, b)
    until(loop, lambda: refuses(etcd, seen, others))
    etcd.forget()
    etcd.start()
    until(loop, lambda: True in seen.ups[1:] and True in others.ups[1:])
    until(loop, lambda: not others.values and not seen.values)
    answers = Answers()
    a.put("n/a", b"again", leased=True, expect=ABSENT, then=answers)
    until(loop, lambda: others.values == {"n/a": b"again"} == seen.values and answers == [True])


@pytest.mark.parametrize(("lease", "fresh"), [(LONG, False), (LEASE, True)])
def test_a_frozen_etcd(loop, etcd, join, lease, fresh):
    (a, seen), (b, others) = join(etcd.url, "a", lease), join(etcd.url, "b", lease)
    etcd.freeze()
    began = loop.clock()
    ask(a, b)
    until(loop, lambda: seen.downs and others.downs)
    assert set(seen.downs) == {f"{etcd.endpoint}: no answer within {lease / 4:g} s"}
    if fresh:
        run_for(loop, 1.1 * lease - (loop.clock() - began))
    etcd.thaw()
    if fresh:
        until(loop, lambda: True in seen.ups[1:] and True in others.ups[1:])
        until(loop, lambda: not seen.values and not others.values)
        a.put("n/a", b"again", leased=True)
        until(loop, lambda: others.values == {"n/a": b"again"} == seen.values)
    else:
        until(loop, lambda: seen.ups[1:] and others.ups[1:])
        assert others.values == seen.values == {"n/a": b"", "n/b": b""}
        assert kept(seen)
        assert kept(others)


def test_a_write_of_unknown_outcome(loop, etcd, join):
    a, seen = join(etcd.url, "a")
    etcd.freeze()
    conditional, plain, later = Answers(), Answers(), Answers()
    a.put("n/1", b"", expect=ABSENT, then=conditional)
    a.put("n/2", b"", then=plain)
    a.put("n/3", b"", expect=ABSENT, then=later)
    until(loop, lambda: conditional)
    assert (conditional, plain, later) == ([False], [], [])
    etcd.thaw()
    until(loop, lambda: plain and later and seen.ups[1:])
    assert (plain, later) == ([True], [True])
    assert kept(seen)


@pytest.mark.parametrize("frozen", [False, True])
def test_closing_does_not_wait_for_an_etcd_that_stands_still(loop, etcd, join, frozen):
    """A question is given up after five seconds, and the lease with it: if this process stood still."""
    (a, _), (_, others) = join(etcd.url, "a", 100.0), join(etcd.url, "b")
    if frozen:
        etcd.freeze()
    a.put("n/1", b"")
    began = loop.clock()
    a.close()
    if frozen:
        asking, took = a._request_thread.is_alive(), loop.clock() - began
        assert took >= 0.9 * LAST_MOMENT, "it may only be slow"
        assert asking or took > 6.0, "it still has its question to ask"
        etcd.thaw()
        until(loop, lambda: not a._request_thread.is_alive())
    if not frozen or loop.clock() - began < 4.5:
        until(loop, lambda: "n/a" not in others.values)
    assert ("n/1" in others.values) or frozen


def test_closing_while_there_is_no_etcd(loop, etcd, join):
    a, seen = join(etcd.url, "a")
    etcd.kill()
    until(loop, lambda: seen.downs)
    a.close()


# ---- a network that swallows


@pytest.fixture
def link(etcd: Etcd) -> Iterator[Link]:
    made = Link(etcd.endpoint)
    yield made
    made.close()


def test_a_cut_cable(loop, etcd, link, join):
    (a, seen), (b, others) = join(f"etcd://{link.endpoint}", "a", LEASE), join(etcd.url, "b")
    b.put("n/gone", b"")
    until(loop, lambda: "n/gone" in seen.values)
    link.swallow()
    ask(a)
    until(loop, lambda: seen.downs)
    etcd.revoke(a._worker._lease)  # it would end now
    b.delete("n/gone")
    b.put("n/new", b"")
    until(loop, lambda: sorted(others.values) == ["n/b", "n/new"])
    assert sorted(seen.values) == ["n/a", "n/b", "n/gone"], "nothing passed"
    link.heal()
    until(loop, lambda: seen.ups[1:])
    assert seen.ups == [True, True]
    assert sorted(seen.values) == ["n/b", "n/new"], "it is whole when it is up"
    assert kept(others)
    assert troubles(others) == []


def test_a_watch_that_died_in_silence(loop, etcd, link, join):
    """Only its connection: requests are still answered, and the lease holds."""
    (_, seen), (b, _) = join(f"etcd://{link.endpoint}", "a", LEASE), join(etcd.url, "b")
    link.swallow(containing=b"create_request")
    b.put("n/new", b"")
    until(loop, lambda: "n/new" in seen.values)
    assert kept(seen)
    assert troubles(seen) == []


def test_an_etcd_that_lost_its_data_before_the_watch_told_of_them(loop, etcd, link, join):
    a, seen = join(f"etcd://{link.endpoint}", "a")
    link.swallow(containing=b"create_request")
    answers = Answers()
    for number in range(20):
        a.put(f"n/{number}", b"", then=answers)
    until(loop, lambda: len(answers) == 20)
    etcd.kill()
    etcd.forget()
    etcd.start()
    ask(a)
    until(loop, lambda: True in seen.ups[1:] and not seen.values)


# ---- before the first contact


def test_it_tries_for_ever_and_at_every_member(loop, etcd):
    etcd.kill()
    with Silence() as silent:
        store = EtcdStore(loop, f"{etcd.url},{silent.endpoint}", job_id="job", node_id="a", lease=LEASE)
        seen, answers = Recorder(store), Answers()
        store.put("n/a", b"", leased=True, then=answers)
        store.watch("n/")
        store.open(seen)
        until(loop, lambda: seen.downs)
        run_for(loop, LEASE / 4 + 0.5)
        assert seen.downs == [
            f"{etcd.endpoint}: Connection refused; {silent.endpoint}: no answer within {LEASE / 4:g} s"
        ]
        assert (seen.ups, answers, seen.changes) == ([], [], [])
        etcd.start()
        until(loop, lambda: seen.ups and answers == [True] and seen.values == {"n/a": b""})
        store.close()


class Silence:
    """Listens, takes connections, and says nothing."""

    def __enter__(self) -> Silence:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._socket.getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


# ---- several members


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Sequence[Etcd]]:
    with etcd_cluster(tmp_path, 3) as members:
        yield members


def leader_of(members: Sequence[Etcd]) -> Etcd:
    ids = {member.ask("/maintenance/status", {})["header"]["member_id"]: member for member in members}
    found: list[str] = []

    def known() -> bool:
        """There is none while they elect one."""
        found[:] = [members[0].ask("/maintenance/status", {}).get("leader", "")]
        return found[0] in ids

    eventually(known)
    return ids[found[0]]


@pytest.mark.parametrize("fault", [Etcd.kill, Etcd.freeze])
def test_the_leader_of_three_members_fails(loop, cluster, join, fault):
    url = "etcd://" + ",".join(member.endpoint for member in cluster)
    clients = [join(url, f"n{number}", LEASE) for number in range(6)]
    until(loop, lambda: all(len(seen.values) == 6 for _, seen in clients))
    fault(leader_of(cluster))
    answers = Answers()
    for number, (store, _) in enumerate(clients):
        store.put(f"n/after{number}", b"", then=answers)
    until(loop, lambda: answers == [True] * 6)
    until(loop, lambda: all(len(seen.values) == 12 for _, seen in clients))
    renewed(loop, *(store for store, _ in clients))
    assert all(len(seen.values) == 12 for _, seen in clients), "no lease was lost"
    assert all(kept(seen) for _, seen in clients)


def test_without_a_majority_no_member_answers(loop, cluster, join):
    url = "etcd://" + ",".join(member.endpoint for member in cluster)
    a, seen = join(url, "a", LEASE)
    for member in cluster[:2]:
        member.kill()
    ask(a)
    until(loop, lambda: seen.downs and all(member.endpoint in seen.downs[-1] for member in cluster))
    ups = len(seen.ups)
    cluster[0].start()
    until(loop, lambda: len(seen.ups) > ups)
    assert sorted(seen.values) == ["n/a"]
    assert kept(seen)
