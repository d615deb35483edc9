"""Serve the state of a job as Prometheus metrics over HTTP. docs/reference/metrics.md documents the names of
the metrics. These names do not change.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from fleetrun.exporters.base import Context
from fleetrun.exporters.job_state import Job, Line, ProcessState
from fleetrun.proc import read_stat

_LABELS = ("role", "rank")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")

_GAUGES: Sequence[tuple[str, str, Callable[[ProcessState], float | None]]] = (
    ("fleetrun_process_up", "1 while the process runs", lambda each: float(each.up)),
    (
        "fleetrun_process_start_time_seconds",
        "Start of its current or last process, in seconds since the epoch",
        lambda each: each.started,
    ),
    ("fleetrun_step", "The last step that it reported", lambda each: each.step),
    ("fleetrun_samples_per_second", "Samples per second over the last ten seconds", lambda each: each.rate),
    ("fleetrun_loss", "The last loss that it reported", lambda each: each.loss),
    (
        "fleetrun_last_report_time_seconds",
        "Time of its last report, in seconds since the epoch",
        lambda each: each.reported,
    ),
    (
        "fleetrun_process_resident_memory_bytes",
        "Resident memory, without its children",
        lambda each: usage(each.pid)[0],
    ),
)
_COUNTERS: Sequence[tuple[str, str, Callable[[ProcessState], float | None]]] = (
    ("fleetrun_process_starts", "Number of its starts", lambda each: each.starts),
    ("fleetrun_samples", "Samples since its process started", lambda each: each.samples),
    ("fleetrun_process_cpu_seconds", "CPU time of its process", lambda each: usage(each.pid)[1]),
)

SERVER_GAUGES = {
    "step": ("fleetrun_server_step", "Updates of its tables so far"),
    "stale_steps_p50": ("fleetrun_server_stale_steps_p50", "Pushes of others between pull and push, median"),
    "stale_steps_p99": ("fleetrun_server_stale_steps_p99", "The same, 99 % have at most"),
    "stale_ms_p50": ("fleetrun_server_stale_ms_p50", "Milliseconds from a pull to its push, median"),
    "stale_ms_p99": ("fleetrun_server_stale_ms_p99", "The same, 99 % have at most"),
    "log_bytes": ("fleetrun_server_log_bytes", "Size of its write-ahead log"),
    "snapshot_time": (
        "fleetrun_server_snapshot_time_seconds",
        "Time of its last snapshot, in seconds since the epoch",
    ),
}
TABLE_GAUGES = {
    "rows": ("fleetrun_table_rows", "Rows of the table on the server"),
    "bytes": ("fleetrun_table_bytes", "Memory of its rows, its candidates and their index"),
    "candidates": ("fleetrun_table_candidates", "Keys that wait for admission"),
    "ids_hour": ("fleetrun_table_distinct_keys", "Distinct keys of pulls in the last hour, an estimate"),
    "gradient_norm": ("fleetrun_table_gradient_norm", "L2 norm of the gradient of a row, mean of a sample"),
    "gradient_zeros": ("fleetrun_table_gradient_zeros_ratio", "Zeros in gradients, 0 to 1, of a sample"),
    "value_norm": ("fleetrun_table_value_norm", "L2 norm of a row, mean of a sample"),
    "value_zeros": ("fleetrun_table_value_zeros_ratio", "Zeros in rows, 0 to 1, of a sample"),
    "value_not_finite": (
        "fleetrun_table_value_not_finite_ratio",
        "NaN, infinity in rows, 0 to 1, of a sample",
    ),
    "on_disk": ("fleetrun_table_rows_on_disk", "Rows on the disk of the server"),
}
TABLE_COUNTERS = {
    "new": ("fleetrun_table_new_rows", "Rows that were created"),
    "pulls": ("fleetrun_table_pulls", "Requests for rows in training"),
    "pulled_keys": ("fleetrun_table_pulled_keys", "Keys of these requests"),
    "missed_keys": ("fleetrun_table_missed_keys", "Keys of these requests that had no row"),
    "pushes": ("fleetrun_table_pushes", "Requests with gradients"),
    "pushed_keys": ("fleetrun_table_pushed_keys", "Keys of these requests"),
    "admitted": ("fleetrun_table_admitted_keys", "Keys that the entry filter admitted"),
    "refused": ("fleetrun_table_refused_keys", "Keys that the entry filter did not admit"),
    "evicted": ("fleetrun_table_evicted_rows", "Rows that the bound of the table removed"),
    "removed": ("fleetrun_table_removed_rows", "Rows that a shrink removed"),
}


class Prometheus:
    """The exporter `prometheus`. Its argument is the descriptor of a listening socket."""

    def __init__(self, context: Context) -> None:
        serve(socket.socket(fileno=int(context.argument)), JobMetrics(context.job), context.lock)

    def take(self, line: Line, now: float) -> None:
        """Do nothing, because each scrape reads the state of the job."""

    def close(self) -> None:
        """Do nothing, because the server ends with this process."""


class JobMetrics(Collector):
    """A collector that reads the job at each scrape. The caller holds the lock, so `job` does not change
    meanwhile.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def collect(self) -> Iterator[Metric]:
        yield from self._whole()
        processes = list(self._job.processes.values())
        for name, help, read in _GAUGES:
            yield _filled(GaugeMetricFamily(name, help, labels=_LABELS), processes, read)
        for name, help, read in _COUNTERS:
            yield _filled(CounterMetricFamily(name, help, labels=_LABELS), processes, read)
        yield from _named(processes)
        yield from _of_servers(processes)
        late = GaugeMetricFamily(
            "fleetrun_late_ratio",
            "Share of the time in which other trainers waited for it",
            labels=_LABELS,
        )
        for each in self._job.late:
            late.add_metric(("trainer", str(each["rank"])), each["share"])
        yield late
        yield self._spent()

    def _spent(self) -> Metric:
        spent = CounterMetricFamily("fleetrun_spent_seconds", "Time of the job by kind", labels=("on",))
        for kind, seconds in self._job.spent.items():
            spent.add_metric((kind,), seconds)
        return spent

    def _whole(self) -> Iterator[Metric]:
        job = self._job
        yield InfoMetricFamily("fleetrun_job", "The job and its part on this node", value=job.facts)
        if job.started is not None:
            yield GaugeMetricFamily(
                "fleetrun_job_start_time_seconds",
                "Start of the run, in seconds since the epoch",
                value=job.started,
            )
        yield CounterMetricFamily("fleetrun_failures", "Processes that failed", value=job.failures)
        yield CounterMetricFamily("fleetrun_restarts", "Restarts after a failure", value=job.restarts)
        yield CounterMetricFamily("fleetrun_hangs", "Hangs of the job", value=job.hangs)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily,
    processes: Sequence[ProcessState],
    read: Callable[[ProcessState], float | None],
) -> Metric:
    for each in processes:
        value = read(each)
        if value is not None:
            family.add_metric((each.role, str(each.rank)), value)
    return family


