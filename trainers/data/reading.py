"""One pass over files: threads that read them, one file each at a time, and columns of whole batches in a
bounded queue.

The queue keeps the order, and carries a reader's error to the thread that trains. Leaves bytes to `sources`
and text to `multislot`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from fleetrun.aliases import Strings
from fleetrun.frozen import frozen_by_name
from trainers.data.multislot import BrokenLines, Parser
from trainers.data.slots import Layout
from trainers.data.sources import check_files, open_source
from trainers.data.store import Columns
from trainers.data.warm import warm_up

# ---- The hand-over between the threads that read and the one that trains: bounded, in order, and it carries
# the reader's error too. Knows neither files nor batches.

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
        """Wait for room and add. False when the reader has stopped."""
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

    def peek(self) -> Item | None:
        """What `get` would give now; None: it would wait, or nothing more comes."""
        with self._changed:
            return self._items[0][0] if self._items else None

    def _ready(self) -> bool:
        return bool(self._items or self._error or self._stopped or not self._producers)

    def stop(self) -> None:
        """From now on every `put` returns False."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether nothing more is taken: the consumer has gone, or a producer failed."""
        return self._stopped or self._error is not None

    @contextlib.contextmanager
    def producer(self) -> Iterator[None]:
        """Around a producer's work: its end, and its error, are passed to the consumer."""
        ended: BaseException | None = None
        try:
            yield
        except BaseException as error:  # noqa: BLE001  # the consumer raises it
            ended = error
        with self._changed:
            self._producers -= 1
            self._error = self._error or ended
            self._changed.notify_all()


# ---- One pass over files: threads that read them, one file each at a time, and columns of whole batches in a
# bounded queue. `sources` has the bytes and `multislot` the text.


@frozen_by_name
class Pass:
    """What is read, and how. `rows` examples make up a batch; `ahead` batches may wait in the queue."""

    layout: Layout
    paths: Strings
    command: str
    rows: int
    threads: int
    ahead: int


class Reading:
    """One pass. `columns` gives the examples; `broken` counts broken lines, `empty` names files without any
    line, in the order of their end; `read` counts files, `files` is how many there are.
    """

    def __init__(self, wanted: Pass, broken: BrokenLines) -> None:
        self._pass = wanted
        self.broken = broken
        self.empty: list[str] = []
        self._lock = threading.Lock()
        self._next = 0
        self.read = 0
        self._workers = min(wanted.threads, len(wanted.paths))
        self._rests: list[Columns] = []
        self._queue: HandOver[Columns] = HandOver(wanted.ahead, self._workers)

    @property
    def files(self) -> int:
        return len(self._pass.paths)

    def columns(self) -> Iterator[Columns]:
        """Whole batches, several at a time; with one thread in the order of the files. What is left over of
        all threads comes at the end, and only the very last batch is short.

        No thread and no process is left when the iterator has ended, was closed, or raised.
        """
        check_files(self._pass.paths)
        warm_up()
        stop = os.eventfd(0)
        threads = [
            threading.Thread(target=self._work, args=(stop,), name=f"reader-{number}", daemon=True)
            for number in range(self._workers)
        ]
        try:
            for thread in threads:
                thread.start()
            while (columns := self._queue.get()) is not None:
                yield columns
        finally:
            self._queue.stop()
            os.eventfd_write(stop, 1)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            os.close(stop)

    def stop(self) -> None:
        """From another thread: `columns` ends."""
        self._queue.stop()

    def _work(self, stop: int) -> None:
        with self._queue.producer():
            parser = Parser(self._pass.layout, self._pass.rows, self.broken)
            while (path := self._take()) is not None:
                if not self._file(path, parser, stop):
                    return
            self._leave(parser.rest())

    def _file(self, path: str, parser: Parser, stop: int) -> bool:
        """Read one file; False when the rest is not wanted."""
        with open_source(path, self._pass.command, stop) as source:
            for columns in parser.read(source):
                if not self._queue.put(columns, len(columns) // self._pass.rows):
                    return False
        with self._lock:
            self.read += 1
            if not parser.lines and not self._queue.stopped:
                self.empty.append(path)
        return not self._queue.stopped

    def _take(self) -> str | None:
        with self._lock:
            self._next += 1
            return self._pass.paths[self._next - 1] if self._next <= len(self._pass.paths) else None

    def _leave(self, rest: Columns) -> None:
        """The last thread to end makes batches of what all of them had left."""
        with self._lock:
            self._rests.append(rest)
            if len(self._rests) < self._workers:
                return
        values = [part.values for part in self._rests]
        joined = Columns.empty(
            self._pass.layout,
            sum(map(len, self._rests)),
            sum(bags for bags, _ in values),
            sum(weights for _, weights in values),
        )
        joined.fill(0, self._rests)
        if len(joined):
            self._queue.put(joined, -(-len(joined) // self._pass.rows))
