"""Journal: what a server acknowledged, in files of numbered records: their bytes, when they are safe from a
power failure, and how they are read back after a crash.

A journal file, integers little-endian:

    8s  "FLTJRNL1"      Q number of its first record      Q salt, random      Q xxh3-64 of the 24 bytes before

and then records, without gaps:

    8s  mark            Q number      Q bytes after this head     Q frames     Q xxh3-64 of those bytes
    Q   xxh3-64 of the 40 bytes before
    Q   length of each frame
    the frames

What a record means is the server's matter.
"""

from __future__ import annotations

import itertools
import os
import secrets
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import xxhash

from trainers.errors import FleetError
from trainers.storage.errors import NO_SPACE
from trainers.storage.folder import Buffer, write_all, write_file


class DurabilityError(FleetError):
    """What was asked cannot be made or found durable. The server must not go on acknowledging."""


class JournalFullError(DurabilityError):
    """No room for this record. Nothing of it is in the journal; the server may refuse the request and go
    on, and the next append may find room again.
    """


class DamagedError(DurabilityError):
    """A file of the folder is not as it was written."""


# ---- The bytes of a record.
#
# The salt seeds every checksum, so that bytes inside a frame cannot pass for a record. The head has its own
# checksum: a record with a sound head that ends after the file does was cut off by a crash, and a damaged
# length would otherwise look the same.

MAGIC = b"FLTJRNL1"
MARK = b"\xf1record\n"
_FILE = struct.Struct("<8sQQ")
_HEAD = struct.Struct("<8sQQQQ")
_SUM = struct.Struct("<Q")
FILE_HEAD = _FILE.size + _SUM.size
RECORD_HEAD = _HEAD.size + _SUM.size
_SEARCH = 1 << 20


class BadRecordError(ValueError):
    """The bytes from here on are not the record that should be here."""


@dataclass(frozen=True, slots=True)
class Record:
    """`end`: the offset in the file after it. The frames are views of one buffer of their own, writable."""

    number: int
    frames: list[memoryview]
    end: int


def file_head(first: int, salt: int) -> bytes:
    head = _FILE.pack(MAGIC, first, salt)
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def read_file_head(content: bytes) -> tuple[int, int]:
    """(number of the first record, salt). Raises BadRecordError."""
    if len(content) < FILE_HEAD:
        raise BadRecordError(f"{len(content)} bytes are no head of a journal file")
    magic, first, salt = _FILE.unpack_from(content)
    (checksum,) = _SUM.unpack_from(content, _FILE.size)
    if magic != MAGIC:
        raise BadRecordError("it is no journal of this version of fleetrun")
    if checksum != xxhash.xxh3_64_intdigest(content[: _FILE.size]):
        raise BadRecordError("the head has a wrong checksum")
    return first, salt


def encode_record(number: int, salt: int, frames: Sequence[Buffer]) -> list[Buffer]:
    """A record as pieces to be written in one go; the frames are not copied."""
    views = [memoryview(frame).cast("B") for frame in frames]
    lengths = struct.pack(f"<{len(views)}Q", *map(len, views))
    digest = xxhash.xxh3_64(lengths, seed=salt)
    for view in views:
        digest.update(view)
    size = len(lengths) + sum(map(len, views))
    head = _HEAD.pack(MARK, number, size, len(views), digest.intdigest())
    return [head + _SUM.pack(xxhash.xxh3_64_intdigest(head, seed=salt)) + lengths, *views]


def read_record(file: BinaryIO, offset: int, room: int, number: int, salt: int) -> Record:
    """The record at the file's position, which is `offset`; `room` bytes are left. Raises BadRecordError
    when it is not the whole record `number`.
    """
    head = file.read(RECORD_HEAD)
    found = _sound_head(head, salt)
    if found is None:
        raise BadRecordError(
            "the head of a record is damaged" if len(head) == RECORD_HEAD else "a head is cut off"
        )
    size, count, checksum = found[1:]
    if found[0] != number:
        raise BadRecordError(f"it is record {found[0]}, and {number} is due")
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
    """The offset of a sound head of record `number` or a later one, anywhere after `offset`; None without."""
    position = offset
    while True:
        file.seek(position)
        block = file.read(_SEARCH)
        at = block.find(MARK)
        while at >= 0:
            file.seek(position + at)
            found = _sound_head(file.read(RECORD_HEAD), salt)
            if found is not None and found[0] >= number and position + at > offset:
                return position + at
            at = block.find(MARK, at + 1)
        if len(block) < _SEARCH:
            return None
        position += len(block) - len(MARK) + 1


