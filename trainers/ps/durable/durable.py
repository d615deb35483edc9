"""The durable directory, from which a restarted server recovers its state. `journal` handles the bytes of the
write-ahead log.

A server's state is its newest complete snapshot and the log records after it. A crash is possible anywhere
between these steps:

    rotate      a new log file starts with record N; state = former snapshot + all records
    cut         the tables and the service's blob, of the same moment
    write       the snapshot's files, in the background          (a crash leaves an unfinished directory)
    manifest    snapshot N counts; state = snapshot N + records from N on
    remove      log files and snapshots before N                 (a crash leaves some, which are ignored)

A snapshot is full or incremental. An incremental snapshot has the changes since the snapshot before, and is
in the directory of the last full snapshot. The first snapshot of a process is full. If the incremental
snapshots have as many bytes as the last full snapshot, the next snapshot is full too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from fleetrun.aliases import Callback
from fleetrun.frozen import frozen
from trainers.errors import UsageError
from trainers.ps.durable import journal
from trainers.ps.durable.journal import DamagedError, DurabilityError, FolderError, Fsync, Journal
from trainers.ps.kernels.rows import NOT_IN_SNAPSHOT
from trainers.ps.saves.manifest import MANIFEST, SaveMode, commit_save, new_id
from trainers.ps.saves.read import OpenFolder, RowOwner, load_tables, open_saves, read_file
from trainers.ps.saves.write import SHARD_BYTES, SaveSpec, SaveTask, TableCut, Target, close_cuts, cut_tables
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import TableSpec
from trainers.storage.errors import LoadError, SaveError
from trainers.storage.folder import Buffer, Where, sync_folder, write_file
from trainers.storage.manifest import FileRecord

# ---- Ownership: a directory belongs to one server of one job, and to one process at a time.

OWNER_VERSION = 5
_LOCK = "lock"
_OWNER = "owner.json"


@frozen
class Owner:
    """The owner of a directory. `job` describes the job. It is the same for all processes of a job's servers,
    and differs between jobs. It excludes the number of trainers, which may change. `journal` is true if a
    write-ahead log exists besides snapshots.
    """

    job: str
    server: int
    journal: bool


def lock_folder(folder: Path) -> int:
    """Lock the directory for this process. Return the descriptor of the lock, which must be closed at the
    end. The kernel releases the lock when the process ends in any way. Raises DurabilityError if another
    process holds the lock.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise DurabilityError(
            f"Another process uses {folder}, and two servers cannot share it. Stop that server, or set "
            "another durability_dir for this job."
        ) from error
    return descriptor


def claim_folder(folder: Path, owner: Owner) -> None:
    """Record the owner of the directory, or check it. Raises DurabilityError for another owner."""
    path = folder / _OWNER
    if not path.exists():
        content = json.dumps({"version": OWNER_VERSION, **asdict(owner)}, indent=1).encode()
        write_file(path, [content])
        return
    found = _read_owner(path)
    if found != owner:
        raise FolderError(
            f"{folder} belongs to {_describe_owner(found)}, but this is {_describe_owner(owner)}. Choose "
            "another durability_dir, or remove that directory if you no longer need its state."
        )


def _read_owner(path: Path) -> Owner:
    try:
        body = json.loads(path.read_bytes())
        version = body.pop("version")
        if version == OWNER_VERSION:
            return Owner(**body)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(
            f"{path} is damaged: {error}. Choose another durability_dir, or remove {path.parent}."
        ) from error
    raise FolderError(
        f"{path.parent} was written by another version of fleetrun (format {version}, this one has "
        f"{OWNER_VERSION}). Continue with that version, or choose another durability_dir."
    )


def _describe_owner(owner: Owner) -> str:
    content = "snapshots and a write-ahead log" if owner.journal else "snapshots only"
    return f"server {owner.server} of the job {owner.job!r} with {content}"


# ---- Snapshots: a server's whole state at one moment.

_SNAPSHOT_PREFIX = "snapshot-"
_SOLE_OWNER = RowOwner(0, 1)


@frozen
class Snapshot:
    """A complete snapshot, with the snapshots that it follows. `number` is the first log record after it.
    `blob` is the service's own state.
    """

    number: int
    blob: bytes
    _opened: OpenFolder

    @property
    def specs(self) -> Mapping[str, TableSpec]:
        """The specs of all tables by name."""
        return self._opened.specs()

    def load(self, tables: Sequence[Target]) -> None:
        """Load everything into empty tables of the snapshot's specs. Raises DamagedError."""
        try:
            load_tables(self._opened, tables, _SOLE_OWNER)
            self._opened.check_alive(
                {each.spec.name: each.alive for each in tables if isinstance(each, SparseTable)}
            )
        except LoadError as error:
            raise DamagedError(_damaged_snapshot(error)) from error


