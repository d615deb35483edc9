"""The exporter process: reads lines from the launcher, writes event files and serves metrics. Ends when the
launcher does; the launcher reads its warnings from its output.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fleetrun.exporters import job_state
from fleetrun.exporters.job_state import MOST_NAMES, Job, Line, Point, Scalars

if TYPE_CHECKING:
    from fleetrun.exporters.tensorboard import EventFile


# ---- The event files of a job's processes, one folder each: `DIR/trainer.0`. Says once what cannot be
# written, and goes on.

_FAR = 3600.0  # seconds: a clock that is further off than that is not believed


def _event_file(folder: Path) -> EventFile:
    from fleetrun.exporters.tensorboard import EventFile  # late: a second, and many jobs never report

    return EventFile(folder)


class Boards:
    def __init__(
        self,
        folder: Path,
        warn: Callable[[str], None],
        make: Callable[[Path], EventFile] = _event_file,
    ) -> None:
        self._folder = folder
        self._warn = warn
        self._make = make
        self._names: dict[str, str] = {}
        self._scalars: dict[str, Scalars] = {}
        self._files: dict[str, EventFile] = {}
        self._told: set[str] = set()

    def take(self, line: Line, now: float) -> None:
        """Raises KeyError, TypeError or ValueError for what is not as `lines` makes it."""
        if line["is"] == "pod":
            self._names = {each["name"]: f"{each['role']}.{int(each['rank'])}" for each in line["containers"]}
        elif line["is"] == "event" and line["event"] == "started":
            who = self._names.get(line["container"])
            if who in self._scalars:
                self._scalars[who].begins()
        elif line["is"] == "report" and line["container"] in self._names:
            self._report(self._names[line["container"]], line, now)

    def close(self) -> None:
        for each in self._files.values():
            each.close()

    def _report(self, who: str, line: Line, now: float) -> None:
        scalars = self._scalars.setdefault(who, Scalars())
        point = scalars.take(line)
        if scalars.refused:
            self._once(
                f"{who} reports more than {MOST_NAMES} names of values: TensorBoard gets the first ones"
            )
        if point is not None:
            said = line["time"]
            self._write(who, point, said if said is not None and abs(said - now) < _FAR else now)

    def _write(self, who: str, point: Point, wall: float) -> None:
        try:
            if who in self._files and self._files[who].deleted:
                self._once(
                    f"event files in {self._folder} were deleted: new ones begin, without what was in those"
                )
                self._files.pop(who).close()
            if who not in self._files:
                self._files[who] = self._make(self._folder / who)
            self._files[who].write(point, wall)
        except OSError as error:
            self._once(f"event files in {self._folder} cannot be written: {error.strerror}; the job goes on")

    def _once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._warn(text)


# ---- The process that exports: lines of the launcher in, event files and metrics out. Ends when the launcher
# does; what it has to say, the launcher reads from its output.


class Exporter:
    """Takes the lines in their order. `warn` gets what the user should know."""

    def __init__(self, warn: Callable[[str], None], wall: Callable[[], float] = time.time) -> None:
        self.job = Job()
        self.lock = threading.Lock()
        self._boards: Boards | None = None
        self._warn = warn
        self._wall = wall

    def take(self, raw: bytes) -> None:
        line = job_state.read_message(raw)
        if line is None:
            return
        now = self._wall()
        if line["is"] == "begin":
            self._begin(line)
        with self.lock:
            self.job.take(line, now)
        if self._boards is not None:
            self._boards.take(line, now)

    def close(self) -> None:
        if self._boards is not None:
            self._boards.close()

    def _begin(self, line: Line) -> None:
        if line["tensorboard"] is not None:
            self._boards = Boards(Path(line["tensorboard"]), self._warn)
        if line["listening"] is not None:
            from fleetrun.exporters.prometheus import (
                JobMetrics,  # late: who wants one of both needs one package
                serve,
            )

            serve(socket.socket(fileno=int(line["listening"])), JobMetrics(self.job), self.lock)


def export(incoming: Iterable[bytes], say: Callable[[bytes], None]) -> None:
    """Until there is no more."""
    exporter = Exporter(lambda text: say(job_state.warning_message(text)))
    for raw in incoming:
        exporter.take(raw)
    exporter.close()


def main() -> None:
    os.nice(10)  # processors are the job's
    export(sys.stdin.buffer, _say)


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
