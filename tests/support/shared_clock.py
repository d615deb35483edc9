"""One time for several processes of a test. It stands still as long as one of those who take part in it does:
so nobody's lease ends because a machine was busy.

    with SharedClock(file) as clock:        in the process of the test, which lets it pass
        place = clock.place()               for a process, which then uses Shared(file, place) as its clock
        clock.leave(place)                  it is stopped or killed: from now on time passes without it
        clock.join(place)
"""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path
from types import TracebackType

_PLACES = 64
_BEGIN = 1000.0
_STEP = 0.05
"""Seconds at most that pass at once, however long the process of the test stood still."""
_AHEAD = 0.2
"""Seconds at most by which anybody is behind."""
LOOK_EVERY = 0.05
"""Seconds after which whoever takes part has to look at the time."""


class Shared:
    """The clock of one process."""

    def __init__(self, file: Path, place: int) -> None:
        self._times = _times(file)
        self._place = place

    def __call__(self) -> float:
        now = self._times[_PLACES]
        self._times[self._place] = now
        return now

    def end(self) -> None:
        """This process looks no more."""
        self._times[self._place] = float("inf")


class SharedClock:
    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(8 * (_PLACES + 1)))
        self._times = _times(file)
        self._times[_PLACES] = _BEGIN
        self._given = 0
        self._present: set[int] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> SharedClock:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def __call__(self) -> float:
        return self._times[_PLACES]

    def place(self) -> int:
        """For one more process: time stands still until it looks at it."""
        place = self._given
        self._given += 1
        self.join(place)
        return place

    def join(self, place: int) -> None:
        with self._lock:
            self._present.add(place)

    def leave(self, place: int) -> None:
        with self._lock:
            self._present.discard(place)

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(0.005):
            now, before = time.monotonic(), looked
            looked = now
            with self._lock:
                if all(self._times[place] > self() - _AHEAD for place in self._present):
                    self._times[_PLACES] += min(now - before, _STEP)


def _times(file: Path) -> memoryview:
    with file.open("r+b") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0)).cast("d")
