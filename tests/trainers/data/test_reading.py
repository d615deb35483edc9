"""The bounded queue between readers and the trainer."""

from __future__ import annotations

import threading

import pytest

from tests.support.waiting import eventually
from trainers.data.reading import HandOver


def produce(queue: HandOver[int], items: range, put: list[int]) -> threading.Thread:
    def work() -> None:
        with queue.producer():
            for item in items:
                if not queue.put(item, 2):
                    return
                put.append(item)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def asleep(queue: HandOver[int]) -> bool:
    """Whether a thread waits in the queue."""
    return len(queue._changed._waiters) > 0  # type: ignore[attr-defined]


def test_no_more_than_the_limit_is_held() -> None:
    queue: HandOver[int] = HandOver(5, producers=1)
    put: list[int] = []
    thread = produce(queue, range(50), put)
    for expected in range(50):
        last = min(expected + 3, 50)  # three items of weight 2 are the first to reach 5
        eventually(lambda last=last: len(put) == last and (last == 50 or asleep(queue)))  # type: ignore[misc]
        assert queue.get() == expected
    assert queue.get() is None
    thread.join()


def test_stop_releases_a_producer_that_waits() -> None:
    queue: HandOver[int] = HandOver(1, producers=1)
    put: list[int] = []
    thread = produce(queue, range(50), put)
    eventually(lambda: asleep(queue))
    queue.stop()
    thread.join()
    assert put == [0]


def test_an_error_comes_after_what_was_put_before_it() -> None:
    queue: HandOver[int] = HandOver(10, producers=2)
    with queue.producer():
        queue.put(1)
        raise ValueError("broken")
    with queue.producer():
        pass
    assert queue.get() == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            queue.get()
