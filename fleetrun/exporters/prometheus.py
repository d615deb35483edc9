"""The state of a job as Prometheus metrics, served over HTTP. The names of the metrics are a promise:
docs/monitoring.md lists them.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetrun.exporters.job_state import Job, Standing

# ---- How a job stands, as Prometheus metrics. Their names are a promise: docs/monitoring.md lists them.

_WHO = ("role", "rank")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")

_GAUGES: Sequence[tuple[str, str, Callable[[Standing], float | None]]] = (
    ("fleetrun_process_up", "1 while the process runs", lambda each: float(each.up)),
    (
        "fleetrun_process_start_time_seconds",
        "When its last process began, since the epoch",
        lambda each: each.started,
    ),
    ("fleetrun_step", "The step that it reported last", lambda each: each.step),
    ("fleetrun_samples_per_second", "Its pace over the last ten seconds", lambda each: each.rate),
    ("fleetrun_loss", "The loss that it reported last", lambda each: each.loss),
    (
        "fleetrun_last_report_time_seconds",
        "When it last reported anything, since the epoch",
        lambda each: each.reported,
    ),
    (
        "fleetrun_process_resident_memory_bytes",
        "Resident memory, without its children",
        lambda each: usage(each.pid)[0],
    ),
)
_COUNTERS: Sequence[tuple[str, str, Callable[[Standing], float | None]]] = (
    ("fleetrun_process_starts", "How often it was started", lambda each: each.starts),
    ("fleetrun_samples", "Samples since its process began", lambda each: each.samples),
    ("fleetrun_process_cpu_seconds", "Processor time of its process", lambda each: usage(each.pid)[1]),
)


class JobMetrics(Collector):
    """Asked for at each scrape. `job` must not change meanwhile: the caller holds its lock."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def collect(self) -> Iterator[Metric]:
        yield from self._whole()
        processes = list(self._job.processes.values())
        for name, help, read in _GAUGES:
            yield _filled(GaugeMetricFamily(name, help, labels=_WHO), processes, read)
        for name, help, read in _COUNTERS:
            yield _filled(CounterMetricFamily(name, help, labels=_WHO), processes, read)
        yield from _named(processes)

    def _whole(self) -> Iterator[Metric]:
        job = self._job
        yield InfoMetricFamily("fleetrun_job", "The job and its part on this machine", value=job.facts)
        if job.started is not None:
            yield GaugeMetricFamily(
                "fleetrun_job_start_time_seconds", "When the launch began, since the epoch", value=job.started
            )
        yield CounterMetricFamily("fleetrun_failures", "Processes that failed", value=job.failures)
        yield CounterMetricFamily("fleetrun_restarts", "Restarts after a failure", value=job.restarts)
        yield CounterMetricFamily("fleetrun_hangs", "Times that nothing went on", value=job.hangs)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily,
    processes: Sequence[Standing],
    read: Callable[[Standing], float | None],
) -> Metric:
    for each in processes:
        value = read(each)
        if value is not None:
            family.add_metric((each.role, str(each.rank)), value)
    return family


def _named(processes: Sequence[Standing]) -> Iterator[Metric]:
    """What has a label more."""
    exits = CounterMetricFamily(
        "fleetrun_process_exits", "How often its process ended, and how", labels=(*_WHO, "outcome")
    )
    scalar = GaugeMetricFamily(
        "fleetrun_scalar", "A value that the script reported by name", labels=(*_WHO, "name")
    )
    done = GaugeMetricFamily(
        "fleetrun_activity_ratio", "How much of what it does beside steps is done, 0 to 1",
        labels=(*_WHO, "what"),
    )  # fmt: skip
    for each in processes:
        who = (each.role, str(each.rank))
        for outcome in ("ok", "failed", "stopped"):
            exits.add_metric((*who, outcome), each.exits[outcome])
        for name, value in each.values.items():
            scalar.add_metric((*who, name), value)
        if each.activity is not None:
            what, part, of = each.activity
            done.add_metric((*who, what), min(1.0, (part or 0.0) / of) if of else 0.0)
    yield from (exits, scalar, done)


def usage(pid: int | None) -> tuple[float | None, float | None]:
    """Resident bytes and processor seconds of a process that runs; None of one that does not."""
    if pid is None:
        return None, None
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError, IndexError):
        return None, None
    return float(pages * _PAGE), (int(fields[11]) + int(fields[12])) / _TICKS


# ---- Serves metrics over HTTP at a socket that somebody else opened. Has room for a few clients, of whom the
# oldest makes room for the newest: neither who says nothing nor who does not read keeps anybody waiting.

_AT_ONCE = 16
_MOST_ASKED = 64 * 1024
"""Bytes of a request that are read."""
_PATHS = ("/", "/metrics")
_Start = Callable[..., Any]


class _Asked(io.BufferedReader):
    """A request, of which what is too long is not read."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self._left = _MOST_ASKED

    def readline(self, size: int | None = -1) -> bytes:
        least = self._left if size is None or size < 0 else min(size, self._left)
        line = super().readline(least)
        self._left -= len(line)
        return line


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds of silence
    rbufsize = 0

    def setup(self) -> None:
        super().setup()
        self.rfile = _Asked(self.rfile)  # type: ignore[arg-type]  # unbuffered, so it is raw

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        host, port = listening.getsockname()[:2]
        self.server_name, self.server_port = str(host), int(port)  # as bound: asks no name server
        self.setup_environ()
        self._room = threading.Semaphore(_AT_ONCE)
        self._there: dict[socket.socket, None] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._make_room()
        self._room.acquire()
        with self._lock:
            self._there[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._there.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away."""

    def _make_room(self) -> None:
        """The thread of the oldest ends as soon as its client can neither say nor hear anything more."""
        with self._lock:
            if len(self._there) >= _AT_ONCE:
                with contextlib.suppress(OSError):  # it has gone
                    next(iter(self._there)).shutdown(socket.SHUT_RDWR)


def serve(
    listening: socket.socket, collector: Collector, lock: threading.Lock, look: float = 3600.0
) -> WSGIServer:
    """From now on, in threads of its own; what is collected is collected under the lock. It looks each `look`
    seconds whether it was shut down.
    """
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start: _Start) -> Iterable[bytes]:
        if environ["PATH_INFO"] not in _PATHS:
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"See /metrics.\n"]
        with lock:
            answered: Iterable[bytes] = metrics(environ, start)
        return answered

    server = _Server(listening)
    server.set_app(answer)
    threading.Thread(target=server.serve_forever, args=(look,), daemon=True).start()
    return server
