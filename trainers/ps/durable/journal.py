"""The write-ahead log of acknowledged requests: files of numbered records. The module makes records durable
and reads them after a crash. The server defines the meaning of a record.

A log file, with little-endian integers:

    8s  "FLTJRNL1"      Q number of its first record      Q salt, random      Q xxh3-64 of the 24 bytes before

and then records, without gaps:

    8s  mark            Q number      Q bytes after this head     Q frames     Q xxh3-64 of those bytes
    Q   xxh3-64 of the 40 bytes before
    Q   length of each frame
    the frames
"""

from __future__ import annotations

import itertools
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import xxhash

from fleetrun.frozen import frozen
from trainers.errors import FleetError
from trainers.process.log import glog
from trainers.storage.errors import NO_SPACE
from trainers.storage.folder import Buffer, write_all, write_file


class DurabilityError(FleetError):
    """The state cannot be made durable or recovered. The server must not acknowledge any more requests."""


class JournalFullError(DurabilityError):
    """The disk is too full for this record. The write-ahead log has no part of the record. The server may
    refuse the request and continue, and the next append may succeed.
    """


class FolderError(DurabilityError):
    """This server cannot use the content of the directory."""

    restart_helps = False


class DamagedError(FolderError):
    """A file of the directory is damaged or missing."""


# ---- The bytes of a record.
#
# The salt seeds every checksum, so that bytes inside a frame cannot pass for a record. The head has its own
# checksum, because a damaged length would otherwise look like a crash. If a record has a sound head and ends
# after the file does, a crash cut the record off.

MAGIC = b"FLTJRNL1"
MARK = b"\xf1record\n"
_FILE = struct.Struct("<8sQQ")
_HEAD = struct.Struct("<8sQQQQ")
_SUM = struct.Struct("<Q")
FILE_HEAD = _FILE.size + _SUM.size
RECORD_HEAD = _HEAD.size + _SUM.size
_SEARCH = 1 << 20


class BadRecordError(ValueError):
    """The bytes are not the expected record."""


@frozen
class Record:
    """A record. `end` is the offset in the file after it. The frames are writable views of one buffer of
    their own.
    """

    number: int
    frames: list[memoryview]
    end: int


def file_head(first: int, salt: int) -> bytes:
    head = _FILE.pack(MAGIC, first, salt)
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def read_file_head(content: bytes) -> tuple[int, int]:
    """Return (number of the first record, salt). Raises BadRecordError."""
    if len(content) < FILE_HEAD:
        raise BadRecordError(
            f"{len(content)} bytes are too few for the head of a file of the write-ahead log"
        )
    magic, first, salt = _FILE.unpack_from(content)
    (checksum,) = _SUM.unpack_from(content, _FILE.size)
    if magic != MAGIC:
        raise BadRecordError("the file is not a write-ahead log of this version of fleetrun")
    if checksum != xxhash.xxh3_64_intdigest(content[: _FILE.size]):
        raise BadRecordError("the head has a wrong checksum")
    return first, salt


def encode_record(number: int, salt: int, frames: Sequence[Buffer]) -> list[Buffer]:
    """Return a record as pieces to be written together. The frames are not copied."""
    views = [memoryview(frame).cast("B") for frame in frames]
    lengths = struct.pack(f"<{len(views)}Q", *map(len, views))
    digest = xxhash.xxh3_64(lengths, seed=salt)
    for view in views:
        digest.update(view)
    size = len(lengths) + sum(map(len, views))
    head = _HEAD.pack(MARK, number, size, len(views), digest.intdigest())
    return [head + _SUM.pack(xxhash.xxh3_64_intdigest(head, seed=salt)) + lengths, *views]


def read_record(file: BinaryIO, offset: int, room: int, number: int, salt: int) -> Record:
    """Read the record at the file's position, which is `offset`. `room` bytes remain. Raises BadRecordError
    unless the bytes are the complete record `number`.
    """
    head = file.read(RECORD_HEAD)
    found = _valid_head(head, salt)
    if found is None:
        raise BadRecordError(
            "the head of a record is damaged"
            if len(head) == RECORD_HEAD
            else "the head of a record is cut off"
        )
    size, count, checksum = found[1:]
    if found[0] != number:
        raise BadRecordError(f"the record has number {found[0]} instead of {number}")
    if size > room - RECORD_HEAD:
        raise BadRecordError(f"record {number} is cut off")
    body = bytearray(size)
    file.readinto(body)  # type: ignore[attr-defined]  # every binary file of `open` has it
    if xxhash.xxh3_64_intdigest(body, seed=salt) != checksum or 8 * count > size:
        raise BadRecordError(f"record {number} has a wrong checksum")
    frames, start = [], 8 * count
    for length in struct.unpack_from(f"<{count}Q", body):
        frames.append(memoryview(body)[start : start + length])
        start += length
    return Record(number, frames, offset + RECORD_HEAD + size)


