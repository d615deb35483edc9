"""Read the lines of a launch's logs in the order of time, forwards and backwards, during a job and after it.

The marks next to the event log give each line a time. The time is exact to about 10 ms where a job writes few
lines, and else to one second at worst. This module prints nothing.
"""

from __future__ import annotations

import heapq
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from fleetrun.files import open_plain
from fleetrun.frozen import frozen
from fleetrun.record.journal import REST

# ---- Lines of one log file, forwards and backwards

PIECE = 256 * 1024
LONGEST = 1 << 20
"""Most bytes of a line. A longer line is broken."""


class LogReader:
    """A reader of one log, which continues at `offset`, always the start of a line. An unreadable log has no
    lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.lost = 0
        """Bytes that were removed from the head of the log before anyone read them."""
        self.trouble: OSError | None = None
        """The reason why the log is unreadable at the moment, or None."""
        self._fd = -1
        self._open()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def state(self) -> tuple[int, float]:
        """The size of the log, and the time of its last write."""
        if self._fd < 0:
            self._open()
        if self._fd < 0:
            return 0, 0.0
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime

    @property
    def head(self) -> int:
        """The offset of the first byte. --log_rotate may have punched a hole before it."""
        with suppress(OSError):
            return os.lseek(self._fd, 0, os.SEEK_DATA)
        return 0

    @property
    def aligned(self) -> bool:
        """True if a line starts at `offset`. Also True if the byte before it cannot be read."""
        return self.offset == 0 or self._read(self.offset - 1, 1) in (b"\n", b"")

    def seek(self, offset: int) -> None:
        """Move to the start of the line with this byte."""
        self.offset = offset
        if offset > 0:
            low = max(0, offset - LONGEST)
            before = self._read(low, offset - low)
            self.offset = low + before.rfind(b"\n") + 1 if b"\n" in before else low

    def shortened(self, by: int) -> None:
        """Adjust the offset after the log lost `by` bytes at its head."""
        unread = by - self.offset
        self.offset = max(0, -unread)
        if unread > 0:
            self._skip(unread)

    def past_hole(self) -> None:
        """Move past a hole at the head of the log."""
        unread = self.head - self.offset
        if unread > 0:
            self.offset += unread
            self._skip(unread)

    def _skip(self, lost: int) -> None:
        """Skip the rest of a line without a start."""
        rest = self._read(self.offset, LONGEST).find(b"\n") + 1
        self.offset += rest
        self.lost += lost + rest

    def ahead(self, end: int) -> bytes:
        """Return everything up to byte `end`, in one read, because the head may disappear at any moment."""
        return self._read(self.offset, end - self.offset)

    def lines(
        self, end: int, *, last: bool = False, ahead: bytes | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """Yield whole lines up to byte `end`, each with the offset behind the line.

        `last`: the bytes after the last newline are also a line. `ahead`: bytes that were read before.
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
        """Yield the same lines, last one first, down to byte `start`, which is the start of a line."""
        place, edge, newline = end, end, 0  # `rest` ends at `edge`, perhaps with a newline behind it
        counts, rest = last, b""
        while place > start:
            low = max(start, place - PIECE)
            data = self._read(low, place - low)
            if len(data) < place - low:
                return  # the file became shorter meanwhile
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
        """Open the log. Never blocks, and opens only a regular file."""
        try:
            self._fd = open_plain(self.path)
            self.trouble = None
        except OSError as error:
            self.trouble = error


# ---- From sizes of log files to times of their lines

_DIGITS = 18  # most digits of a size
_LONGEST_LINE = 1 << 20