def _named(processes: Sequence[ProcessState]) -> Iterator[Metric]:
    """Yield the metrics that have a third label."""
    exits = CounterMetricFamily(
        "fleetrun_process_exits", "Ended processes by outcome", labels=(*_LABELS, "outcome")
    )
    scalar = GaugeMetricFamily(
        "fleetrun_scalar", "A value that the script reported by name", labels=(*_LABELS, "name")
    )
    done = GaugeMetricFamily(
        "fleetrun_activity_ratio", "The finished part of its current activity, 0 to 1",
        labels=(*_LABELS, "what"),
    )  # fmt: skip
    for each in processes:
        labels = (each.role, str(each.rank))
        for outcome in ("ok", "failed", "stopped"):
            exits.add_metric((*labels, outcome), each.exits[outcome])
        for name, value in each.values.items():
            scalar.add_metric((*labels, name), value)
        if each.activity is not None:
            what, part, of = each.activity
            done.add_metric((*labels, what), min(1.0, (part or 0.0) / of) if of else 0.0)
    yield from (exits, scalar, done)


def _of_servers(processes: Sequence[ProcessState]) -> Iterator[Metric]:
    for key, (name, help) in SERVER_GAUGES.items():
        family = GaugeMetricFamily(name, help, labels=_LABELS)
        yield _filled(family, processes, lambda each, key=key: each.server.get(key))  # type: ignore[misc]
    kinds = ((GaugeMetricFamily, TABLE_GAUGES), (CounterMetricFamily, TABLE_COUNTERS))
    for kind, metrics in kinds:
        for key, (name, help) in metrics.items():
            of_tables = kind(name, help, labels=(*_LABELS, "table"))
            for each in processes:
                for table, numbers in each.tables.items():
                    if key in numbers:
                        of_tables.add_metric((each.role, str(each.rank), table), numbers[key])
            yield of_tables


def usage(pid: int | None) -> tuple[float | None, float | None]:
    """Return resident bytes and CPU seconds of a process, each None if it does not run."""
    if pid is None:
        return None, None
    try:
        found = read_stat(pid)
    except ProcessLookupError:
        return None, None
    return float(found.resident * _PAGE), found.ticks / _TICKS


# ---- The HTTP server. The launcher opens its socket. The number of clients is limited, and a new client
# replaces the oldest one. A silent client therefore cannot block the others.

_MOST_CLIENTS = 16
_PATHS = ("/", "/metrics")
_Start = Callable[..., object]


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds of silence

    def log_message(self, format: str, *args: object) -> None:
        """Write no log, because stdout and stderr belong to the launcher."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        host, port = listening.getsockname()[:2]
        self.server_name, self.server_port = str(host), int(port)  # a look-up would send a DNS request
        self.setup_environ()
        self._slots = threading.Semaphore(_MOST_CLIENTS)
        self._clients: dict[socket.socket, None] = {}
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: object) -> None:
        # Disconnect the oldest client if there are too many. Its thread ends after the shutdown of its
        # socket.
        with self._lock:
            if len(self._clients) >= _MOST_CLIENTS:
                with contextlib.suppress(OSError):  # the client has disconnected
                    next(iter(self._clients)).shutdown(socket.SHUT_RDWR)
        self._slots.acquire()
        with self._lock:
            self._clients[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can start
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect, which is not an error."""


def serve(
    listening: socket.socket, collector: Collector, lock: threading.Lock, poll: float = 3600.0
) -> WSGIServer:
    """Serve in daemon threads, and collect metrics under the lock. Every `poll` seconds, the server checks if
    it was shut down.
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
    threading.Thread(target=server.serve_forever, args=(poll,), daemon=True).start()
    return server