def newest_snapshot(folder: Path) -> Snapshot | None:
    """Return the last complete snapshot, or None if none is complete. Raises DamagedError if its files have
    changed since they were written.
    """
    complete = [number for number, path in _snapshot_paths(folder) if (path / MANIFEST).exists()]
    if not complete:
        return None
    try:
        opened = open_saves(_snapshot_path(folder, complete[-1]))
        save = opened.saves[-1]
        blob = save.parts[0].blob
        content = b"" if blob is None else read_file(opened.folder, save.id, blob).numpy().tobytes()
    except LoadError as error:
        raise DamagedError(_damaged_snapshot(error)) from error
    (number,) = _NUMBER.unpack_from(content)
    return Snapshot(number, content[_NUMBER.size :], opened)


_NUMBER = struct.Struct("<Q")
"""The number of a snapshot, before the service's blob."""


@frozen
class Chain:
    """A full snapshot of these tables, and the incremental snapshots that follow it. `number` belongs to the
    full snapshot, and `last` is the id of the last one. `whole` and `changes` are the bytes of the full
    snapshot and of the incremental ones.
    """

    number: int
    last: str
    tables: Sequence[SparseTable | DenseTable]
    whole: int = 0
    changes: int = 0

    def longer(self, size: int) -> Chain:
        """Return the chain with the bytes of its last snapshot added."""
        return replace(self, changes=self.changes + size) if self.whole else replace(self, whole=size)

    def may_be_followed(self, tables: Sequence[SparseTable | DenseTable]) -> bool:
        """Return True if the next snapshot of these tables may be incremental."""
        if self.changes >= self.whole or list(map(id, self.tables)) != list(map(id, tables)):
            return False
        sparse = (table for table in tables if isinstance(table, SparseTable))
        return all(table.reports_removed(NOT_IN_SNAPSHOT) for table in sparse)


def start_snapshot(
    folder: Path,
    number: int,
    step: int,
    cuts: Sequence[TableCut],
    blob: bytes,
    *,
    after: Chain | None,
    then: Callback,
    done: Callable[[SaveTask], None] | None,
    shard_bytes: int,
) -> SaveTask:
    """Write a snapshot of the state before log record `number` in the background. It is full, or has the
    changes `after` other snapshots. When it is valid, `then` is called in the writing thread.
    """
    where = _snapshot_path(folder, number if after is None else after.number)
    where.mkdir(mode=0o700, exist_ok=True)
    mode, last = (SaveMode.ALL, None) if after is None else (SaveMode.DELTA, after.last)
    spec = SaveSpec(id=new_id(step), mode=mode, server=0, servers=1, shard_bytes=shard_bytes)

    def finish(part: FileRecord) -> None:
        if not commit_save(where, spec.id, mode, step, [part], after=last):
            raise SaveError(f"{where} may not survive a power failure, so the older state stays")
        sync_folder(folder)  # before the removal of older snapshots: this one must survive a power failure
        then()

    return SaveTask(where, spec, cuts, blob=_NUMBER.pack(number) + blob, then=finish, done=done)


def remove_snapshots_before(folder: Path, number: int) -> None:
    """Remove the snapshots before snapshot `number`. Raises OSError."""
    for found, path in _snapshot_paths(folder):
        if found < number:
            # The manifest first. Otherwise the rest of an interrupted removal could pass for a snapshot.
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)


def _snapshot_path(folder: Path, number: int) -> Path:
    return folder / f"{_SNAPSHOT_PREFIX}{number:020d}"


def _snapshot_paths(folder: Path) -> list[tuple[int, Path]]:
    found = [(path.name.removeprefix(_SNAPSHOT_PREFIX), path) for path in folder.glob(f"{_SNAPSHOT_PREFIX}*")]
    return sorted((int(digits), path) for digits, path in found if digits.isdigit())


def _damaged_snapshot(error: LoadError) -> str:
    return (
        f"The snapshot cannot be used: {error} Or remove the directory, and start over from the last saved "
        "tables."
    )


