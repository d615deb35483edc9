"""The process that exports: lines of the launcher in, event files and metrics out. Ends when the launcher
does; what it has to say, the launcher reads from its output.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from fleetrun.exporters import lines
from fleetrun.exporters.boards import Boards
from fleetrun.exporters.lines import Line
from fleetrun.exporters.standing import Job


class Exporter:
    """Takes the lines in their order. `warn` gets what the user should know."""

    def __init__(self, warn: Callable[[str], None], wall: Callable[[], float] = time.time) -> None:
        self.job = Job()
        self.lock = threading.Lock()
        self._boards: Boards | None = None
        self._warn = warn
        self._wall = wall

    def take(self, raw: bytes) -> None:
        line = lines.read(raw)
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
            from fleetrun.exporters.metrics import JobMetrics  # late: who wants one of both needs one package
            from fleetrun.exporters.server import serve

            serve(socket.socket(fileno=int(line["listening"])), JobMetrics(self.job), self.lock)


def export(incoming: Iterable[bytes], say: Callable[[bytes], None]) -> None:
    """Until there is no more."""
    exporter = Exporter(lambda text: say(lines.warning(text)))
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
