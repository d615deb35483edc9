"""Durable: the folder from which a server comes back as it was. Knows the order of journal, snapshot and
removal; leaves their bytes to `journal`, `snapshots` and `recovery`.

A server's state is its newest complete snapshot and the journal records after it. Step by step, with a
crash possible anywhere between:

    rotate      a new journal file begins with record N; state = former snapshot + all records
    cut         the tables and the service's blob, of the same moment
    write       the snapshot's files, in the background          (a crash leaves an unfinished folder)
    manifest    snapshot N counts; state = snapshot N + records from N on
    remove      journal files and snapshots before N             (a crash leaves some, which nobody reads)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from trainers.errors import UsageError
from trainers.ps.durable import owner, recovery, snapshots
from trainers.ps.durable.errors import DurabilityError
from trainers.ps.durable.journal import Journal
from trainers.ps.durable.syncing import Fsync
from trainers.ps.saved.descriptors import Buffer
from trainers.ps.saved.modes import SaveMode
from trainers.ps.saved.source import close_cuts, cut_tables
from trainers.ps.saved.task import SaveTask
from trainers.ps.saved.writing import SHARD_BYTES
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.sparse import SparseTable


class Durable:
    """One server's durable folder, `where`/server-INDEX, held by this process until `close`.

    First look at `snapshot`, then take all `records()`, then append. `fsync`: None for snapshots without a
    journal. Raises DurabilityError when another process or job has the folder, or it is damaged.
    """

    def __init__(self, where: str | os.PathLike[str], *, job: str, server: int, fsync: Fsync | None) -> None:
        if "://" in os.fspath(where):
            raise UsageError(f"durability_dir is {os.fspath(where)!r}; it must be a folder of this machine")
        self._folder = Path(where) / f"server-{server}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = owner.lock(self._folder)
        except OSError as error:
            raise DurabilityError(f"the durable folder {self._folder} cannot be used: {error}") from error
        self._journal: Journal | None = None
        self._task: SaveTask | None = None
        try:
            with contextlib.ExitStack() as half:
                half.callback(self.close)
                owner.claim(self._folder, owner.Owner(job, server, journal=fsync is not None))
                snapshots.remove_unfinished(self._folder)
                self.snapshot = snapshots.newest(self._folder)
                self._number = 0 if self.snapshot is None else self.snapshot.number
                if fsync is not None:
                    self._journal = Journal(self._folder, fsync)
                half.pop_all()
        except OSError as error:
            raise DurabilityError(f"the durable folder {self._folder} cannot be used: {error}") from error

    def records(self) -> Iterator[list[memoryview]]:
        """The frames of every record after the snapshot, in order; each a buffer of its own, writable. To be
        taken to the end before the first append. Raises DamagedError.
        """
        if self._journal is not None:
            yield from recovery.recover(self._folder, self._number, self._journal)

    def append(self, frames: Sequence[Buffer]) -> None:
        """Keep one record; when this has returned, the request may be acknowledged. Does nothing without a
        journal. Raises JournalFullError (the record is not in, later ones may be) or another
        DurabilityError (nothing can be appended any more).
        """
        if self._journal is not None:
            self._journal.append(frames)

    def write(self, frames: Sequence[Buffer]) -> None:
        """As `append`, but several may share one `settle` before any of them is acknowledged."""
        if self._journal is not None:
            self._journal.write(frames)

    def settle(self) -> None:
        """Make what was written durable, if the fsync policy asks for it at once."""
        if self._journal is not None:
            self._journal.settle()

    def begin_snapshot(
        self,
        step: int,
        tables: Iterable[SparseTable | DenseTable],
        blob: bytes,
        *,
        done: Callable[[SaveTask], None] | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> SaveTask:
        """Snapshot the state as of now, in the background; `blob` is the service's own. To be called in the
        thread of the tables, between two requests. `done` is called in another thread at the end: to wake
        up the server, which calls `end_snapshot`.

        A snapshot that fails leaves the former one and the journal: nothing is lost. Raises UsageError
        before the last one was ended, TableError while the tables are being saved, DurabilityError or
        JournalFullError when the journal cannot go on in a new file.
        """
        if self._task is not None:
            raise UsageError("a snapshot is being written; begin the next one after end_snapshot()")
        cuts = cut_tables(tables, SaveMode.ALL, snapshot=True)
        with contextlib.ExitStack() as half:
            half.callback(close_cuts, cuts, saved=False)
            number = self._number + 1 if self._journal is None else self._journal.rotate()
            self._task = snapshots.begin(
                self._folder,
                number,
                step,
                cuts,
                blob,
                then=lambda: self._remove_before(number),
                done=done,
                shard_bytes=shard_bytes,
            )
            half.pop_all()
        self._number = number
        return self._task

    @property
    def snapshotting(self) -> bool:
        """Whether a snapshot was begun and not ended yet."""
        return self._task is not None

    def end_snapshot(self) -> SaveTask | None:
        """The snapshot that has ended since the last call, if any, for its `result`. To be called now and
        then in the thread of the tables: until then they keep what the snapshot reads.
        """
        task = self._task
        if task is None or not task.ended:
            return None
        self._task = None
        task.close(saved=False)
        return task

    def close(self) -> None:
        """Give up a snapshot under way, make the journal durable (but for `no`) and let the folder go.
        Raises DurabilityError when the last records could not be made durable.
        """
        try:
            self._give_up()
            if self._journal is not None:
                self._journal.close()
        finally:
            os.close(self._lock)

    def discard(self) -> None:
        """Close, and remove everything: the job is over. Raises DurabilityError when that cannot be done."""
        gone = self._folder.with_name(f".{self._folder.name}.{secrets.token_hex(4)}")
        self._give_up()  # before the folder has another name: its thread would make this one again
        try:
            # At once and under another name: half of it would look like a damaged folder.
            self._folder.rename(gone)
            self.close()
            shutil.rmtree(gone)
        except OSError as error:
            raise DurabilityError(f"{self._folder} cannot be removed: {error}") from error

    def _give_up(self) -> None:
        """End a snapshot under way."""
        if self._task is not None:
            self._task.cancel()
            self._task.wait()
            self.end_snapshot()

    def _remove_before(self, number: int) -> None:
        """What the snapshot of this number has made superfluous. What cannot be removed now is left: nobody
        reads it, and the next snapshot tries again.
        """
        with contextlib.suppress(OSError):
            if self._journal is not None:
                self._journal.remove_before(number)
            snapshots.remove_before(self._folder, number)