@dataclass(slots=True)
class Track:
    """The growth of one log: at `times[i]` the log had `sizes[i]` bytes, counted from its present head. Both
    lists ascend. `rests[i]` is how many seconds the launcher had not looked before.
    """

    times: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    rests: list[float] = field(default_factory=list)

    def add(self, moment: float, size: int, rest: float) -> None:
        while self.sizes and self.sizes[-1] >= size:  # somebody emptied the file
            self._drop()
        if self.times and moment < self.times[-1]:
            moment = self.times[-1]  # the clock was set back
        self.times.append(moment)
        self.sizes.append(size)
        self.rests.append(rest)

    def cut(self, by: int) -> None:
        """Adjust the sizes after the file lost `by` bytes at its head."""
        self.sizes = [size - by for size in self.sizes]
        removed = bisect_left(self.sizes, 1)
        self.times, self.sizes, self.rests = self.times[removed:], self.sizes[removed:], self.rests[removed:]

    def closed(self, size: int, began: float, last: float) -> Track:
        """Return the track with facts of the file: its present size, the start of its job, and the last
        write.
        """
        known = Track(list(self.times), list(self.sizes), list(self.rests))
        rest = REST
        if not known.sizes:  # without marks, assume even growth
            known.add(began, 0, rest)
            rest = max(rest, last - began)
        if size > known.sizes[-1]:
            known.add(last, size, rest)
        return known

    def at(self, offset: int) -> float:
        """Return when the byte before `offset` was written. Infinite for bytes that are newer
        than all marks.
        """
        number = bisect_left(self.sizes, offset)
        if number == len(self.sizes):
            return math.inf
        if not number:
            return self._within(number, offset, -math.inf, 0)
        return self._within(number, offset, self.times[number - 1], self.sizes[number - 1])

    def since(self, moment: float) -> int:
        """Return an offset before which all bytes are older than `moment`."""
        number = bisect_left(self.times, moment)
        return self.sizes[number - 1] if number else 0

    def _within(self, number: int, offset: int, before: float, size: int) -> float:
        """Spread the bytes evenly over the time since the previous look. After a longer silence, the kernel
        has signalled the first write, so the mark has its exact time.
        """
        moment, rest = self.times[number], self.rests[number]
        if moment - before > 1.5 * rest:
            return moment
        away = min(moment - before, rest)
        return moment - away * (self.sizes[number] - offset) / max(1, self.sizes[number] - size)

    def _drop(self) -> None:
        self.times.pop()
        self.sizes.pop()
        self.rests.pop()