def _sound_head(head: bytes, salt: int) -> tuple[int, int, int, int] | None:
    """(number, size, frames, checksum) of a whole head with the right checksum."""
    if len(head) < RECORD_HEAD or not head.startswith(MARK):
        return None
    if _SUM.unpack_from(head, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(head[: _HEAD.size], seed=salt):
        return None
    _, number, size, count, checksum = _HEAD.unpack_from(head)
    return number, size, count, checksum


Fsync = Literal["no", "everysec", "always"]
"""What a power failure may take. `no`: what the kernel had not written by itself (half a minute, say), in any
order, so that the folder may be found damaged; `everysec`: about the last second; `always`: nothing. The end
of the process, SIGKILL included, takes nothing in any of them: what was written is in the kernel's hands.
"""

_EVERY_S = 1.0


class JournalSync:
    """Makes the writes to one descriptor durable as the policy says. A failed fdatasync is final: the kernel
    reports it once, marks the pages clean and may drop them, so that asking again would succeed although
    the data is lost (known as fsyncgate). Every later call raises DurabilityError.
    """

    def __init__(self, policy: Fsync, where: str) -> None:
        self.policy = policy
        self._where = where
        self._failure: OSError | None = None
        self._descriptor = -1
        self._dirty = False
        self._ended = False
        self._change = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if policy == "everysec":
            self._thread = threading.Thread(target=self._run, name="journal fsync", daemon=True)
            self._thread.start()

    def follow(self, descriptor: int) -> None:
        """From now on this descriptor, after a last sync of the former one (but for `no`): only the last file
        of a folder may have a torn tail. Raises DurabilityError.
        """
        if self._descriptor >= 0 and self.policy != "no":
            self.sync()
        with self._change:
            self._descriptor = descriptor

    def written(self) -> None:
        """Something was written to the descriptor."""
        with self._change:
            self._dirty = True
            self._change.notify()

    def check(self) -> None:
        """Raises DurabilityError when an fdatasync has failed, here or in the background."""
        if self._failure is not None:
            raise DurabilityError(
                f"writes to {self._where} could not be made durable: {self._failure}. Acknowledged pushes "
                "may be lost on that disk, so this server stops; look after the disk and restart it."
            )

    def sync(self) -> None:
        """fdatasync now, whatever the policy. Raises DurabilityError."""
        self.check()
        with self._change:
            self._dirty = False
        self._sync(self._descriptor)
        self.check()

    def close(self) -> None:
        """End the thread. The last sync is the caller's."""
        with self._change:
            self._ended = True
            self._change.notify()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._dirty or self._ended)
                if self._ended:
                    return
                self._dirty = False
                # A duplicate: `follow` may change the file, and its owner close it, while this one is synced.
                descriptor = os.dup(self._descriptor)
            try:
                self._sync(descriptor)
            finally:
                os.close(descriptor)
            if self._failure is not None or self._stop.wait(_EVERY_S):
                return

    def _sync(self, descriptor: int) -> None:
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            self._failure = error


_PREFIX, _SUFFIX = "journal-", ".log"


def journal_path(folder: Path, first: int) -> Path:
    """The file whose first record is number `first`."""
    return folder / f"{_PREFIX}{first:020d}{_SUFFIX}"


def journal_files(folder: Path) -> list[tuple[int, Path]]:
    """(number of the first record, path) of each file, ascending."""
    found = []
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        digits = path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if digits.isdigit():
            found.append((int(digits), path))
    return sorted(found)