def later_record(file: BinaryIO, offset: int, number: int, salt: int) -> int | None:
    """Return the offset of a valid head of record `number` or a later one, anywhere after `offset`. Return
    None if the file has no such head.
    """
    position = offset
    while True:
        file.seek(position)
        block = file.read(_SEARCH)
        at = block.find(MARK)
        while at >= 0:
            file.seek(position + at)
            found = _valid_head(file.read(RECORD_HEAD), salt)
            if found is not None and found[0] >= number and position + at > offset:
                return position + at
            at = block.find(MARK, at + 1)
        if len(block) < _SEARCH:
            return None
        position += len(block) - len(MARK) + 1


def _valid_head(head: bytes, salt: int) -> tuple[int, int, int, int] | None:
    """Return (number, size, frames, checksum) of a complete head with a correct checksum, or None."""
    if len(head) < RECORD_HEAD or not head.startswith(MARK):
        return None
    if _SUM.unpack_from(head, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(head[: _HEAD.size], seed=salt):
        return None
    _, number, size, count, checksum = _HEAD.unpack_from(head)
    return number, size, count, checksum


Fsync = Literal["no", "everysec", "always"]
"""The loss that a power failure may cause. `no` loses the data that the kernel had not written by itself
(about half a minute). The kernel writes in any order, so the directory may be damaged. `everysec` loses about
the last second, and `always` loses nothing. The end of the process, even by SIGKILL, loses nothing, because
written data is in the kernel.
"""

_EVERY_S = 1.0
_LATE_S = 5.0
"""With `everysec`, a write waits while older writes have not reached the disk for so many seconds."""


class JournalSync:
    """Makes the writes to one descriptor durable, by the policy.

    A failed fdatasync is final. The kernel reports the failure once, marks the pages clean and may drop them.
    A second call would then succeed although the data is lost (known as fsyncgate). After a failure, every
    call raises DurabilityError.
    """

    def __init__(self, policy: Fsync, where: str) -> None:
        self.policy = policy
        self._where = where
        self._failure: OSError | None = None
        self._descriptor = -1
        self._since: float | None = None
        """The time of the first write after the last sync began."""
        self._syncing: float | None = None
        """The time of the first write that the running sync covers."""
        self._ended = False
        self._change = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if policy == "everysec":
            self._thread = threading.Thread(target=self._run, name="journal fsync", daemon=True)
            self._thread.start()

    def switch_to(self, descriptor: int) -> None:
        """Sync this descriptor from now on, after a last sync of the former one (except with `no`). Only the
        last file of a directory may have a torn tail. Raises DurabilityError.
        """
        if self._descriptor >= 0 and self.policy != "no":
            self.sync()
        with self._change:
            self._descriptor = descriptor

    def written(self) -> None:
        """Note a write to the descriptor."""
        with self._change:
            if self._since is None:
                self._since = time.monotonic()
            self._change.notify_all()

    def check(self) -> None:
        """Raise DurabilityError if an fdatasync has failed, here or in the background. If the disk is late,
        wait for it, because a power failure must not lose more than the policy says.
        """
        if self._thread is not None:
            if not self._thread.is_alive() and self._failure is None:
                raise DurabilityError(
                    f"Nothing makes writes to {self._where} durable any more, because the thread for it has "
                    "ended. This server stops. Report this with its log, and restart the server."
                )
            if self._late:
                glog(f"WARNING: {self._where} waits for its disk, which has not written for {_LATE_S:g} s.")
                with self._change:
                    self._change.wait_for(lambda: self._failure or not self._late)
        if self._failure is not None:
            raise DurabilityError(
                f"Writes to {self._where} could not be made durable: {self._failure}. Acknowledged pushes "
                "may be lost on that disk, so this server stops. Check the disk, and restart the server."
            )

    @property
    def _late(self) -> bool:
        oldest = self._syncing or self._since
        return oldest is not None and time.monotonic() - oldest > _LATE_S

    def sync(self) -> None:
        """Call fdatasync now, with any policy. Raises DurabilityError."""
        self.check()
        with self._change:
            self._since = None
        self._sync(self._descriptor)
        self.check()

    def close(self) -> None:
        """End the thread. The caller makes the last sync."""
        with self._change:
            self._ended = True
            self._change.notify_all()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._since is not None or self._ended)
                if self._ended:
                    return
                # A duplicate, because `switch_to` may change the file, and its owner may close it, during the
                # sync.
                try:
                    descriptor = os.dup(self._descriptor)
                except OSError:  # too many open files, so the next attempt may succeed
                    descriptor = -1
                else:
                    self._syncing, self._since = self._since, None
            if descriptor >= 0:
                try:
                    self._sync(descriptor)
                finally:
                    os.close(descriptor)
                with self._change:
                    self._syncing = None
                    self._change.notify_all()
            if self._failure is not None or self._stop.wait(_EVERY_S):
                return

    def _sync(self, descriptor: int) -> None:
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            self._failure = error


