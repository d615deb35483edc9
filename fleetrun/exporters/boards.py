"""The event files of a job's processes, one folder each: `DIR/trainer.0`. Says once what cannot be written,
and goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fleetrun.exporters.lines import Line
from fleetrun.exporters.scalars import Point, Scalars
from fleetrun.exporters.standing import MOST_NAMES

if TYPE_CHECKING:
    from fleetrun.exporters.eventfile import EventFile

_FAR = 3600.0  # seconds: a clock that is further off than that is not believed


def _event_file(folder: Path) -> EventFile:
    from fleetrun.exporters.eventfile import EventFile  # late: a second, and many jobs never report

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
