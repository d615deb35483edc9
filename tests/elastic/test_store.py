"""The embedded store's content: revisions, conditions, leases, watches; by hand and against a model."""

from __future__ import annotations

import random
import time

import pytest

from fleetrun.elastic.embedded import wire
from fleetrun.elastic.store import ABSENT, Entry, Ledger, Mirror, Session, covers


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def mirrored(before: dict[str, bytes], changes: dict[str, bytes | None]) -> dict[str, bytes]:
    return {key: value for key, value in {**before, **changes}.items() if value is not None}


def news(session: Session) -> dict[str, bytes | None]:
    return {key: entry.value if entry else None for key, entry in session.take().items()}


@pytest.mark.parametrize(
    ("prefix", "key", "expected"),
    [
        ("", "a", True), ("", "a/b", True), ("a/", "a/b", True), ("a/", "a/b/c", True), ("a", "a", True),
        ("a/", "a", False), ("a", "ab", False), ("a", "a/b", False), ("a/b", "a/bc", False),
        ("b/", "a/b/", False),
    ],
)  # fmt: skip
def test_what_a_prefix_covers(ledger: Ledger, prefix: str, key: str, expected: bool) -> None:
    assert covers(prefix, key) is expected
    watcher = ledger.grant("w", 1, 0)
    ledger.watch(watcher, prefix)
    ledger.put(key, b"")
    assert (key in ledger.range(prefix)) is expected
    assert (key in watcher.take()) is expected


def test_revisions_count_over_all_keys_and_deletions(ledger: Ledger) -> None:
    assert ledger.put("a", b"1") == Entry(b"1", 1, 1)
    assert ledger.put("b", b"2") == Entry(b"2", 2, 2)
    assert ledger.put("a", b"3") == Entry(b"3", 1, 3)
    assert ledger.delete("a")
    assert ledger.put("a", b"4") == Entry(b"4", 5, 5)
    assert ledger.revision == 5


def test_what_fails_changes_nothing(ledger: Ledger) -> None:
    ledger.put("a", b"1")
    watcher = ledger.grant("w", 1, 0)
    ledger.watch(watcher, "")
    assert ledger.put("a", b"2", expect=ABSENT) is None
    assert ledger.put("a", b"2", expect=7, session=watcher) is None
    assert ledger.put("b", b"2", expect=1) is None
    assert not ledger.delete("a", expect=2)
    assert not ledger.delete("b", expect=2)
    assert (ledger.revision, ledger.get("a"), ledger.range("b")) == (1, Entry(b"1", 1, 1), {})
    assert news(watcher) == {}
    ledger.revoke(watcher)
    assert ledger.get("a") is not None


def test_a_range_is_sorted(ledger: Ledger) -> None:
    for key in ("k/b", "k/a", "k/c/x", "other", "k/a/y"):
        ledger.put(key, b"")
    assert list(ledger.range("k/")) == ["k/a", "k/a/y", "k/b", "k/c/x"]
    assert list(ledger.range("")) == ["k/a", "k/a/y", "k/b", "k/c/x", "other"]


def test_its_size(ledger: Ledger) -> None:
    ledger.put("key", b"12345")
    ledger.put("key", b"1")
    ledger.put("k", b"")
    assert ledger.size == 3 + 1 + 1
    ledger.delete_prefix("")
    assert ledger.size == 0


# ---- leases


def test_a_lease_ends_when_it_was_not_renewed(ledger: Ledger) -> None:
    one, other = ledger.grant("a", 10, 100), ledger.grant("b", 10, 100)
    ledger.put("n/a", b"", session=one)
    ledger.put("n/b", b"", session=other)
    ledger.put("kept", b"")
    ledger.renew(one, 105)
    assert ledger.expire(109.9) == []
    assert ledger.expire(110) == [other]
    assert list(ledger.range("")) == ["kept", "n/a"]
    assert ledger.expire(115) == [one]
    assert list(ledger.range("")) == ["kept"]
    assert (one.open, other.open, ledger.sessions) == (False, False, 0)


def test_all_leases_are_renewed(ledger: Ledger) -> None:
    ledger.grant("a", 10, 0)
    ledger.grant("b", 5, 0)
    ledger.renew_all(1000)
    assert ledger.expire(1004) == []
    assert [session.name for session in ledger.expire(1005)] == ["b"]


def test_a_name_has_one_lease_at_a_time(ledger: Ledger) -> None:
    first = ledger.grant("a", 10, 0)
    with pytest.raises(ValueError, match="'a' has a lease already"):
        ledger.grant("a", 10, 0)
    ledger.revoke(first)
    second = ledger.grant("a", 10, 0)
    ledger.put("k", b"", session=second)
    ledger.revoke(first)
    assert ledger.get("k") is not None


def test_a_key_belongs_to_its_last_writer(ledger: Ledger) -> None:
    one, other = ledger.grant("a", 10, 0), ledger.grant("b", 10, 0)
    ledger.put("k", b"1", session=one)
    ledger.put("k", b"2", session=other)
    ledger.put("free", b"1", session=one)
    ledger.put("free", b"2")
    ledger.revoke(one)
    assert list(ledger.range("")) == ["free", "k"]
    ledger.revoke(other)
    assert list(ledger.range("")) == ["free"]


# ---- watches


