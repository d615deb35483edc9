"""From the sizes that log files had to the times of their lines: exact to about a second. Pure but for
reading the marks; writing them is `marks.py`'s.
"""

from __future__ import annotations

import contextlib
import math
import os
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fleetrun.files import open_plain
from fleetrun.record.marks import REST

_DIGITS = 18  # of a size, at most
_LONGEST_LINE = 1 << 20


@dataclass(slots=True)
class Track:
    """How one log grew: at `times[i]` it had `sizes[i]` bytes, counted from its head as it is now. Both
    ascend. `rests[i]` is how long the launcher had looked away before.
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
        """The file has lost so many bytes at its head."""
        self.sizes = [size - by for size in self.sizes]
        gone = bisect_left(self.sizes, 1)
        self.times, self.sizes, self.rests = self.times[gone:], self.sizes[gone:], self.rests[gone:]

    def closed(self, size: int, began: float, last: float) -> Track:
        """With what is known of the file itself: its size now, when its job began, and when it was written to
        last.
        """
        known = Track(list(self.times), list(self.sizes), list(self.rests))
        rest = REST
        if not known.sizes:  # no marks: as if it had grown evenly
            known.add(began, 0, rest)
            rest = max(rest, last - began)
        if size > known.sizes[-1]:
            known.add(last, size, rest)
        return known

    def at(self, offset: int) -> float:
        """When the byte before `offset` was written. Infinite for what is newer than all marks."""
        number = bisect_left(self.sizes, offset)
        if number == len(self.sizes):
            return math.inf
        if not number:
            return self._within(number, offset, -math.inf, 0)
        return self._within(number, offset, self.times[number - 1], self.sizes[number - 1])

    def since(self, moment: float) -> int:
        """The offset before which everything is older."""
        number = bisect_left(self.times, moment)
        return self.sizes[number - 1] if number else 0

    def _within(self, number: int, offset: int, before: float, size: int) -> float:
        """Spread evenly over the time for which nobody looked. After a longer silence the kernel has told of
        the first write.
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
    """Reads the notes of a launch, and goes on where it stopped. A missing file has none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._names: dict[str, str] = {}
        self._rest = REST
        self.tracks: dict[str, Track] = {}

    def read(self) -> dict[str, int]:
        """Take in what is new; how many bytes logs have lost at their heads since the last call, by name."""
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
        for entry in entries:  # there may be a million of them
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
        """Whole ones only: the last may still be on its way. Without a file that can be read: none."""
        with contextlib.suppress(OSError), os.fdopen(open_plain(self._path), "rb") as file:
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
