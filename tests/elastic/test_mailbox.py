"""From threads to the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fleetrun.elastic.etcd.store import Mailbox
from fleetrun.pod.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def in_a_thread(act) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_letters_are_read_in_order_and_in_the_loops_thread(loop):
    read, emptied = [], []
    mailbox = Mailbox(loop, lambda: (emptied.append(len(read)), loop.stop()))
    for number in range(10):
        in_a_thread(lambda number=number: mailbox.post(lambda: read.append((number, threading.get_ident()))))
    loop.run()
    assert read == [(number, threading.get_ident()) for number in range(10)]
    assert emptied == [10]
    mailbox.close()


def test_after_its_end_nothing_is_read_and_nothing_written(loop):
    mailbox = Mailbox(loop, lambda: pytest.fail("it was closed"))
    mailbox.post(lambda: pytest.fail("it was closed"))
    mailbox.close()
    mailbox.close()
    in_a_thread(lambda: mailbox.post(lambda: pytest.fail("it was closed")))
    loop.after(0.01, loop.stop)
    loop.run()


def test_a_letter_may_close_it(loop):
    mailbox = Mailbox(loop, lambda: pytest.fail("it was closed"))
    mailbox.post(mailbox.close)
    mailbox.post(lambda: pytest.fail("it was closed"))
    loop.after(0.01, loop.stop)
    loop.run()
