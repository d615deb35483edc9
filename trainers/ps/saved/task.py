"""Task: a part that is written in the background while training goes on. Knows a thread; leaves the files to
`writing`.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from trainers.ps.saved.errors import save_error
from trainers.ps.saved.folder import open_folder
from trainers.ps.saved.manifest import FileRecord
from trainers.ps.saved.source import TableCut, close_cuts
from trainers.ps.saved.writing import CancelledError, SaveOrder, step_back, write_part


@dataclass(frozen=True, slots=True)
class Progress:
    """Slots of the tables walked so far, of how many, and bytes packed so far."""

    walked: int
    slots: int
    packed: int


class SaveTask:
    """Begins to write at construction. When it has ended, by itself or because of `cancel`, the thread of
    the tables must call `close`.

    `then` is called in the writing thread with the part's record when the part is written; what it raises
    is the task's error. `done` is called with this task when all of that has ended, in the writing thread
    or, when it has ended before, in this one: to wake up who waits.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        order: SaveOrder,
        cuts: Sequence[TableCut],
        *,
        blob: bytes | None = None,
        then: Callable[[FileRecord], None] | None = None,
        done: Callable[[SaveTask], None] | None = None,
    ) -> None:
        self.order = order
        self._folder = open_folder(where)
        self._cuts = cuts
        self._then = then
        self._progress = Progress(0, sum(table.slots for table in cuts), 0)
        self._cancelled = threading.Event()
        thread = ThreadPoolExecutor(1, "save", initializer=step_back)
        self._future: Future[FileRecord] = thread.submit(self._run, blob)
        if done is not None:
            self._future.add_done_callback(lambda _: done(self))
        thread.shutdown(wait=False)

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def ended(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        """Give up soon; `result` then raises CancelledError, unless everything was written already."""
        self._cancelled.set()

    def wait(self) -> None:
        """Until it has ended, in whatever way."""
        concurrent.futures.wait([self._future])

    def result(self, timeout: float | None = None) -> FileRecord:
        """The record of the part, for `commit`. Raises SaveError, or TimeoutError after `timeout` seconds."""
        return self._future.result(timeout)

    def close(self, *, saved: bool) -> None:
        """Close the cuts, once the task has ended; in the thread of the tables. `saved`: the save was
        committed, so that the next delta begins here.
        """
        close_cuts(self._cuts, saved=saved)

    def _run(self, blob: bytes | None) -> FileRecord:
        record = write_part(self._folder, self.order, self._cuts, blob, self._watch)
        if self._then is not None:
            try:
                self._then(record)
            except OSError as error:
                raise save_error(error, self._folder.where, self._folder.free()) from error
        return record

    def _watch(self, walked: int, packed: int) -> None:
        if self._cancelled.is_set():
            raise CancelledError(f"the save to {self._folder.path(self.order.id)} was given up and removed")
        self._progress = Progress(walked, self._progress.slots, packed)
