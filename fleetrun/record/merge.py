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


@dataclass(frozen=True, slots=True)
class Line:
    """`moment`: seconds since the epoch, exact to about a second. `number` is that of its log."""

    moment: float
    number: int
    text: bytes


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
        """What came since the last call. `last`: nothing will come any more."""
        for number, reader in enumerate(self._readers):
            self._cut()
            if not reader.aligned and number not in self._doubted:
                self._doubted.add(number)  # its head was cut off a moment ago: the note of it will be there
                continue
            self._doubted.discard(number)
            size, begin = reader.state[0], reader.offset
            if size < begin:  # somebody emptied it
                reader.offset = 0
            found = list(self._timed(number, self._track(number), reader.lines(size, last=last)))
            by = self._cut().get(self._names[number], 0)
            if by:  # while it was read: once more then
                reader.offset = max(0, begin - by)
            else:
                yield from (line for line in found if wanted(line.text))

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
