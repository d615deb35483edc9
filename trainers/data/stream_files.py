"""Find the files of a stream, assign them to trainers, and read MultiSlot text in them, even while it grows.

`stream` makes the batches and tracks the positions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import xxhash

from trainers.data.multislot import BrokenLines, Parser
from trainers.data.slots import Layout, UseVar
from trainers.data.sources import FileSource
from trainers.data.store import Columns
from trainers.data.stream import Batches, Split
from trainers.data.warm import warm_up
from trainers.errors import DataError, NotSupportedError, UsageError
from trainers.storage.folder import Where

_HIDDEN = (".", "_")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
_LOOKED_BACK = 1 << 16
_SHOWN = 40


class Folder:
    """The files of a stream.

    `where` is a directory, with all present and future files in and below it, or a list of files. A file's
    name is its path below the directory, or its path as given.
    """

    def __init__(self, where: Where | Sequence[Where]) -> None:
        given = [where] if isinstance(where, str | os.PathLike) else list(where)
        self._paths = [os.fspath(each) for each in given]
        if not self._paths:
            raise UsageError("A stream has no files. Name a directory or at least one file.")
        if remote := [path for path in self._paths if "://" in path]:
            raise NotSupportedError(
                f"{remote[0]} is not a file of this node. A stream reads files of a local or shared disk."
            )
        self._real = [os.path.realpath(path) for path in self._paths]
        if len(set(self._real)) < len(self._paths):
            raise UsageError(
                f"A stream has the same file twice: {', '.join(self._paths)}. Remove one of them."
            )
        self._directory = self._paths[0] if len(self._paths) == 1 and Path(self._paths[0]).is_dir() else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and self._real == other._real

    @property
    def name(self) -> str:
        """The default name of the stream. Raises UsageError for a list of files, which may grow."""
        if len(self._paths) > 1:
            raise UsageError(
                "A stream of several files needs a name. Pass name=, so that servers recognize the stream "
                "after a restart."
            )
        return self._paths[0].rstrip("/") or "/"

    def names(self) -> list[str]:
        """Return all current files.

        In a directory, names that start with a dot or an underscore are left out, and the others are sorted.
        """
        if self._directory is None:
            missing = [path for path in self._paths if not Path(path).is_file()]
            if missing:
                raise DataError(
                    f"The stream cannot read {missing[0]}, because it does not exist or is not a file."
                )
            return list(self._paths)
        return sorted(self._below(self._directory, ""))

    def _below(self, directory: str, prefix: str) -> Iterator[str]:
        try:
            entries = list(os.scandir(directory))
        except OSError as problem:
            raise DataError(f"The stream cannot read {directory}: {problem}") from problem
        for entry in entries:
            if entry.name.startswith(_HIDDEN):
                continue
            if entry.is_symlink() and entry.is_dir():
                continue  # its files are found at their own place, or lie outside this directory
            if entry.is_dir():
                yield from self._below(entry.path, f"{prefix}{entry.name}/")
            else:
                yield f"{prefix}{entry.name}"

    def path(self, name: str) -> str:
        return name if self._directory is None else f"{self._directory}/{name}"

    def number(self, name: str) -> int:
        """Return the number that assigns a file to a trainer, equal on all trainers and at all times."""
        return (
            self._paths.index(name)
            if self._directory is None
            else xxhash.xxh3_64_intdigest(os.fsencode(name))
        )


class MultiSlotFiles:
    """MultiSlot text in files, as a Source. Positions are bytes, and one trainer reads each file.

    `where` is a directory, a file, or several files, which may grow. `name` is the name of the stream on the
    servers, by default the path. Keep the name as long as each record must count once. `max_bad_lines` is the
    number of broken lines that this process skips before it fails.
    """

    def __init__(
        self, where: Where | Sequence[Where], *, use_var: UseVar, name: str = "", max_bad_lines: int = 0
    ) -> None:
        self._folder = Folder(where)
        self._layout = Layout.of(use_var)
        self._broken = BrokenLines(max_bad_lines)
        self.name = name or self._folder.name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MultiSlotFiles) and self._folder == other._folder

    @property
    def skipped_lines(self) -> int:
        return self._broken.count

    def shards(self) -> list[str]:
        names = self._folder.names()
        if packed := [name for name in names if name.endswith(_COMPRESSED)]:
            raise NotSupportedError(
                f"{self._folder.path(packed[0])} is compressed, so the stream cannot continue at a position "
                "in it. Decompress the file."
            )
        return names

    def splits(self, shards: Sequence[str], rank: int, trainers: int) -> Iterator[Split]:
        for name in shards:
            if self._folder.number(name) % trainers == rank:
                try:
                    size = Path(self._folder.path(name)).stat().st_size
                except FileNotFoundError:
                    continue  # it has just been removed
                except OSError as problem:
                    raise DataError(f"{self._folder.path(name)} cannot be read: {problem}") from problem
                yield Split(name, 0, size, size)

    def read(self, shard: str, start: int, stop: int, rows: int, *, grows: bool) -> Batches:
        warm_up()
        path = self._folder.path(shard)
        try:
            stream: IO[bytes] = open(path, "rb", buffering=0)  # noqa: SIM115, PTH123  # closed below
        except OSError as problem:
            raise DataError(f"{path} cannot be opened: {problem}") from problem
        with stream:
            stop = _after_last_line(stream, start, stop) if grows else stop
            if stop == start:
                return
            start = self._behind_rest(stream, path, start, stop)
            stream.seek(start)
            name = path if start == 0 else f"{path} from byte {start}"
            parser = Parser(self._layout, rows, self._broken, most=rows)
            last, at = None, start
            try:
                for columns in _with_rest(parser, _Slice(name, stream, stop - start)):
                    if last is not None:
                        yield last, at
                    last, at = columns.batch(), min(start + parser.offset, stop)
            except DataError:
                if last is not None:
                    yield last, at
                raise
            yield last, stop  # without a last batch, only broken lines follow

    def _behind_rest(self, stream: IO[bytes], path: str, start: int, stop: int) -> int:
        """Return the start of the first line of [start, stop).

        Raises DataError if the line before it was counted without its end and has grown since.
        """
        stream.seek(max(start - 1, 0))
        if start == 0 or stream.read(1) == b"\n":
            return start
        text = bytearray()
        while b"\n" not in text and (more := stream.read(min(_LOOKED_BACK, stop - start - len(text)))):
            text += more
        rest, end, _ = text.partition(b"\n")
        if rest.strip():
            error = self._broken.add(
                f"{path}: the line up to byte {start} was read before it was complete, and continues with "
                f"{rest[:_SHOWN].decode('utf-8', 'backslashreplace')!r}"
            )
            if error is not None:
                raise error
        return start + len(rest) + len(end)


def _with_rest(parser: Parser, source: FileSource) -> Iterator[Columns]:
    """Yield all batches of a source, including the last one, which may be short."""
    for columns in parser.read(source):
        if len(columns):
            yield columns
    if len(rest := parser.rest()):
        yield rest


class _Slice(FileSource):
    """A number of bytes of a file from its current position."""

    def __init__(self, name: str, stream: IO[bytes], size: int) -> None:
        super().__init__(name, stream)
        self._left = size

    def readinto(self, buffer: memoryview) -> int:
        got = super().readinto(buffer[: self._left]) if self._left else 0
        if not got and self._left:
            raise DataError(f"{self.name} became shorter while the stream read it")
        self._left -= got
        return got


def _after_last_line(stream: IO[bytes], start: int, stop: int) -> int:
    """Return the end of the last whole line in [start, stop), or `start` if there is none."""
    while start < stop:
        begin = max(start, stop - _LOOKED_BACK)
        stream.seek(begin)
        found = stream.read(stop - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        stop = begin
    return start
