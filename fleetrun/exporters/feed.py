"""The launcher's end of exporting: checks what is needed, starts the process that exports, and tells it what
happens. Never waits for it while the job runs.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetrun.envs import companion
from fleetrun.envs.network import Ports
from fleetrun.envs.requirements import check_package
from fleetrun.envs.settings import LaunchSettings
from fleetrun.exporters import lines, needs
from fleetrun.pod.companion import Companion
from fleetrun.pod.loop import Loop
from fleetrun.pod.spec import PodSpec
from fleetrun.pod.status import Exit
from fleetrun.progress.desk import Desk
from fleetrun.progress.reports import Report

_PATIENCE = 30.0  # seconds at the end for what has to be written; a signal ends it
_SOON = 1.0  # seconds of it in silence


class Feed:
    """Of one launch, over all its pods. `say` and `warn` reach the user."""

    def __init__(
        self,
        loop: Loop,
        beside: set[int],
        desk: Desk,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._beside = beside
        self._desk = desk
        self._say = say
        self._warn = warn
        self._ports = Ports()
        self._companion: Companion | None = None
        self._writes = False
        self._last_words = ""

    def open(self, settings: LaunchSettings, spec: PodSpec) -> None:
        """Before anything else starts. Raises LaunchError for what cannot be."""
        folder = listening = None
        if settings.tensorboard is not None:
            check_package("tensorboard", "--tensorboard", "monitor")
            folder = needs.check_folder(settings.tensorboard)
        if settings.metrics_port is not None:
            check_package("prometheus_client", "--metrics_port", "monitor")
            endpoints = [each.endpoint for each in spec.containers]
            listening = needs.listening(settings.metrics_host, settings.metrics_port, self._ports, endpoints)
        self._start(settings, spec, folder, listening)
        self._desk.listen(self._report)
        if folder is not None:
            self._say(f"TensorBoard: event files in {folder}")
        if listening is not None:
            self._say(f"Metrics: {needs.shown(listening)}")
            listening.close()  # the other process has it

    def pod(self, spec: PodSpec) -> None:
        self._write(lines.pod(spec))

    def event(self, said: dict[str, Any]) -> None:
        """Of the record."""
        line = lines.event(said)
        if line is not None:
            self._write(line)

    def close(self, hurry: int | None = None) -> None:
        """Waits until what was reported is written, unless `hurry` becomes readable. May be called twice."""
        self._ports.close()
        beside, self._companion = self._companion, None
        if beside is None:
            return
        if beside.lost:
            self._warn(f"{beside.lost} reports came faster than they could be exported and are lost")
        if not self._writes:
            beside.close()
            return
        if not beside.finish(_SOON, hurry):
            self._say("waiting until the event files are written; Ctrl-C ends that")
        if not beside.close(_PATIENCE, hurry):
            why = "interrupted" if _readable(hurry) else f"not done within {_PATIENCE:g} s"
            self._warn(f"{why}: the last reports may be missing in the event files")
        elif beside.exit is not None and not beside.exit.ok:
            self._warn(f"{self._how(beside.exit)}; the last reports may be missing in the event files")

    def _start(
        self,
        settings: LaunchSettings,
        spec: PodSpec,
        folder: Path | None,
        listening: socket.socket | None,
    ) -> None:
        keep = [listening.fileno()] if listening is not None else []
        self._writes = folder is not None
        self._companion = Companion(
            self._loop,
            self._beside,
            companion.command("fleetrun.exporters"),
            companion.environment(os.environ),
            heard=self._heard,
            ended=self._ended,
            keep=keep,
        )
        facts = {
            "job": settings.job_id,
            "pod": spec.name,
            "mode": str(spec.mode),
            "host": os.uname().nodename,
        }
        self._write(
            lines.begin(
                facts=facts,
                tensorboard=str(folder) if folder is not None else None,
                listening=keep[0] if keep else None,
            )
        )

    def _report(self, container: str, said: Report) -> None:
        self._write(lines.report(container, said, self._desk.rate(container)))

    def _write(self, line: bytes) -> None:
        if self._companion is not None:
            self._companion.write(line)

    def _heard(self, line: bytes) -> None:
        text = lines.warned(line)
        if text is not None:
            self._warn(text)
        elif line.strip():
            self._last_words = line.decode(errors="replace").strip()

    def _ended(self, exit: Exit) -> None:
        self._companion = None
        self._warn(f"{self._how(exit)}; the job goes on without it")

    def _how(self, exit: Exit) -> str:
        words = f": {self._last_words}" if self._last_words else ""
        return f"the process that exports what is reported {exit}{words}"


def _readable(fd: int | None) -> bool:
    poll = select.poll()
    if fd is not None:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
