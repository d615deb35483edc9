"""One pass over files: threads that read them, one file each at a time, and columns of whole batches in a
bounded queue. Knows who reads what and how a pass ends; leaves bytes to `sources` and text to `multislot`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from trainers.data.columns import Columns
from trainers.data.handover import HandOver
from trainers.data.multislot import BrokenLines, Parser
from trainers.data.slots import Layout
from trainers.data.sources import check_files, open_source
from trainers.data.warm import warm_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What is read, and how. `rows` examples make up a batch; `ahead` batches may wait in the queue."""

    layout: Layout
    paths: tuple[str, ...]
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
        """Read one file; False when nobody wants the rest."""
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
