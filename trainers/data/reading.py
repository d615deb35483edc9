"""Read files in one pass, with threads that each read one file at a time into a bounded queue.

The queue holds columns of whole batches, keeps their order, and passes a reader's error to the training
thread. `sources` provides the bytes, and `multislot` parses them.
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

# ---- The bounded queue between the reading threads and the training thread

Item = TypeVar("Item")

_LONGEST_WAIT_S = 1.0


class HandOver(Generic[Item]):
    """A queue from several producers to one consumer.

    It holds at most `limit` (weights of items) before `put` waits. The last item is added whole and may
    exceed the limit. `get` raises the first producer's error, after the items that were put before it.
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
        """Wait for space and add the item. Return False if the reader has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._held < self._limit or self.stopped)
            if self.stopped:
                return False
            self._items.append((item, weight))
            self._held += weight
            self._changed.notify_all()
            return True

    def get(self) -> Item | None:
        """Return the next item, or None after `stop` or after every producer has ended.

        Raises the error of a failed producer.
        """
        with self._changed:
            # A signal between Python's last check and the wait does not end the wait. Ctrl-C would then work
            # only at the next item.
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
        """Return the item that `get` would return now, or None if `get` would wait or end."""
        with self._changed:
            return self._items[0][0] if self._items else None

    def _ready(self) -> bool:
        return bool(self._items or self._error or self._stopped or not self._producers)

    def stop(self) -> None:
        """Make every later `put` return False."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """True if items are refused, because the consumer has stopped or a producer failed."""
        return self._stopped or self._error is not None

    @contextlib.contextmanager
    def producer(self) -> Iterator[None]:
        """Wrap a producer's work, and pass its end and its error to the consumer."""
        ended: BaseException | None = None
        try:
            yield
        except BaseException as error:  # noqa: BLE001  # the consumer raises it
            ended = error
        with self._changed:
            self._producers -= 1
            self._error = self._error or ended
            self._changed.notify_all()


# ---- One pass over files


@frozen_by_name
class Pass:
    """The files of a pass and how to read them. A batch has `rows` examples, and `ahead` batches may wait."""

    layout: Layout
    paths: Strings
    command: str
    rows: int
    threads: int
    ahead: int


class Reading:
    """One pass. `columns` yields the examples.

    `broken` counts broken lines. `empty` names files without lines, in order of completion. `read` counts
    completed files, and `files` is their total number.
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
        """Yield several whole batches at a time, with one thread in the order of the files.

        Remaining examples of all threads come at the end, and only the very last batch is short. All threads
        and processes have ended when the iterator ends, is closed, or raises.
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
        """End `columns`, from another thread."""
        self._queue.stop()

    def _work(self, stop: int) -> None:
        with self._queue.producer():
            parser = Parser(self._pass.layout, self._pass.rows, self.broken)
            while (path := self._take()) is not None:
                if not self._file(path, parser, stop):
                    return
            self._leave(parser.rest())

    def _file(self, path: str, parser: Parser, stop: int) -> bool:
        """Read one file. Return False if reading must stop."""
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
        """Combine the remaining examples of all threads into batches. The last thread does this."""
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