class MarksReader:
    """A reader of a launch's marks, which continues where it stopped. A missing file has no marks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._names: dict[str, str] = {}
        self._rest = REST
        self.tracks: dict[str, Track] = {}

    def read(self) -> dict[str, int]:
        """Read the new marks. Return how many bytes each log has lost at its head since the last call, by
        name.
        """
        cuts: dict[str, int] = {}
        for line in self._lines():
            word, _, rest = line.partition(" ")
            if word == "#":
                self._names = {str(number): name for number, name in enumerate(rest.split())}
            elif word == "rest":
                self._rest = _positive(rest) or self._rest
            elif (moment := _positive(word)) is not None:
                self._take(moment, rest.split(), cuts)
        return cuts

    def _take(self, moment: float, entries: Iterable[str], cuts: dict[str, int]) -> None:
        for entry in entries:  # a line may have a million entries
            number, grown, amount = entry.partition(":")
            if not grown:
                number, _, amount = entry.partition("-")
            name = self._names.get(number)
            if name is None or not amount.isdecimal() or len(amount) > _DIGITS:
                continue
            track = self.tracks.get(name)
            if track is None:
                track = self.tracks[name] = Track()
            if grown:
                track.add(moment, int(amount), self._rest)
            else:
                track.cut(int(amount))
                cuts[name] = cuts.get(name, 0) + int(amount)

    def _lines(self) -> Iterable[str]:
        """Yield whole lines, because the launcher may still be writing the last one. An unreadable file has
        no lines.
        """
        with suppress(OSError), os.fdopen(open_plain(self._path), "rb") as file:
            file.seek(self._offset)
            while line := file.readline(_LONGEST_LINE):
                if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
                    return
                self._offset += len(line)
                yield line.decode("ascii", "replace").rstrip("\n")


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 1e12 else None


# ---- Lines of several logs, merged by time

AT_ONCE = 2 << 20
"""Most bytes of new lines of one log, so that a slow reader gets them in pieces."""


@frozen
class Line:
    """A line of a log. `moment`: seconds since the epoch. `number`: the number of its log.

    With `lost`, the entry is not a line: this many bytes of the log were rotated away before anyone read
    them.
    """

    moment: float
    number: int
    text: bytes
    lost: int = 0


Wanted = Callable[[bytes], bool]


class Merged:
    """The logs of one launch. `began` is the start of the launch. `clock` returns the present time."""

    def __init__(
        self, logs: Mapping[str, Path], marks: Path, began: float, clock: Callable[[], float]
    ) -> None:
        self._names = list(logs)
        self._readers = [LogReader(path) for path in logs.values()]
        self._marks = MarksReader(marks)
        self._doubted: set[int] = set()
        self._began = began
        self._clock = clock
        self.cut = False
        """True if `so_far` omitted lines because of `most_bytes` or `most_read`."""

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def so_far(
        self,
        wanted: Wanted,
        *,
        since: float = -math.inf,
        most: int | None = None,
        whole: bool = True,
        most_bytes: int | None = None,
        most_read: int | None = None,
    ) -> Iterator[Line]:
        """Yield the existing lines since a moment, or the last `most` of them. Later lines come from `news`.

        `whole`: the logs are complete, and the bytes after the last newline are also a line. `most_bytes`:
        yield only the last lines with this many bytes, an equal share of each log. `most_read`: the same
        limit for all lines that are read.
        """
        self._marks.read()
        streams = []
        for number, reader in enumerate(self._readers):
            size, changed = reader.state
            track = self._track(number).closed(size, self._began, changed)
            reader.seek(min(size, track.since(since)))
            reader.offset = max(reader.head, reader.offset)
            found: Iterable[Line]
            if most is None and most_bytes is None and most_read is None:
                found = self._timed(number, track, reader.lines(size, last=whole))
            else:
                shares = [
                    None if each is None else each // len(self._readers) for each in (most_bytes, most_read)
                ]
                found = self._ending(number, track, size, most, wanted, whole, *shares)
            streams.append(each for each in found if each.moment >= since and wanted(each.text))
        merged = heapq.merge(*streams, key=lambda line: line.moment)
        return merged if most is None else iter(list(merged)[-most:] if most else [])

    def news(self, wanted: Wanted, *, last: bool = False) -> Iterator[Line]:
        """Yield the lines since the last call, at most `AT_ONCE` bytes of each log. `last`: no more lines
        will come.
        """
        for number, reader in enumerate(self._readers):
            self._cut()
            reader.past_hole()
            size = reader.state[0]
            if (not reader.aligned or size < reader.offset) and not last and number not in self._doubted:
                self._doubted.add(number)  # a missing head: the mark about it will follow
                continue
            self._doubted.discard(number)
            if size < reader.offset:  # somebody emptied the file
                reader.offset = 0
            begin, end = reader.offset, min(size, reader.offset + AT_ONCE)
            data = reader.ahead(end)
            if reader.state[0] < size or reader.head > begin or self._names[number] in self._cut():
                continue  # the head disappeared during the reading: read again next time
            lines = reader.lines(end, last=last and end == size, ahead=data)
            found = list(self._timed(number, self._track(number), lines))
            yield from self._lost(number, found)
            yield from (line for line in found if wanted(line.text))

    def _lost(self, number: int, found: Sequence[Line]) -> Iterator[Line]:
        """Yield an entry for the bytes that are missing before the found lines."""
        reader = self._readers[number]
        lost, reader.lost = reader.lost, 0
        if lost:
            yield Line(found[0].moment if found else self._clock(), number, b"", lost)

    @property
    def behind(self) -> bool:
        """True if the logs have more lines than one call of `news` yields."""
        return any(
            reader.state[0] - reader.offset > AT_ONCE and reader.trouble is None for reader in self._readers
        )

    @property
    def troubles(self) -> Mapping[str, OSError]:
        """Reasons why logs are unreadable at the moment, by name."""
        return {
            name: reader.trouble
            for name, reader in zip(self._names, self._readers, strict=True)
            if reader.trouble is not None
        }

    def _cut(self) -> dict[str, int]:
        """Adjust the readers to the bytes that logs have lost at their heads."""
        cuts = self._marks.read()
        for name, by in cuts.items():
            if name in self._names:
                self._readers[self._names.index(name)].shortened(by)
        return cuts

    def _ending(
        self,
        number: int,
        track: Track,
        size: int,
        most: int | None,
        wanted: Wanted,
        whole: bool,
        most_bytes: int | None,
        most_read: int | None,
    ) -> list[Line]:
        """Return the last lines within the limits. The reader then continues after the last whole line."""
        reader = self._readers[number]
        lines = self._within(reader.backwards(size, reader.offset, last=whole), most_read)
        matching = (each for each in lines if wanted(each[1]))
        found = list(islice(self._within(matching, most_bytes), most))
        reader.offset = size
        if not whole:
            reader.seek(size)
        return list(self._timed(number, track, reversed(found)))

    def _within(
        self, lines: Iterable[tuple[int, bytes]], most_bytes: int | None
    ) -> Iterator[tuple[int, bytes]]:
        left = math.inf if most_bytes is None else most_bytes
        for line in lines:
            left -= len(line[1]) + 1
            if left < 0:
                self.cut = True
                return
            yield line

    def _timed(self, number: int, track: Track, lines: Iterable[tuple[int, bytes]]) -> Iterator[Line]:
        for behind, text in lines:
            # Many programs write a line in pieces. A line counts from its start, and a progress bar from its
            # end.
            moment = track.at(behind - (1 if b"\r" in text else len(text)))
            yield Line(self._clock() if moment == math.inf else moment, number, text.lstrip(b"\0"))

    def _track(self, number: int) -> Track:
        return self._marks.tracks.get(self._names[number]) or Track()


def in_time_order(lines: Sequence[Line]) -> list[Line]:
    """Sort the lines of one look by time. Lines of one log keep their order."""
    return sorted(lines, key=lambda line: line.moment)
