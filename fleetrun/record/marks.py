"""When the log files had which size: what their lines lack, a time. Written beside them, at most once a
second and only while they grow; `times.py` reads it.

    # trainer.0 trainer.1        the names that the numbers below stand for
    rest 1                       seconds between two looks while there is something to see
    1795332112.98 0:4096 1:310   at that moment these logs were so long
    1795332150.02 0-1048576      --log_rotate took so many bytes out of the head of this one
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fleetrun.files import ask_for_writes
from fleetrun.pod.loop import Loop, Timer
from fleetrun.record.appending import Appender

SUFFIX = ".marks"


def marks_path(log_dir: Path, job_id: str, pod: str) -> Path:
    return log_dir / f"{job_id}.{pod}{SUFFIX}"


REST = 1.0  # seconds
_QUIET = 0.02
_LONGEST_REST = 64.0
_ENOUGH = 8 << 20  # bytes, after which the rest doubles: a job of weeks must not fill a disk with this


class Marks:
    """Of the logs of one pod's containers, by name. Woken as a `Watch` is: hand SIGIO to `told`."""

    def __init__(
        self,
        path: Path,
        loop: Loop,
        wall: Callable[[], float] = time.time,
        ask: Callable[[int], None] = ask_for_writes,
    ) -> None:
        self._path = path
        self._loop = loop
        self._wall = wall
        self._ask_kernel = ask
        self._names: list[str] = []
        self._logs: list[str] = []
        self._sizes: list[int] = []
        self._file: Appender | None = None
        self._folder = -1
        self._rest = REST
        self._quiet = _QUIET
        self._timer: Timer | None = None

    def start(self, logs: Mapping[str, Path]) -> None:
        """Once these logs are there, by the names of their containers. The next pods have the same."""
        if self._names:
            return
        self._names = list(logs)
        self._logs = [str(each) for each in logs.values()]
        self._sizes = [0] * len(self._logs)
        try:
            self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return
        self._look()

    def told(self) -> None:
        """Something in the log directory was written to."""
        if self._folder >= 0 and self._timer is None:
            if self._mark(range(len(self._logs))):
                self._quiet, rest = _QUIET, self._rest
            else:  # only others write there: look again soon, but not as often as they
                rest, self._quiet = self._quiet, min(REST, 2 * self._quiet)
            self._timer = self._loop.after(rest, self._look)

    def heard(self, event: Mapping[str, Any]) -> None:
        """An event of the record: the end of a process is the time of its last line."""
        if event.get("event") == "exited" and event.get("container") in self._names:
            self._mark([self._names.index(event["container"])])

    def cut(self, log: Path, by: int) -> None:
        """This log lost so many bytes at its head."""
        if by and str(log) in self._logs:
            number = self._logs.index(str(log))
            self._sizes[number] -= by
            self._write(f"{self._wall():.2f} {number}-{by}")

    def close(self) -> None:
        """Nothing is written any more. May be called twice."""
        if self._folder < 0:
            return
        self._mark(range(len(self._logs)))
        os.close(self._folder)
        self._folder = -1
        if self._timer is not None:
            self._timer.cancel()
        if self._file is not None:
            self._file.close()

    def _look(self) -> None:
        """Ask for news, then see what is there already: in this order, so that no write falls between."""
        self._timer = None
        will_tell = self._ask()
        if self._mark(range(len(self._logs))) or not will_tell:
            self._timer = self._loop.after(self._rest, self._look)

    def _ask(self) -> bool:
        try:
            self._ask_kernel(self._folder)
        except OSError:
            return False
        return True

    def _mark(self, numbers: Iterable[int]) -> bool:
        """Write down which of them have changed their size; whether any has."""
        changed = []
        for number in numbers:
            try:
                size = os.stat(self._logs[number]).st_size  # noqa: PTH116  (a Path would take three times as long)
            except OSError:
                continue
            if size != self._sizes[number]:
                self._sizes[number] = size
                changed.append(f"{number}:{size}")
        if changed:
            self._write(f"{self._wall():.2f} {' '.join(changed)}")
        return bool(changed)

    def _write(self, line: str) -> None:
        if self._file is None:
            self._file = Appender(self._path)
            self._file.append(f"# {' '.join(self._names)}\nrest {self._rest:g}".encode())
        self._file.append(line.encode())
        rest = min(_LONGEST_REST, REST * 2.0 ** (self._file.written // _ENOUGH))
        if rest > self._rest:
            self._rest = rest
            self._file.append(f"rest {rest:g}".encode())
