"""The hand-over between the threads that read and the one that trains: bounded, in order, and it carries the
reader's error too. Knows neither files nor batches.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Generic, Literal, TypeVar

Item = TypeVar("Item")

_LONGEST_WAIT_S = 1.0


class HandOver(Generic[Item]):
    """A queue from several producers to one consumer.

    It holds at most `limit` (weights of items) before `put` waits; an item is taken in whole, so the last one
    may go beyond. The first producer's error is raised by `get`, after what was put before it.
    """

    def __init__(self, limit: int, producers: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._items: deque[tuple[Item, int]] = deque()
        self._held = 0
        self._producers = producers
        self._error: BaseException | None = None
        self._stopped = False

    def put(self, item: Item, weight: int = 1) -> bool:
        """Wait for room and add. False when nobody takes any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._held < self._limit or self.stopped)
            if self.stopped:
                return False
            self._items.append((item, weight))
            self._held += weight
            self._changed.notify_all()
            return True

    def get(self) -> Item | None:
        """The next item, or None when every producer has ended, or after `stop`. Raises the error of one that
        failed.
        """
        with self._changed:
            # A signal between Python's last look and the wait itself does not end the wait, so that Ctrl-C
            # would be seen only when something comes.
            while not self._changed.wait_for(self._ready, timeout=_LONGEST_WAIT_S):
                pass
            if self._items:
                item, weight = self._items.popleft()
                self._held -= weight
                self._changed.notify_all()
                return item
            if self._error is not None and not self._stopped:
                raise self._error
            return None

    def _ready(self) -> bool:
        return bool(self._items or self._error or self._stopped or not self._producers)

    def stop(self) -> None:
        """Nothing is taken any more: every `put` returns False."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether nothing more is taken: the consumer has gone, or a producer failed."""
        return self._stopped or self._error is not None

    def producer(self) -> Producer[Item]:
        """Around a producer's work: its end, and its error, are told to the consumer."""
        return Producer(self)

    def _ended(self, error: BaseException | None) -> None:
        with self._changed:
            self._producers -= 1
            if error is not None and self._error is None:
                self._error = error
            self._changed.notify_all()


class Producer(Generic[Item]):
    def __init__(self, hand_over: HandOver[Item]) -> None:
        self._hand_over = hand_over

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[True]:
        self._hand_over._ended(error)
        return True  # the consumer raises it
