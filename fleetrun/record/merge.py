"""The lines of several logs in the order of time: what is there, and what comes. Prints nothing."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fleetrun.record.lines import LogReader
from fleetrun.record.times import MarksReader, Track

AT_ONCE = 2 << 20
"""Bytes of news of a log: who reads slowly is told piece by piece."""


@dataclass(frozen=True, slots=True)
class Line:
    """`moment`: seconds since the epoch, exact to about a second. `number` is that of its log.

    With `lost` it is none: so many bytes of the log were rotated away before they were read.
    """

    moment: float
    number: int
    text: bytes
    lost: int = 0


Wanted = Callable[[bytes], bool]


class Merged:
    """The logs of one launch. `began` is when it began, `clock` the time now."""

    def __init__(
        self, logs: Mapping[str, Path], marks: Path, began: float, clock: Callable[[], float]
    ) -> None:
        self._names = list(logs)
        self._readers = [LogReader(path) for path in logs.values()]
        self._marks = MarksReader(marks)
        self._doubted: set[int] = set()
        self._began = began
        self._clock = clock

    def close(self) -> None:
        for reader in self._readers:
            reader.close()

    def so_far(
        self, wanted: Wanted, *, since: float = -math.inf, most: int | None = None, whole: bool = True
    ) -> Iterator[Line]:
        """What is there: lines since a moment, or the last `most` of them. What comes then is `news`.

        `whole`: nobody writes any more, and what stands after the last newline is a line too.
        """
        self._marks.read()
        streams = []
        for number, reader in enumerate(self._readers):
            size, changed = reader.state
            track = self._track(number).closed(size, self._began, changed)
            reader.seek(min(size, track.since(since)))
            reader.offset = max(reader.head, reader.offset)
            found: Iterable[Line]
            if most is None:
                found = self._timed(number, track, reader.lines(size, last=whole))
            else:
                found = self._ending(number, track, size, most, wanted, whole)
            streams.append(each for each in found if each.moment >= since and wanted(each.text))
        merged = heapq.merge(*streams, key=lambda line: line.moment)
        return merged if most is None else iter(list(merged)[-most:] if most else [])

    def news(self, wanted: Wanted, *, last: bool = False) -> Iterator[Line]:
        """What came since the last call, of each log `AT_ONCE` bytes at most. `last`: nothing will come any
        more.
        """
        for number, reader in enumerate(self._readers):
            self._cut()
            reader.past_hole()
            size = reader.state[0]
            if (not reader.aligned or size < reader.offset) and not last and number not in self._doubted:
                self._doubted.add(number)  # its head was cut off a moment ago: the note of it will be there
                continue
            self._doubted.discard(number)
            if size < reader.offset:  # somebody emptied it
                reader.offset = 0
            begin, end = reader.offset, min(size, reader.offset + AT_ONCE)
            data = reader.ahead(end)
            if reader.state[0] < size or reader.head > begin or self._names[number] in self._cut():
                continue  # its head was cut off while it was read: once more then
            lines = reader.lines(end, last=last and end == size, ahead=data)
            found = list(self._timed(number, self._track(number), lines))
            yield from self._lost(number, found)
            yield from (line for line in found if wanted(line.text))

    def _lost(self, number: int, found: Sequence[Line]) -> Iterator[Line]:
        """A word for what is missing before the lines that were found."""
        reader = self._readers[number]
        lost, reader.lost = reader.lost, 0
        if lost:
            yield Line(found[0].moment if found else self._clock(), number, b"", lost)

    @property
    def behind(self) -> bool:
        """Whether there is more than one call of `news` tells."""
        return any(
            reader.state[0] - reader.offset > AT_ONCE and reader.trouble is None for reader in self._readers
        )

    @property
    def troubles(self) -> Mapping[str, OSError]:
        """By name, why logs cannot be read at the moment."""
        return {
            name: reader.trouble
            for name, reader in zip(self._names, self._readers, strict=True)
            if reader.trouble is not None
        }

    def _cut(self) -> dict[str, int]:
        """Go along with what logs have lost at their heads."""
        cuts = self._marks.read()
        for name, by in cuts.items():
            if name in self._names:
                self._readers[self._names.index(name)].shortened(by)
        return cuts

    def _ending(
        self, number: int, track: Track, size: int, most: int, wanted: Wanted, whole: bool
    ) -> list[Line]:
        """The last lines that are wanted; the reader goes on behind what is whole."""
        reader = self._readers[number]
        lines = reader.backwards(size, reader.offset, last=whole)
        found = list(islice((each for each in lines if wanted(each[1])), most))
        reader.offset = size
        if not whole:
            reader.seek(size)
        return list(self._timed(number, track, reversed(found)))

    def _timed(self, number: int, track: Track, lines: Iterable[tuple[int, bytes]]) -> Iterator[Line]:
        for behind, text in lines:
            # Many programs write a line in pieces: it counts when it begins, and a progress bar when it ends.
            moment = track.at(behind - (1 if b"\r" in text else len(text)))
            yield Line(self._clock() if moment == math.inf else moment, number, text.lstrip(b"\0"))

    def _track(self, number: int) -> Track:
        return self._marks.tracks.get(self._names[number]) or Track()


def order(lines: Sequence[Line]) -> list[Line]:
    """Of one look: by time, and those of one log as they stand in it."""
    return sorted(lines, key=lambda line: line.moment)