class Journal:
    """Appends to the last file of a folder. `number` is that of the next record.

    For one thread, beside the one that syncs. After DurabilityError that is no JournalFullError nothing can
    be appended any more.
    """

    def __init__(self, folder: Path, fsync: Fsync) -> None:
        self._folder = folder
        self._syncing = JournalSync(fsync, str(folder))
        self._descriptor = -1
        self._path = folder
        self._salt = self._end = self.number = 0
        self._broken: str | None = None

    def start(self, first: int) -> None:
        """Go on in a new file, whose first record is number `first`."""
        salt = secrets.randbits(63)
        path = journal_path(self._folder, first)
        try:
            # Whole or not there at all, so that recovery never meets half a head.
            write_file(path, [file_head(first, salt)])
            self._follow(path, salt, FILE_HEAD, first)
        except OSError as error:
            kind = JournalFullError if error.errno in NO_SPACE else DurabilityError
            raise kind(f"the journal file {path} cannot be made: {error}") from error

    def resume(self, path: Path, salt: int, end: int, number: int) -> None:
        """Go on in a file that ends after `end` sound bytes, with record `number`; the rest is cut off."""
        try:
            self._follow(path, salt, end, number)
            if os.fstat(self._descriptor).st_size != end:
                os.ftruncate(self._descriptor, end)
                os.fdatasync(self._descriptor)
        except OSError as error:
            raise DurabilityError(f"the journal file {path} cannot be continued: {error}") from error

    def append(self, frames: Sequence[Buffer]) -> int:
        """Write one record and, with `always`, make it durable; returns its number. When this has returned,
        the request may be acknowledged. Raises JournalFullError or DurabilityError; then it is not in.
        """
        number = self.write(frames)
        self.settle()
        return number

    def write(self, frames: Sequence[Buffer]) -> int:
        """As `append`, but several records may share one `settle` before any of them is acknowledged."""
        self._usable()
        record = encode_record(self.number, self._salt, frames)
        try:
            self._end += write_all(self._descriptor, record)
        except OSError as error:
            self._cut_off(error)
            kind = JournalFullError if error.errno in NO_SPACE else DurabilityError
            raise kind(
                f"record {self.number} does not go into {self._path}: {error.strerror}. The request was not "
                "carried out; make room on that disk."
            ) from error
        self._syncing.written()
        self.number += 1
        return self.number - 1

    def settle(self) -> None:
        """With `always`: make everything written durable. Raises DurabilityError, which is final."""
        if self._syncing.policy == "always":
            self._syncing.sync()

    def rotate(self) -> int:
        """Go on in a new file; returns the number of its first record, the next one. A snapshot of the state
        as of now makes the former files superfluous.
        """
        self._usable()
        if self._end > FILE_HEAD:
            self.start(self.number)
        return self.number

    def remove_before(self, number: int) -> None:
        """Remove the files all of whose records are before `number`. Raises OSError."""
        files = journal_files(self._folder)
        for (_, path), (following, _) in itertools.pairwise(files):
            if following <= number:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Make everything durable (but for `no`) and close. Raises DurabilityError."""
        try:
            if self._descriptor >= 0 and self._syncing.policy != "no":
                self._syncing.sync()
        finally:
            self._syncing.close()
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _usable(self) -> None:
        if self._descriptor < 0:
            raise DurabilityError(f"nothing can be appended to {self._folder}: take all its records first")
        if self._broken is not None:
            raise DurabilityError(self._broken)
        self._syncing.check()

    def _follow(self, path: Path, salt: int, end: int, number: int) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        former = self._descriptor
        self._syncing.follow(descriptor)  # syncs the former file: only the last one may have a torn tail
        if former >= 0:
            os.close(former)
        self._descriptor, self._path, self._salt, self._end, self.number = descriptor, path, salt, end, number

    def _cut_off(self, error: OSError) -> None:
        """Remove what was written of a record. Else the next one would follow on half a record, and a
        recovery would stop before it.
        """
        try:
            os.ftruncate(self._descriptor, self._end)
        except OSError as second:
            self._broken = f"{self._path} ends in half a record ({error}), which cannot be cut off: {second}"
            raise DurabilityError(self._broken) from second


# ---- Recovery.


def recover_records(folder: Path, start: int, journal: Journal) -> Iterator[list[memoryview]]:
    """The frames of every record from number `start` on; when all were taken, `journal` goes on behind them.

    A record at the end of the last file that a crash cut off is removed: it was not acknowledged, or (with
    `no` and `everysec`, after a power failure) lost. Raises DamagedError for anything else: a file that is
    missing, a record that is not as it was written although others follow. No file is changed then.
    """
    files = journal_files(folder)
    while len(files) > 1 and files[1][0] <= start:
        del files[0]  # superfluous since the snapshot; a crash came before their removal
    if not files and not start:
        journal.start(0)
        return
    if not files or files[0][0] > start:
        raise DamagedError(_missing(journal_path(folder, start)))
    number = files[0][0]
    for position, (first, path) in enumerate(files):
        if first != number:
            raise DamagedError(_missing(journal_path(folder, number)))
        reader = _FileReader(path, first, last=position == len(files) - 1)
        for record in reader.records():
            if record.number >= start:
                yield record.frames
        number = reader.number
    journal.resume(path, reader.salt, reader.end, number)


class _FileReader:
    """Reads one file; afterwards `end` is the offset behind its last sound record, `number` the next one."""

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
            raise DurabilityError(f"the journal file {self._path} cannot be read: {error}") from error

    def _records(self, file: BinaryIO) -> Iterator[Record]:
        size = os.fstat(file.fileno()).st_size
        try:
            first, self.salt = read_file_head(file.read(FILE_HEAD))
        except BadRecordError as error:
            raise DamagedError(_damaged(self._path, 0, str(error))) from error
        if first != self.number:
            raise DamagedError(_damaged(self._path, 0, f"its first record is {first}, not {self.number}"))
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
        """At a bad record: fine for the tail of the last file."""
        later = later_record(file, self.end, self.number, self.salt)
        if later is not None:
            why = f"{error}, and a sound record follows at byte {later}"
            raise DamagedError(_damaged(self._path, self.end, why)) from error
        if not self._last:
            raise DamagedError(
                _damaged(self._path, self.end, f"{error}, and a later file follows")
            ) from error


def _missing(path: Path) -> str:
    return (
        f"the journal file {path} is missing, with acknowledged pushes in it. Put it back, or remove "
        "the whole folder to begin anew."
    )


def _damaged(path: Path, offset: int, why: str) -> str:
    return (
        f"the journal file {path} is damaged at byte {offset}: {why}. Bring back a sound copy of it, or "
        "remove the folder and begin anew from the last save."
    )
