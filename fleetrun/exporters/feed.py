"""The launcher's side of exporting: checks the folder and the port, starts the exporter process, and sends it
events and reports. While the job runs it never waits for the exporter.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fleetrun.aliases import Fields, Numbers, Say
from fleetrun.envs.contract import split_endpoint
from fleetrun.envs.progress_report import Report
from fleetrun.envs.settings.options import LaunchSettings
from fleetrun.errors import LaunchError, PortError, UsageError
from fleetrun.exporters import job_state
from fleetrun.host import interpreter
from fleetrun.host.interpreter import check_package
from fleetrun.host.network import Ports
from fleetrun.pod.companion import Companion, Said
from fleetrun.pod.loop import Loop
from fleetrun.pod.process import Exit
from fleetrun.pod.spec import PodSpec
from fleetrun.proc import readable
from fleetrun.progress.receiver import ProgressReceiver


def check_folder(name: str) -> Path:
    """Create the folder if necessary. Raises UsageError if it cannot be written to."""
    path = Path(name).absolute()
    if "://" in name:
        raise UsageError(
            f"--tensorboard {name}: it must be a local folder",
            hint="Use a local folder, and copy or mount it.",
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is not a folder" if error.errno in (errno.EEXIST, errno.ENOTDIR) else error.strerror
        raise UsageError(f"--tensorboard {name} cannot be used: {why}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"--tensorboard {name} cannot be used: no permission to write there")
    return path


def listening_socket(host: str, port: int, ports: Ports, endpoints: Iterable[str]) -> socket.socket:
    """A listening socket; port 0 takes any free port. `ports` reserves it, `endpoints` are those of the job.

    Raises UsageError for an address of another machine, PortError for a port that is in use.
    """
    if port and port in {split_endpoint(each)[1] for each in endpoints if each}:
        raise PortError(f"--metrics_port {port} is used by this job itself", hint="Choose another port.")
    try:
        number = ports.fixed(port) if port else ports.any()
    except PortError as error:
        hint = " ".join(filter(None, (error.hint, "With 0 any free port is used.")))
        raise PortError(f"--metrics_port: {error.message}", hint=hint) from None
    family, address = _resolved(host, number)
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(f"--metrics_port: cannot create a socket: {error.strerror}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # binds although `ports` holds the port
        sock.bind(address)
        sock.listen(64)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"--metrics_host {host} is not an address of this machine") from None
        raise PortError(f"--metrics_port: port {number} of {host} cannot be used: {error.strerror}") from None
    return sock


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a valid host name"
        raise UsageError(f"--metrics_host {host} has no address: {why}") from None
    family, _, _, _, address = found[0]
    return family, address


def metrics_url(sock: socket.socket) -> str:
    """`http://127.0.0.1:9100/metrics`"""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/metrics" if ":" in host else f"http://{host}:{port}/metrics"


_FINISH_TIMEOUT = 30.0  # seconds at the end for writing what was reported; a signal ends it
_SILENT_WAIT = 1.0  # seconds of that before a warning


class Feed:
    """One per launch, for all its pods. `say` and `warn` show a message to the user."""

    def __init__(
        self,
        loop: Loop,
        companions: set[int],
        receiver: ProgressReceiver,
        say: Say,
        warn: Say,
    ) -> None:
        self._loop = loop
        self._companions = companions
        self._receiver = receiver
        self._say = say
        self._warn = warn
        self._ports = Ports()
        self._companion: Companion | None = None
        self._writes = False
        self._what = "the event files"
        self._said = Said(warn)

    def open(self, settings: LaunchSettings, spec: PodSpec) -> None:
        """Called before any process of the job starts. Raises LaunchError."""
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
        if settings.export:
            self._what = "the exports"
        self._start(settings, spec, exporters, [] if listening is None else [listening.fileno()])
        self._receiver.subscribe(self._report)
        if folder is not None:
            self._say(f"TensorBoard: event files in {folder}")
        if listening is not None:
            self._say(f"Metrics: {metrics_url(listening)}")
            listening.close()  # the exporter process has inherited it

    def event(self, said: Fields) -> None:
        """Of the record."""
        self._write(job_state.event_message(said))

    def spent(self, seconds: Numbers) -> None:
        """By what the time of the job went into so far."""
        self._write(job_state.spent_message(seconds))

    def close(self, urgent: int | None = None) -> None:
        """Wait until all reports are written, or `urgent` becomes readable. May be called twice."""
        self._ports.close()
        companion, self._companion = self._companion, None
        if companion is None:
            return
        if companion.lost:
            self._warn(f"{companion.lost} reports were lost: they came faster than they could be exported")
        if not self._writes:
            companion.close()
            return
        if not companion.finish(_SILENT_WAIT, urgent):
            self._say(f"waiting until {self._what} are written; Ctrl-C stops waiting")
        if not companion.close(_FINISH_TIMEOUT, urgent):
            interrupted = urgent is not None and readable(urgent)
            why = "interrupted" if interrupted else f"not finished within {_FINISH_TIMEOUT:g} s"
            self._warn(f"{why}: the last reports may be missing in {self._what}")
        elif companion.exit is not None and not companion.exit.ok:
            self._warn(f"{self._exit_text(companion.exit)}; the last reports may be missing in {self._what}")

    def _start(
        self,
        settings: LaunchSettings,
        spec: PodSpec,
        exporters: Sequence[tuple[str, str]],
        keep: Sequence[int],
    ) -> None:
        self._companion = Companion(
            self._loop,
            self._companions,
            interpreter.helper_command("fleetrun.exporters.process"),
            heard=self._said.take,
            ended=self._ended,
            keep=keep,
        )
        facts = {
            "job": settings.job_id,
            "pod": spec.name,
            "mode": str(spec.mode),
            "host": os.uname().nodename,
        }
        self._write(job_state.begin_message(facts, exporters))

    def _report(self, container: str, said: Report) -> None:
        self._write(job_state.report_message(container, said, self._receiver.speeds(container)[0]))

    def _write(self, line: bytes) -> None:
        if self._companion is not None:
            self._companion.write(line)

    def _ended(self, exit: Exit) -> None:
        self._companion = None
        self._warn(f"{self._exit_text(exit)}; the job continues without it")

    def _exit_text(self, exit: Exit) -> str:
        return f"the exporter process {self._said.end(exit)}"
