"""Journal: what a server acknowledged, in files of numbered records. Knows when a record is in; leaves its
meaning to the server.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from trainers.ps.durable.errors import DurabilityError, JournalFullError
from trainers.ps.durable.records import FILE_HEAD, encode, file_head
from trainers.ps.durable.syncing import Fsync, Syncing
from trainers.ps.saved.descriptors import Buffer, write_all, write_file
from trainers.ps.saved.errors import NO_SPACE

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
        self._syncing = Syncing(fsync, str(folder))
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
        record = encode(self.number, self._salt, frames)
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
