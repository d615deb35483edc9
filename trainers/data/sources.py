"""Files as streams of bytes: local and remote ones, gzipped ones, and through a command. Knows how a path is
opened and what its errors mean; leaves the bytes to the parser.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import fsspec

from trainers.data.images import DataError
from trainers.data.multislot import Source
from trainers.data.pipe import PipeSource
from trainers.errors import UsageError

AS_IT_IS = "cat"
"""The pipe command that needs no process."""


class FileSource:
    """An open file, as a Source."""

    def __init__(self, name: str, stream: IO[bytes]) -> None:
        self.name = name
        self._stream = cast(io.RawIOBase, stream)

    def readinto(self, buffer: memoryview) -> int:
        try:
            return self._stream.readinto(buffer) or 0
        except (EOFError, OSError, zlib.error) as problem:
            raise DataError(f"{self.name} cannot be read to its end: {problem}") from problem


def check_files(paths: Sequence[str]) -> None:
    """Before anything is read: every local file is there. Raises UsageError for no files at all and DataError
    naming what is missing or is a directory. Remote files are looked at when their turn comes.
    """
    if not paths:
        raise UsageError(
            "the data set has no files; call set_filelist([...]) with at least one, on every trainer"
        )
    local = [path for path in paths if not _is_remote(path)]
    missing = [path for path in local if not Path(path).exists()]
    if missing:
        others = f" and {len(missing) - 1} more of {len(paths)} files" if len(missing) > 1 else ""
        raise DataError(f"{missing[0]}{others} does not exist; the data set was given it by set_filelist")
    folders = [path for path in local if Path(path).is_dir()]
    if folders:
        raise DataError(f"{folders[0]} is a directory; set_filelist takes the files in it")


@contextlib.contextmanager
def open_source(path: str, command: str, stop: int) -> Iterator[Source]:
    """One file, through `command` unless that is "cat"; then a name in .gz is unzipped. `stop` is a
    descriptor that becomes readable when nothing more is wanted. Raises DataError naming the file.
    """
    stream = _open(path)
    if command.strip() != AS_IT_IS:
        source = PipeSource(command, path, stream, stop)
        with contextlib.closing(source):
            yield source
        return
    with contextlib.closing(stream):
        if path.endswith(".gz"):
            yield FileSource(path, cast(IO[bytes], gzip.GzipFile(fileobj=stream)))
        else:
            yield FileSource(path, stream)


def _is_remote(path: str) -> bool:
    return "://" in path


def _open(path: str) -> IO[bytes]:
    try:
        if _is_remote(path):
            return cast(IO[bytes], fsspec.open(path, "rb").open())
        return cast(IO[bytes], open(path, "rb", buffering=0))  # noqa: PTH123  # the caller closes it
    except (OSError, ImportError, ValueError) as problem:
        raise DataError(f"{path} cannot be opened: {problem}") from problem
