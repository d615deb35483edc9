"""The lines of one log file, forwards and backwards, while it is written and when it is whole. Knows no time
and no job.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from fleetrun.files import open_plain

PIECE = 256 * 1024
LONGEST = 1 << 20
"""Bytes, after which a line is broken."""


class LogReader:
    """Reads on from `offset`, which is always the beginning of a line. What cannot be read has no lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.lost = 0
        """Bytes that were taken off its head before they were read."""
        self.trouble: OSError | None = None
        """Why nothing can be read at the moment."""
        self._fd = -1
        self._open()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def state(self) -> tuple[int, float]:
        """Size, and when it was written to last."""
        if self._fd < 0:
            self._open()
        if self._fd < 0:
            return 0, 0.0
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime

    @property
    def head(self) -> int:
        """Where it begins: --log_rotate may have punched a hole there."""
        with contextlib.suppress(OSError):
            return os.lseek(self._fd, 0, os.SEEK_DATA)
        return 0

    @property
    def aligned(self) -> bool:
        """Whether a line begins at `offset`, as far as one can see."""
        return self.offset == 0 or self._read(self.offset - 1, 1) in (b"\n", b"")

    def seek(self, offset: int) -> None:
        """To the beginning of the line that has this byte."""
        self.offset = offset
        if offset > 0:
            low = max(0, offset - LONGEST)
            before = self._read(low, offset - low)
            self.offset = low + before.rfind(b"\n") + 1 if b"\n" in before else low

    def shortened(self, by: int) -> None:
        """It has lost so many bytes at its head."""
        unread = by - self.offset
        self.offset = max(0, -unread)
        if unread > 0:
            self._skip(unread)

    def past_hole(self) -> None:
        """Its head may have become a hole meanwhile."""
        unread = self.head - self.offset
        if unread > 0:
            self.offset += unread
            self._skip(unread)

    def _skip(self, lost: int) -> None:
        """What is left of the line whose beginning is lost is no line."""
        rest = self._read(self.offset, LONGEST).find(b"\n") + 1
        self.offset += rest
        self.lost += lost + rest

    def ahead(self, end: int) -> bytes:
        """What stands up to byte `end`, read at once: whoever cuts off its head may do so at any moment."""
        return self._read(self.offset, end - self.offset)

    def lines(
        self, end: int, *, last: bool = False, ahead: bytes | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """Whole lines up to byte `end` with the offset behind each; `last`: what comes after them is a line
        too. `ahead`: that has been read already.
        """
        rest = b""
        begin = place = self.offset

        def read(size: int) -> bytes:
            done = place - begin
            return self._read(place, size) if ahead is None else ahead[done : done + size]

        while place < end and (data := read(min(PIECE, end - place))):
            place += len(data)
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                self.offset += len(line) + 1
                yield self.offset, line
            if len(rest) > LONGEST:
                self.offset += len(rest)
                yield self.offset, rest
                rest = b""
        if last and rest:
            self.offset += len(rest)
            yield self.offset, rest

    def backwards(self, end: int, start: int, *, last: bool = False) -> Iterator[tuple[int, bytes]]:
        """The same lines, the last one first, down to byte `start`, which is the beginning of one."""
        place, edge, newline = end, end, 0  # `rest` ends at `edge`, and a newline follows or not
        counts, rest = last, b""
        while place > start:
            low = max(start, place - PIECE)
            data = self._read(low, place - low)
            if len(data) < place - low:
                return  # it became shorter meanwhile
            rest, *whole = (data + rest).split(b"\n")
            for line in reversed(whole):
                if counts and (line or newline):
                    yield edge + newline, line
                edge, newline, counts = edge - len(line) - 1, 1, True
            place = low
            if len(rest) > LONGEST:
                if counts:
                    yield edge + newline, rest
                edge, newline, counts, rest = place, 0, True, b""
        if counts and (rest or newline):
            yield edge + newline, rest

    def _read(self, offset: int, size: int) -> bytes:
        if self._fd < 0:
            return b""
        try:
            data = os.pread(self._fd, size, offset)
        except OSError as error:
            self.trouble = error
            return b""
        self.trouble = None
        return data

    def _open(self) -> None:
        """Waits for nobody, and takes nothing but a regular file."""
        try:
            self._fd = open_plain(self.path)
            self.trouble = None
        except OSError as error:
            self.trouble = error
