"""The parts of an etcd client in the loop: calls from its threads, and the mirror with its three sources."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fleetrun.elastic.etcd.store import EtcdMirror
from fleetrun.elastic.etcd.wire import Change
from fleetrun.elastic.mailbox import Mailbox
from fleetrun.elastic.store import Entry
from fleetrun.pod.loop import Loop


def entry(revision: int, value: bytes = b"") -> Entry:
    return Entry(value, 1, revision)


def at(revision: int, key: str = "k/1", *, gone: bool = False) -> Change:
    return Change(key, None if gone else entry(revision), revision)


@pytest.fixture
def mirror() -> EtcdMirror:
    made = EtcdMirror()
    made.prefixes["k/"] = None
    return made


def test_a_read_and_the_changes_after_it(mirror):
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


def test_a_read_removes_deleted_keys(mirror):
    mirror.replace({"k/1": entry(3), "k/2": entry(4)}, 5)
    assert mirror.replace({"k/2": entry(4)}, 9)
    assert mirror.entries == {"k/2": entry(4)}


def test_the_dictionary_stays_the_same_object(mirror):
    held = mirror.entries
    mirror.replace({"k/1": entry(3)}, 5)
    assert held == {"k/1": entry(3)}


def test_an_answer_newer_than_the_watch(mirror):
    mirror.replace({"k/1": entry(3)}, 5)
    assert mirror.answered(at(9))
    assert mirror.entries == {"k/1": entry(9)}
    assert not mirror.follow([at(7), at(8, gone=True), at(9)]), "that was before"
    assert mirror.entries == {"k/1": entry(9)}
    assert mirror.follow([at(10, gone=True)])
    assert mirror.entries == {}


def test_an_answer_older_than_the_watch(mirror):
    mirror.replace({}, 5)
    mirror.follow([at(9), at(10, gone=True)])
    assert not mirror.answered(at(9))
    assert mirror.entries == {}


def test_an_answer_newer_than_a_read(mirror):
    mirror.replace({"k/1": entry(3)}, 5)
    mirror.reading()
    mirror.answered(at(9, gone=True))
    mirror.answered(at(10, "k/2"))
    assert not mirror.replace({"k/1": entry(7)}, 8)
    assert mirror.entries == {"k/2": entry(10)}
    mirror.reading()
    assert mirror.replace({"k/1": entry(11), "k/2": entry(10)}, 12)
    assert mirror.entries == {"k/1": entry(11), "k/2": entry(10)}


def test_an_etcd_that_lost_its_data(mirror):
    mirror.replace({"k/1": entry(3)}, 50)
    mirror.answered(at(60))
    mirror.reading()
    assert mirror.replace({}, 2)
    assert mirror.follow([at(3)])
    assert mirror.entries == {"k/1": entry(3)}


def test_an_etcd_that_lost_its_data_before_the_watch_reported(mirror):
    mirror.replace({}, 1)
    mirror.answered(at(9))
    mirror.answered(at(10, "k/2"))
    mirror.reading()
    mirror.answered(at(2, "k/3"))
    assert mirror.replace({}, 1)
    assert mirror.entries == {"k/3": entry(2)}


def test_a_prefix_that_is_no_longer_mirrored(mirror):
    mirror.prefixes["k/1"] = None
    mirror.replace({"k/1": entry(3), "k/2": entry(4)}, 5)
    mirror.unwatch("k/")
    assert mirror.entries == {"k/1": entry(3)}
    assert not mirror.answered(at(9, "k/2"))
    mirror.unwatch("k/1")
    mirror.unwatch("k/1")
    assert mirror.entries == {}


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def in_a_thread(act) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_calls_are_made_in_order_and_in_the_loops_thread(loop):
    read, emptied = [], []
    mailbox = Mailbox(loop, lambda: (emptied.append(len(read)), loop.stop()))
    for number in range(10):
        in_a_thread(lambda number=number: mailbox.post(lambda: read.append((number, threading.get_ident()))))
    loop.run()
    assert read == [(number, threading.get_ident()) for number in range(10)]
    assert emptied == [10]
    mailbox.close()


def test_a_closed_mailbox_makes_and_takes_no_calls(loop):
    mailbox = Mailbox(loop, lambda: pytest.fail("it was closed"))
    mailbox.post(lambda: pytest.fail("it was closed"))
    mailbox.close()
    mailbox.close()
    in_a_thread(lambda: mailbox.post(lambda: pytest.fail("it was closed")))
    loop.after(0.01, loop.stop)
    loop.run()


def test_a_call_may_close_the_mailbox(loop):
    mailbox = Mailbox(loop, lambda: pytest.fail("it was closed"))
    mailbox.post(mailbox.close)
    mailbox.post(lambda: pytest.fail("it was closed"))
    loop.after(0.01, loop.stop)
    loop.run()
