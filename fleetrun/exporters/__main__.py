"""The exporter process: reads lines from the launcher, writes event files and serves metrics.

It ends when the launcher closes its input. The launcher reads its warnings from its output.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from fleetrun.exporters import job_state
from fleetrun.exporters.job_state import Job, Line
from fleetrun.exporters.tensorboard import EventFiles


class Exporter:
    """Takes the lines in order; `warn` gets what the user should know."""

    def __init__(self, warn: Callable[[str], None], wall: Callable[[], float] = time.time) -> None:
        self.job = Job()
        self.lock = threading.Lock()
        self._event_files: EventFiles | None = None
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
        if self._event_files is not None:
            self._event_files.take(line, now)

    def close(self) -> None:
        if self._event_files is not None:
            self._event_files.close()

    def _begin(self, line: Line) -> None:
        if line["tensorboard"] is not None:
            self._event_files = EventFiles(Path(line["tensorboard"]), self._warn)
        if line["listening"] is not None:
            # Late: a job without metrics does not need the package prometheus_client.
            from fleetrun.exporters.prometheus import JobMetrics, serve

            serve(socket.socket(fileno=int(line["listening"])), JobMetrics(self.job), self.lock)


def export(incoming: Iterable[bytes], write: Callable[[bytes], None]) -> None:
    """Until the end of `incoming`."""
    exporter = Exporter(lambda text: write(job_state.warning_message(text)))
    for raw in incoming:
        exporter.take(raw)
    exporter.close()


def main() -> None:
    os.nice(10)  # the processors belong to the job
    export(sys.stdin.buffer, _write)


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
