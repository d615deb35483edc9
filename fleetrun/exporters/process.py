"""Run the exporter process: read messages from the launcher, and pass them to the exporters that the first
message names. The process ends when the launcher closes its input. The launcher reads its warnings from its
output.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable

from fleetrun import plugins
from fleetrun.aliases import ShowText
from fleetrun.exporters import job_state
from fleetrun.exporters.base import Context, Exporter
from fleetrun.exporters.job_state import Job
from fleetrun.pod.companion import send_line, warning_message


class Exporters:
    """The exporters of a job, which get the messages in order. `warn` gets messages for the user."""

    def __init__(self, warn: ShowText) -> None:
        self.job = Job()
        self.lock = threading.Lock()
        self._exporters: list[tuple[str, Exporter]] = []
        self._warn = warn

    def take(self, raw: bytes) -> None:
        line = job_state.read_message(raw)
        if line is None:
            return
        now = time.time()
        with self.lock:
            self.job.take(line, now)
        if line["is"] == "begin":
            for name, argument in line["exporters"]:
                self._begin(name, argument)
        self._each(lambda exporter: exporter.take(line, now))

    def close(self) -> None:
        self._each(lambda exporter: exporter.close())

    def _begin(self, name: str, argument: str) -> None:
        context = Context(argument=argument, job=self.job, lock=self.lock, warn=self._warn)
        try:
            made = plugins.load("exporters", name, has="__call__")(context)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever another package raises)
            self._report(name, error)
        else:
            self._exporters.append((name, made))

    def _each(self, call: Callable[[Exporter], None]) -> None:
        """Call all exporters. An exporter that fails gets no more messages."""
        for each in list(self._exporters):
            try:
                call(each[1])
            except (Exception, SystemExit) as error:  # noqa: BLE001  (the same)
                self._exporters.remove(each)
                self._report(each[0], error)

    def _report(self, name: str, error: BaseException) -> None:
        self._warn(f"{plugins.described('exporters', name, error)}; the job continues without it")


def export(incoming: Iterable[bytes], write: Callable[[bytes], None]) -> None:
    """Export until the end of `incoming`."""
    exporters = Exporters(lambda text: write(warning_message(text)))
    for raw in incoming:
        exporters.take(raw)
    exporters.close()


def main() -> None:
    os.nice(10)  # the CPU cores belong to the job
    export(sys.stdin.buffer, send_line)


if __name__ == "__main__":
    main()
