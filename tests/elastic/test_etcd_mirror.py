"""Three sources of what a client knows, in every order in which they may come."""

from __future__ import annotations

import pytest

from fleetrun.elastic.etcd.store import EtcdMirror
from fleetrun.elastic.etcd.wire import Change
from fleetrun.elastic.store import Entry


def entry(revision: int, value: bytes = b"") -> Entry:
    return Entry(value, 1, revision)


def at(revision: int, key: str = "k/1", *, gone: bool = False) -> Change:
    return Change(key, None if gone else entry(revision), revision)


@pytest.fixture
def mirror() -> EtcdMirror:
    made = EtcdMirror()
    made.prefixes["k/"] = None
    return made


def test_a_reading_and_what_follows(mirror):
    assert mirror.replace({"k/1": entry(3), "other": entry(2)}, 5)
    assert mirror.entries == {"k/1": entry(3)}
    assert mirror.follow([at(6), at(7, "k/2"), at(8, "other")])
    assert mirror.entries == {"k/1": entry(6), "k/2": entry(7)}
    assert mirror.follow([at(9, "k/2", gone=True)])
    assert mirror.entries == {"k/1": entry(6)}


def test_the_same_again_is_no_difference(mirror):
    mirror.replace({"k/1": entry(3)}, 5)
    assert not mirror.replace({"k/1": entry(3)}, 9)
    assert not mirror.follow([at(3)])
    assert not mirror.follow([at(10, "k/none", gone=True), at(11, "other")])


def test_a_reading_takes_away_what_is_gone(mirror):
    mirror.replace({"k/1": entry(3), "k/2": entry(4)}, 5)
    assert mirror.replace({"k/2": entry(4)}, 9)
    assert mirror.entries == {"k/2": entry(4)}


def test_the_dictionary_stays_the_same_object(mirror):
    held = mirror.entries
    mirror.replace({"k/1": entry(3)}, 5)
    assert held == {"k/1": entry(3)}


def test_an_answer_ahead_of_the_watch(mirror):
    mirror.replace({"k/1": entry(3)}, 5)
    assert mirror.answered(at(9))
    assert mirror.entries == {"k/1": entry(9)}
    assert not mirror.follow([at(7), at(8, gone=True), at(9)]), "that was before"
    assert mirror.entries == {"k/1": entry(9)}
    assert mirror.follow([at(10, gone=True)])
    assert mirror.entries == {}


def test_an_answer_behind_the_watch(mirror):
    mirror.replace({}, 5)
    mirror.follow([at(9), at(10, gone=True)])
    assert not mirror.answered(at(9))
    assert mirror.entries == {}


def test_an_answer_ahead_of_a_reading(mirror):
    mirror.replace({"k/1": entry(3)}, 5)
    mirror.reading()
    mirror.answered(at(9, gone=True))
    mirror.answered(at(10, "k/2"))
    assert not mirror.replace({"k/1": entry(7)}, 8)
    assert mirror.entries == {"k/2": entry(10)}
    mirror.reading()
    assert mirror.replace({"k/1": entry(11), "k/2": entry(10)}, 12)
    assert mirror.entries == {"k/1": entry(11), "k/2": entry(10)}


def test_an_etcd_that_began_anew(mirror):
    mirror.replace({"k/1": entry(3)}, 50)
    mirror.answered(at(60))
    mirror.reading()
    assert mirror.replace({}, 2)
    assert mirror.follow([at(3)])
    assert mirror.entries == {"k/1": entry(3)}


def test_an_etcd_that_began_anew_before_the_watch_told_anything(mirror):
    mirror.replace({}, 1)
    mirror.answered(at(9))
    mirror.answered(at(10, "k/2"))
    mirror.reading()
    mirror.answered(at(2, "k/3"))
    assert mirror.replace({}, 1)
    assert mirror.entries == {"k/3": entry(2)}


def test_what_is_not_mirrored_any_more(mirror):
    mirror.prefixes["k/1"] = None
    mirror.replace({"k/1": entry(3), "k/2": entry(4)}, 5)
    mirror.forget("k/")
    assert mirror.entries == {"k/1": entry(3)}
    assert not mirror.answered(at(9, "k/2"))
    mirror.forget("k/1")
    mirror.forget("k/1")
    assert mirror.entries == {}
