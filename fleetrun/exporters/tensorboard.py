"""Write the numbers that processes report to TensorBoard event files, in one directory per process
(`DIR/trainer.0`).

The import of the package `tensorboard` takes a second, and many jobs report nothing. The import therefore
happens with the first event file.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

from fleetrun.aliases import Numbers, ShowText
from fleetrun.exporters.base import Context
from fleetrun.exporters.job_state import MOST_NAMES, Line, bounded, ranked
from fleetrun.files import new_file
from fleetrun.frozen import frozen

LOSS = "loss"
RATE = "throughput/samples_per_second"

_LARGEST_CLOCK_ERROR = 3600.0  # seconds; a report with a larger difference gets the time of this process
_VERSION = "brain.Event:2"
_WRITER = "fleetrun"


def exporter(context: Context) -> EventFiles:
    """Return the exporter `tensorboard`. Its argument is the directory."""
    return EventFiles(Path(context.argument), context.warn)


class EventFiles:
    """The event files of all processes. `warn` gets each problem once, and writing continues."""

    def __init__(self, folder: Path, warn: ShowText) -> None:
        self._folder = folder
        self._warn = warn
        self._names: dict[str, str] = {}  # directories by process
        self._scalars: dict[str, ChangedScalars] = {}
        self._files: dict[str, EventFile] = {}
        self._tables: dict[str, TableScalars] = {}
        self._warned: set[str] = set()

    def take(self, line: Line, now: float) -> None:
        """Handle a message. Raises KeyError, TypeError or ValueError for a line that `job_state` did not
        make.
        """
        if line.get("event") == "ready":
            self._names = {each["name"]: f"{each['role']}.{int(each['rank'])}" for each in ranked(line)}
        elif line.get("event") == "started":
            name = self._names.get(line["container"])
            if name in self._scalars:
                self._scalars[name].restart()
            if name in self._tables:
                self._tables[name].restart()
        elif line["is"] == "report" and line["container"] in self._names:
            self._report(self._names[line["container"]], line, now)

    def close(self) -> None:
        for name, tables in self._tables.items():
            if (last := tables.last()) is not None:
                self._write(name, *last)
        for each in self._files.values():
            each.close()

    def _report(self, name: str, line: Line, now: float) -> None:
        if line["tables"]:
            tables = self._tables.setdefault(name, TableScalars())
            if (some := tables.take(line, now)) is not None:
                self._write(name, *some)
        scalars = self._scalars.setdefault(name, ChangedScalars())
        point = scalars.take(line)
        if scalars.refused:
            self._warn_once(
                f"{name} reports more than {MOST_NAMES} different values; TensorBoard shows the first ones"
            )
        if point is not None:
            reported = line["time"]
            plausible = reported is not None and abs(reported - now) < _LARGEST_CLOCK_ERROR
            self._write(name, point, reported if plausible else now)

    def _write(self, name: str, point: ScalarPoint, wall: float) -> None:
        try:
            if name in self._files and self._files[name].deleted:
                self._warn_once(
                    f"event files in {self._folder} were deleted; writing new files without earlier values"
                )
                self._files.pop(name).close()
            if name not in self._files:
                self._files[name] = EventFile(self._folder / name)
            self._files[name].write(point.step, point.scalars, wall, restart=point.restart)
        except OSError as error:
            self._warn_once(
                f"event files in {self._folder} cannot be written: {error.strerror}; the job continues"
            )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)


@frozen
class ScalarPoint:
    """Numbers of one step by tag. `restart`: this is the first point of another attempt."""

    step: int
    scalars: dict[str, float]
    restart: bool


_TABLE_PERIOD = 60.0
"""Seconds between two points. A table may have hundreds of numbers, and people keep event files for long."""
_MOST_TABLES = 100
_OF_TABLES = (
    "rows", "bytes", "on_disk", "candidates", "new", "refused", "evicted", "pulls_s", "pushes_s", "ids_hour",
    "gradient_norm", "gradient_zeros", "value_norm", "value_zeros", "value_not_finite",
)  # fmt: skip


class TableScalars:
    """The tables of one server: once a minute, the last numbers of at most 100 tables, at the
    server's step.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start another process. Its steps follow the steps of its predecessor, as far as these were
        recovered.
        """
        self._known: dict[str, dict[str, float]] = {}
        self._next, self._written, self._step, self._time = 0.0, True, 0, 0.0
        self._restart = True

    def take(self, line: Line, now: float) -> tuple[ScalarPoint, float] | None:
        """Return the numbers to write and their time, or None if it is too early."""
        for name, numbers in line["tables"].items():
            if name not in self._known and len(self._known) >= _MOST_TABLES:
                continue
            found = {f"tables/{name}/{what}": numbers[what] for what in _OF_TABLES if what in numbers}
            if pulled := numbers.get("pulled_keys_s"):
                found[f"tables/{name}/miss_ratio"] = numbers.get("missed_keys_s", 0) / pulled
            self._known[name] = found
        self._step, self._time, self._written = int(line["server"].get("step", 0)), now, False
        if now < self._next:
            return None
        self._next = now + _TABLE_PERIOD
        return self.last()

    def last(self) -> tuple[ScalarPoint, float] | None:
        """Return the numbers that were not written."""
        if self._written:
            return None
        restart, self._restart, self._written = self._restart, False, True
        scalars = {tag: number for each in self._known.values() for tag, number in each.items()}
        return ScalarPoint(self._step, scalars, restart), self._time


class ChangedScalars:
    """A selection from the reports of one process: each number once per step, unless it changes."""

    def __init__(self) -> None:
        self.refused = False
        """True if the script used too many names."""
        self._restart = True
        self._reports = 0
        self._written: dict[str, tuple[int, float]] = {}

    def restart(self) -> None:
        """Start another attempt, which may repeat steps of the previous one."""
        self._restart = True
        self._reports = 0
        self._written = dict.fromkeys(self._written, (-1, 0.0))

    def take(self, line: Line) -> ScalarPoint | None:
        """Return the new numbers of a report, or None if it has no new number. Without a step, the number of
        the report is the step.
        """
        self._reports += 1
        step = int(line["step"]) if line["step"] is not None else self._reports
        values = bounded(line["values"], {name: None for name in self._written if name not in (LOSS, RATE)})
        self.refused |= len(values) < len(line["values"])
        if line["loss"] is not None:
            values[LOSS] = line["loss"]
        # The rate is measured over time, so it changes within a long step. Only its first value is written.
        known = self._written.get(RATE)
        written = line["step"] is not None and known is not None and known[0] == line["step"]
        if line["rate"] is not None and not written:
            values[RATE] = line["rate"]
        new = {tag: value for tag, value in values.items() if self._written.get(tag) != (step, value)}
        if not new:
            return None
        self._written |= {tag: (step, value) for tag, value in new.items()}
        restart, self._restart = self._restart, False
        return ScalarPoint(step, new, restart)


class EventFile:
    """A new event file in `folder`, by TensorBoard's own record writer. Raises OSError.

    When `write` returns, the file has the whole record, or no part of it.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = event_pb2
        self._summary = summary_pb2
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = (
            f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        )
        self.path = folder / name
        self._file = _AtomicFile(new_file(self.path, 0o644))
        self._writer = RecordWriter(self._file)
        source = event_pb2.SourceMetadata(writer=_WRITER)
        try:
            self._add(event_pb2.Event(wall_time=now, file_version=_VERSION, source_metadata=source))
        except OSError:  # a full disk brings every report here: leave no file behind, and none open
            self._file.close()
            self.path.unlink(missing_ok=True)
            raise

    def write(self, step: int, scalars: Numbers, wall: float, *, restart: bool) -> None:
        """Write numbers. `wall` is in seconds since the epoch.

        With `restart`, readers drop later steps of an earlier attempt. Raises OSError and leaves the file
        unchanged.
        """
        if restart:
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(self._event.Event(wall_time=wall, step=step, session_log=start))
        values = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        summary = self._summary.Summary(value=values)
        self._add(self._event.Event(wall_time=wall, step=step, summary=summary))

    @property
    def deleted(self) -> bool:
        """True if the file was deleted. A renamed file is not deleted."""
        return self._file.deleted

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())


class _AtomicFile:
    """A file that takes whole records only. A torn record would hide all later records from readers."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size = 0

    def write(self, data: bytes) -> None:
        try:
            written = os.pwrite(self._fd, data, self._size)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += written

    @property
    def deleted(self) -> bool:
        try:
            return os.fstat(self._fd).st_nlink == 0
        except OSError:  # a stale handle on a network disk
            return True

    def flush(self) -> None:
        """Do nothing, because nothing is buffered. RecordWriter needs this method."""

    def close(self) -> None:
        os.close(self._fd)