_PREFIX, _SUFFIX = "journal-", ".log"


def journal_path(folder: Path, first: int) -> Path:
    """Return the file whose first record is number `first`."""
    return folder / f"{_PREFIX}{first:020d}{_SUFFIX}"


def journal_files(folder: Path) -> list[tuple[int, Path]]:
    """Return (number of the first record, path) of each file, ascending."""
    found = []
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        digits = path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if digits.isdigit():
            found.append((int(digits), path))
    return sorted(found)


class Journal:
    """Appends to the last file of a directory. `number` is the number of the next record.

    Only one thread may use it, besides the thread that syncs. After a DurabilityError other than
    JournalFullError, nothing can be appended any more.
    """

    def __init__(self, folder: Path, fsync: Fsync) -> None:
        self._folder = folder
        self._sync = JournalSync(fsync, str(folder))
        self._descriptor = -1
        self._path = folder
        self._salt = self._end = self.number = 0
        self._broken: str | None = None

    def start(self, first: int) -> None:
        """Continue in a new file, whose first record is number `first`."""
        salt = secrets.randbits(63)
        path = journal_path(self._folder, first)
        try:
            # Atomic, so that recovery never finds half a head.
            write_file(path, [file_head(first, salt)])
            self._switch_to(path, salt, FILE_HEAD, first)
        except OSError as error:
            kind = JournalFullError if error.errno in NO_SPACE else DurabilityError
            raise kind(f"The write-ahead log {path} cannot be created: {error}") from error

    def resume(self, path: Path, salt: int, end: int, number: int) -> None:
        """Continue in a file after `end` valid bytes, with record `number`. Cut off the rest of the file, and
        make it durable: a killed process may have left records that are not on the disk.
        """
        try:
            self._switch_to(path, salt, end, number)
            if os.fstat(self._descriptor).st_size != end:
                os.ftruncate(self._descriptor, end)
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise DurabilityError(f"The write-ahead log {path} cannot be continued: {error}") from error

    def append(self, frames: Sequence[Buffer]) -> int:
        """Write one record, make it durable with `always`, and return its number. When this returns, the
        request may be acknowledged. Raises JournalFullError or DurabilityError. The record was not appended
        then.
        """
        self._require_usable()
        record = encode_record(self.number, self._salt, frames)
        try:
            self._end += write_all(self._descriptor, record)
        except OSError as error:
            self._cut_off(error)
            kind = JournalFullError if error.errno in NO_SPACE else DurabilityError
            raise kind(
                f"Record {self.number} cannot be written to {self._path}: {error.strerror}. The request was "
                "refused. Free some space on that disk."
            ) from error
        self._sync.written()
        self.number += 1
        if self._sync.policy == "always":
            self._sync.sync()
        return self.number - 1

    def rotate(self) -> int:
        """Continue in a new file, and return the number of its first record. After a snapshot of the current
        state, the former files are unnecessary.
        """
        self._require_usable()
        if self._end > FILE_HEAD:
            self.start(self.number)
        return self.number

    def remove_before(self, number: int) -> None:
        """Remove the files whose records are all before `number`. Raises OSError."""
        files = journal_files(self._folder)
        for (_, path), (following, _) in itertools.pairwise(files):
            if following <= number:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Make everything durable (except with `no`) and close. Raises DurabilityError."""
        try:
            if self._descriptor >= 0 and self._sync.policy != "no":
                self._sync.sync()
        finally:
            self._sync.close()
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _require_usable(self) -> None:
        if self._descriptor < 0:
            raise DurabilityError(
                f"Nothing can be appended to {self._folder} before all its records are read."
            )
        if self._broken is not None:
            raise DurabilityError(self._broken)
        self._sync.check()

    def _switch_to(self, path: Path, salt: int, end: int, number: int) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        former = self._descriptor
        self._sync.switch_to(descriptor)  # syncs the former file, because only the last may have a torn tail
        if former >= 0:
            os.close(former)
        self._descriptor, self._path, self._salt, self._end, self.number = descriptor, path, salt, end, number

    def _cut_off(self, error: OSError) -> None:
        """Remove the written bytes of a record. Otherwise the next record would follow half a record, and
        recovery would stop before it.
        """
        try:
            os.ftruncate(self._descriptor, self._end)
        except OSError as second:
            self._broken = f"{self._path} ends in half a record ({error}), which cannot be removed: {second}"
            raise DurabilityError(self._broken) from second


# ---- Recovery.


def recover_records(folder: Path, start: int, journal: Journal) -> Iterator[list[memoryview]]:
    """Yield the frames of every record from number `start` on. When all were read, `journal` continues after
    them.

    If a crash cut off a record at the end of the last file, the record is removed. Such a record was not
    acknowledged, or was lost in a power failure (with `no` and `everysec`). Raises DamagedError and changes
    no file for anything else, such as a missing file, or a damaged record before others.
    """
    files = journal_files(folder)
    while len(files) > 1 and files[1][0] <= start:
        del files[0]  # unnecessary since the snapshot, because a crash came before their removal
    if not files and not start:
        journal.start(0)
        return
    if not files or files[0][0] > start:
        raise DamagedError(_missing(journal_path(folder, start)))
    number = files[0][0]
    for position, (first, path) in enumerate(files):
        if position and first <= number and _is_empty(path):
            continue  # a failed rotation may have left it, and the file before it may have been continued
        if first != number:
            raise DamagedError(_missing(journal_path(folder, number)))
        reader = _FileReader(path, first, last=all(_is_empty(later) for _, later in files[position + 1 :]))
        for record in reader.records():
            if record.number >= start:
                yield record.frames
        number, active = reader.number, path
    journal.resume(active, reader.salt, reader.end, number)


def _is_empty(path: Path) -> bool:
    """Return True if the file has no record after the head."""
    return path.stat().st_size <= FILE_HEAD


class _FileReader:
    """Reads one file. Afterwards, `end` is the offset after its last valid record, and `number` the next
    record.
    """

    def __init__(self, path: Path, first: int, *, last: bool) -> None:
        self._path = path
        self._last = last
        self.number = first
        self.end = FILE_HEAD
        self.salt = 0

    def records(self) -> Iterator[Record]:
        try:
            with self._path.open("rb", buffering=1 << 20) as file:
                yield from self._records(file)
        except OSError as error:
            raise DurabilityError(f"The write-ahead log {self._path} cannot be read: {error}") from error

    def _records(self, file: BinaryIO) -> Iterator[Record]:
        size = os.fstat(file.fileno()).st_size
        try:
            first, self.salt = read_file_head(file.read(FILE_HEAD))
        except BadRecordError as error:
            raise DamagedError(_damaged(self._path, 0, str(error))) from error
        if first != self.number:
            raise DamagedError(
                _damaged(self._path, 0, f"its first record is {first} instead of {self.number}")
            )
        while self.end < size:
            try:
                record = read_record(file, self.end, size - self.end, self.number, self.salt)
            except BadRecordError as error:
                self._stop(file, error)
                return
            self.end = record.end
            self.number += 1
            yield record

    def _stop(self, file: BinaryIO, error: BadRecordError) -> None:
        """End at an invalid record. Only the tail of the last file may be invalid."""
        later = later_record(file, self.end, self.number, self.salt)
        if later is not None:
            why = f"{error}, and a valid record follows at byte {later}"
            raise DamagedError(_damaged(self._path, self.end, why)) from error
        if not self._last:
            raise DamagedError(
                _damaged(self._path, self.end, f"{error}, and a later file follows")
            ) from error
        rest = os.fstat(file.fileno()).st_size - self.end
        glog(
            f"Dropped the last {rest} bytes of the write-ahead log {self._path}, cut short by a crash: "
            f"{error}"
        )


def _missing(path: Path) -> str:
    return (
        f"The write-ahead log {path} is missing, so acknowledged pushes are lost. Restore the file, or "
        "remove the whole directory to start over."
    )


def _damaged(path: Path, offset: int, why: str) -> str:
    return (
        f"The write-ahead log {path} is damaged at byte {offset}: {why}. Restore an intact copy, or remove "
        "the directory and start over from the last saved tables."
    )