class DurableFolder:
    """One server's durable directory, `where`/server-INDEX, held by this process until `close`.

    First use `snapshot`, then read all `records()`, then append. If `fsync` is None, snapshots are kept
    without a write-ahead log. Raises DurabilityError if the directory is damaged, or belongs to another
    process or job.
    """

    def __init__(self, where: Where, *, job: str, server: int, fsync: Fsync | None) -> None:
        if "://" in os.fspath(where):
            raise UsageError(f"durability_dir is {os.fspath(where)!r}; it must be a directory of this node")
        self._folder = Path(where) / f"server-{server}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock_folder(self._folder)
        except OSError as error:
            raise DurabilityError(f"The durable directory {self._folder} cannot be used: {error}") from error
        self._journal: Journal | None = None
        self._task: SaveTask | None = None
        self._chain: Chain | None = None  # set here, because only this process has the changes since
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(self.close)
                claim_folder(self._folder, Owner(job, server, journal=fsync is not None))
                # Remove unfinished snapshots that crashes have left.
                for _, path in _snapshot_paths(self._folder):
                    if not (path / MANIFEST).exists():
                        shutil.rmtree(path)
                self.snapshot = newest_snapshot(self._folder)
                self._number = 0 if self.snapshot is None else self.snapshot.number
                if fsync is not None:
                    self._journal = Journal(self._folder, fsync)
                undo.pop_all()
        except OSError as error:
            raise DurabilityError(f"The durable directory {self._folder} cannot be used: {error}") from error

    def records(self) -> Iterator[list[memoryview]]:
        """Yield the frames of every record after the snapshot, in order, in writable buffers of their own.
        Read to the end before the first append. Raises DamagedError.
        """
        if self._journal is not None:
            yield from journal.recover_records(self._folder, self._number, self._journal)

    def append(self, frames: Sequence[Buffer]) -> None:
        """Append one record. When this returns, the request may be acknowledged. Without a write-ahead log,
        do nothing. Raises JournalFullError if the record was not appended and later records may be. Raises
        another DurabilityError if nothing can be appended any more.
        """
        if self._journal is not None:
            self._journal.append(frames)

    def begin_snapshot(
        self,
        step: int,
        tables: Iterable[SparseTable | DenseTable],
        blob: bytes,
        *,
        done: Callable[[SaveTask], None] | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> SaveTask:
        """Take a snapshot of the current state in the background. `blob` is the service's own state. Call it
        in the thread of the tables, between two requests. `done` is called in another thread at the end, to
        wake the server, which calls `end_snapshot`.

        A failed snapshot loses nothing, because the former snapshot and the write-ahead log remain. Raises
        UsageError before the last snapshot was ended, and TableError while the tables are being saved. Raises
        DurabilityError or JournalFullError if the write-ahead log cannot continue in a new file.
        """
        if self._task is not None:
            raise UsageError("A snapshot is already being written. Call end_snapshot() first.")
        tables = list(tables)
        chain = self._chain
        if chain is not None and not chain.may_be_followed(tables):
            chain = None
        cuts = cut_tables(tables, SaveMode.ALL if chain is None else SaveMode.DELTA, of=NOT_IN_SNAPSHOT)
        with contextlib.ExitStack() as undo:
            undo.callback(close_cuts, cuts, saved=False)
            number = self._number + 1 if self._journal is None else self._journal.rotate()
            base = number if chain is None else chain.number
            self._task = start_snapshot(
                self._folder,
                number,
                step,
                cuts,
                blob,
                after=chain,
                then=lambda: self._remove_before(number, base),
                done=done,
                shard_bytes=shard_bytes,
            )
            undo.pop_all()
        self._number, id_ = number, self._task.spec.id
        self._chain = Chain(number, id_, tables) if chain is None else replace(chain, last=id_)
        return self._task

    @property
    def log_bytes(self) -> int:
        """The bytes of all files of the write-ahead log. Replaced files may be removed meanwhile."""
        size = 0
        for _, path in journal.journal_files(self._folder):
            with suppress(OSError):
                size += path.stat().st_size
        return size

    @property
    def snapshotting(self) -> bool:
        """True from the start to the end of a snapshot."""
        return self._task is not None

    def end_snapshot(self) -> SaveTask | None:
        """End the snapshot that has finished since the last call, and return it for its `result`. Return None
        if none has finished. Call it regularly in the thread of the tables. Until then, the tables keep the
        data that the snapshot reads.
        """
        task = self._task
        if task is None or not task.ended:
            return None
        chain, self._task, self._chain = self._chain, None, None
        if chain is not None and task.succeeded:
            self._chain = chain.longer(task.packed)
        task.close(saved=task.succeeded)
        return task

    def close(self) -> None:
        """Abandon a running snapshot, make the write-ahead log durable (except with `no`), and release the
        directory. Raises DurabilityError if the last records could not be made durable.
        """
        try:
            self._abandon_snapshot()
            if self._journal is not None:
                self._journal.close()
        finally:
            os.close(self._lock)

    def discard(self) -> None:
        """Close, and remove everything, because the job has ended. Raises DurabilityError if the removal
        fails.
        """
        doomed = self._folder.with_name(f".{self._folder.name}.{secrets.token_hex(4)}")
        self._abandon_snapshot()  # before the rename, because its thread would create the directory again
        try:
            # Renamed first, because a half-removed directory would look like a damaged one.
            self._folder.rename(doomed)
            self.close()
            shutil.rmtree(doomed)
        except OSError as error:
            raise DurabilityError(f"{self._folder} cannot be removed: {error}") from error

    def _abandon_snapshot(self) -> None:
        """End a running snapshot."""
        if self._task is not None:
            self._task.cancel()
            self._task.wait()
            self.end_snapshot()

    def _remove_before(self, number: int, base: int) -> None:
        """Remove the files that snapshot `number`, which follows the full snapshot `base`, makes unnecessary.
        Recovery ignores files that cannot be removed now, and the next snapshot tries again.
        """
        with suppress(OSError):
            if self._journal is not None:
                self._journal.remove_before(number)
            remove_snapshots_before(self._folder, base)
