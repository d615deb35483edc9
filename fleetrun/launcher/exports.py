"""Start the exporter process, and send it the events and the progress reports. While the job runs, the
launcher never waits for the exporter.
"""

from __future__ import annotations

import os

from fleetrun.aliases import Fields
from fleetrun.envs.progress_report import Report
from fleetrun.exporters.job_state import message
from fleetrun.exporters.targets import check_folder, listening_socket, metrics_url
from fleetrun.host import interpreter
from fleetrun.host.interpreter import check_package
from fleetrun.host.network import Ports
from fleetrun.launcher.parts import Launch, Part, Reach
from fleetrun.pod.companion import Companion, CompanionOutput
from fleetrun.pod.process import Exit
from fleetrun.proc import readable
from fleetrun.record.journal import plain

_SPENDING = frozenset({"ready", "progress", "exited", "over"})
"""Events after which the time of the job is exported again."""
_OF_REPORTS = ("step", "samples", "loss", "values", "server", "tables", "time")
"""Fields of a report that are sent unchanged."""
_FINISH_TIMEOUT = 30.0  # seconds at the end to write all reports; a signal ends the wait
_SILENT_WAIT = 1.0  # seconds of this wait before a warning


class Exports(Part):
    """The exports of a launch with --tensorboard, --metrics_port or --export."""

    def __init__(self, launch: Launch, reach: Reach) -> None:
        settings, spec = launch.settings, launch.spec
        self._goodput = launch.status.goodput
        self._speeds = launch.progress.speeds
        self._info, self._warn = launch.console.info, launch.warn
        self._ports = Ports()
        folder = listening = None
        if settings.tensorboard is not None:
            check_package("tensorboard", "--tensorboard", "monitor")
            folder = check_folder(settings.tensorboard)
        if settings.metrics_port is not None:
            check_package("prometheus_client", "--metrics_port", "monitor")
            endpoints = [each.endpoint for each in spec.containers]
            listening = listening_socket(settings.metrics_host, settings.metrics_port, self._ports, endpoints)
        exporters = [
            *([("tensorboard", str(folder))] if folder is not None else []),
            *([("prometheus", str(listening.fileno()))] if listening is not None else []),
            *settings.export,
        ]
        self._writes = folder is not None or bool(settings.export)
        self._what = "the exports" if settings.export else "the event files"
        self._output = CompanionOutput(self._warn)
        self._companion = Companion(
            launch.loop,
            launch.companions,
            interpreter.helper_command("fleetrun.exporters.process"),
            received=self._output.take,
            ended=self._ended,
            keep=[] if listening is None else [listening.fileno()],
        )
        facts = {
            "job": settings.job_id,
            "pod": spec.name,
            "mode": str(spec.mode),
            "host": os.uname().nodename,
        }
        self._send("begin", {"facts": facts, "exporters": exporters})
        launch.progress.subscribe(self._report)
        if folder is not None:
            self._info(f"TensorBoard: event files in {folder}")
        if listening is not None:
            self._info(f"Metrics: {metrics_url(listening)}")
            listening.close()  # the exporter process has inherited the socket

    def noted(self, line: Fields) -> None:
        if line["event"] != "progress":  # the exporter gets each report itself
            self._send("event", plain(line))
        if line["event"] in _SPENDING:
            # Send only certain time, because a counter must never decrease.
            self._send("spent", {"seconds": self._goodput.seconds()})

    def _report(self, container: str, report: Report) -> None:
        activity = report.activity
        fields = {
            "container": container,
            "rate": self._speeds(container)[0],
            "activity": activity and (activity.what, activity.done, activity.of),
            **{name: getattr(report, name) for name in _OF_REPORTS},
        }
        self._send("report", fields)

    def _send(self, kind: str, fields: Fields) -> None:
        self._companion.write(message(kind, fields))

    def close(self, urgent: int) -> None:
        """Wait until all reports are written, or `urgent` becomes readable."""
        self._ports.close()
        companion = self._companion
        if not companion.alive:
            return
        if companion.lost:
            self._warn(f"{companion.lost} reports were lost, because the exporter was too slow")
        if not self._writes:
            companion.close()
            return
        if not companion.finish(_SILENT_WAIT, urgent):
            self._info(f"waiting until {self._what} are written; Ctrl-C stops waiting")
        missing = f"the last reports may be missing in {self._what}"
        if not companion.close(_FINISH_TIMEOUT, urgent):
            why = "interrupted" if readable(urgent) else f"not finished within {_FINISH_TIMEOUT:g} s"
            self._warn(f"{why}: {missing}")
        elif companion.exit is not None and not companion.exit.ok:
            self._warn(f"{self._exit_text(companion.exit)}; {missing}")

    def _ended(self, exit: Exit) -> None:
        self._warn(f"{self._exit_text(exit)}; the job continues without it")

    def _exit_text(self, exit: Exit) -> str:
        return f"the exporter process {self._output.end(exit)}"
