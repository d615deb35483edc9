"""Recovery: the records of a folder's journal files, in order. Knows a torn tail from damage; leaves what
records mean to the server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trainers.ps.durable.errors import DamagedError, DurabilityError
from trainers.ps.durable.journal import Journal, journal_files, journal_path
from trainers.ps.durable.records import (
    FILE_HEAD,
    BadRecordError,
    Record,
    later_record,
    read_file_head,
    read_record,
)


def recover(folder: Path, start: int, journal: Journal) -> Iterator[list[memoryview]]:
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