def test_the_outbox_has_the_last_change_of_each_key_in_order(ledger: Ledger) -> None:
    watcher = ledger.grant("w", 10, 0)
    ledger.put("k/0", b"before")
    assert list(ledger.watch(watcher, "k/")) == ["k/0"]
    for key in ("k/1", "k/2", "k/1", "j/1"):
        ledger.put(key, key.encode())
    ledger.delete("k/2")
    assert list(watcher.outbox) == ["k/1", "k/2"]
    assert news(watcher) == {"k/1": b"k/1", "k/2": None}
    assert news(watcher) == {}
    ledger.unwatch(watcher, "k/")
    ledger.put("k/1", b"")
    assert news(watcher) == {}


def test_a_session_is_woken_once_until_it_takes_its_changes(ledger: Ledger) -> None:
    woken: list[int] = []
    watcher = ledger.grant("w", 10, 0, lambda: woken.append(1))
    ledger.watch(watcher, "")
    ledger.watch(watcher, "k")
    for _ in range(5):
        ledger.put("k", b"")
    assert woken == [1]
    watcher.take()
    ledger.delete("k")
    assert woken == [1, 1]
    ledger.revoke(watcher)
    assert woken == [1, 1, 1]


def test_a_session_that_ended_gets_no_more_changes(ledger: Ledger) -> None:
    watcher = ledger.grant("w", 10, 0)
    ledger.watch(watcher, "")
    ledger.put("own", b"", session=watcher)
    ledger.revoke(watcher)
    ledger.put("k", b"")
    assert news(watcher) == {}


def test_unwatch_drops_the_prefix(ledger: Ledger) -> None:
    watcher = ledger.grant("w", 10, 0)
    ledger.watch(watcher, "k/")
    ledger.watch(watcher, "j")
    ledger.put("k/1", b"")
    ledger.unwatch_all(watcher)
    ledger.put("j", b"")
    assert news(watcher) == {}
    assert watcher.watches == set()


@pytest.mark.parametrize("seed", range(5))
def test_as_a_simple_model(seed: int) -> None:
    """Random writes, leases and watches: every mirror ends as a scan of all keys."""
    rng = random.Random(seed)
    ledger, model = Ledger(), dict[str, tuple[bytes, int | None]]()
    sessions = {number: ledger.grant(str(number), 5, 0) for number in range(5)}
    prefixes = ["", "a/", "a/b/", "a", "a/b", "c"]
    watching = {number: rng.sample(prefixes, 2) for number in sessions}
    mirrors: dict[int, dict[str, bytes]] = {number: {} for number in sessions}
    for each, prefix in ((number, prefix) for number in sessions for prefix in watching[number]):
        ledger.watch(sessions[each], prefix)
    for step in range(1000):
        key = rng.choice(["a", "a/b", "a/b/c", "a/bc", "ab", "c", "c/d"])
        act = rng.random()
        number = rng.randrange(5)
        if act < 0.6:
            leased = rng.random() < 0.5 and number in sessions
            ledger.put(key, str(step).encode(), session=sessions[number] if leased else None)
            model[key] = (str(step).encode(), number if leased else None)
        elif act < 0.9:
            assert ledger.delete(key, expect=None)
            model.pop(key, None)
        elif act < 0.91 and number in sessions:
            ledger.revoke(sessions.pop(number))
            model = {key: value for key, value in model.items() if value[1] != number}
        for each, session in sessions.items():
            if rng.random() < 0.3 or step == 999:
                mirrors[each] = mirrored(mirrors[each], news(session))
        assert {key: entry.value for key, entry in ledger.range("").items()} == {
            key: value for key, (value, _) in model.items()
        }
    for each in sessions:
        seen = {key for key in model if any(covers(prefix, key) for prefix in watching[each])}
        assert mirrors[each] == {key: model[key][0] for key in seen}


def test_a_change_costs_what_its_watchers_cost_and_no_more(ledger: Ledger) -> None:
    """4,000 nodes that watch their own key, and one that watches all of them."""
    for number in range(4000):
        ledger.watch(ledger.grant(f"n{number}", 10, 0), f"verdicts/n{number}")
    leader = ledger.grant("leader", 10, 0)
    ledger.watch(leader, "nodes/")
    started = time.process_time()
    for number in range(4000):
        ledger.put(f"nodes/n{number}", b"")
    assert len(leader.take()) == 4000
    assert time.process_time() - started < 1.0, "16 million looks would take longer"


# ---- why a key is gone


def test_a_mirror_knows_whose_connection_was_closed():
    """Also after the changes were on the wire."""
    ledger, mirror = Ledger(), Mirror()
    watcher = ledger.grant("watcher", 100, 0)
    mirror.watch("n/")
    mirror.replace("n/", ledger.watch(watcher, "n/"))
    sessions = [ledger.grant(name, 10, 0) for name in ("closed", "silent", "back", "deleted")]
    for session in sessions:
        ledger.put(f"n/{session.name}", b"x", session=session)
    ledger.revoke(sessions[0])
    ledger.revoke(sessions[2])
    ledger.delete("n/deleted")
    ledger.expire(10)
    mirror.note(wire.unpack(*wire.pack(watcher.take())))
    assert mirror.entries == {}
    assert mirror.closed == {"n/closed", "n/back"}
    ledger.put("n/back", b"x")
    mirror.note(wire.unpack(*wire.pack(watcher.take())))
    assert mirror.closed == {"n/closed"}
    mirror.unwatch("n/")
    assert mirror.closed == set()
