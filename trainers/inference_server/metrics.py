"""Collect the metrics of all workers for Prometheus.

The Prometheus library shares values between processes in mapped files, in the directory of
PROMETHEUS_MULTIPROC_DIR. The server sets this variable for its workers. Answers of the server itself, while
workers cannot answer, are not counted.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from trainers.inference_server.model import ModelVersion

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, float("inf"))
_ROWS = (*(float(1 << power) for power in range(0, 17, 2)), float("inf"))
_PATHS = ("infer", "ready", "live", "metrics")


class Metrics:
    """The metrics of this process, and the text for all processes. `folder` has the workers' files."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        none = CollectorRegistry()  # the text comes from the files of all processes
        self._requests = Counter(
            "fleetrun_serve_requests", "Requests by path and status.", ["path", "status"], registry=none
        )
        self._rows = Counter("fleetrun_serve_rows", "Rows of answered requests.", registry=none)
        self._seconds = Histogram(
            "fleetrun_serve_request_seconds",
            "Time of an answered request in a worker.",
            buckets=_SECONDS,
            registry=none,
        )
        self._batches = Histogram(
            "fleetrun_serve_batch_rows", "Rows computed together.", buckets=_ROWS, registry=none
        )
        self._version = Gauge(
            "fleetrun_serve_version_sequence",
            "Number of versions that this server has served, for the worker that is furthest behind.",
            multiprocess_mode="livemin",
            registry=none,
        )
        self._time = Gauge(
            "fleetrun_serve_version_timestamp_seconds",
            "Time at which the values of the served version were saved, for the worker that is furthest "
            "behind.",
            multiprocess_mode="livemin",
            registry=none,
        )

    def request(self, path: str, status: int) -> None:
        """Count a request. `path` is the last word of its path."""
        self._requests.labels(path if path in _PATHS else "other", str(status)).inc()

    def answered(self, rows: int, seconds: float) -> None:
        self._rows.inc(rows)
        self._seconds.observe(seconds)

    def batch(self, rows: int) -> None:
        self._batches.observe(rows)

    def serves(self, version: ModelVersion) -> None:
        self._version.set(version.sequence)
        if version.values is not None and version.values.time is not None:
            self._time.set(version.values.time)

    def text(self) -> tuple[bytes, str]:
        """Return the metrics of all workers as text, and its content type."""
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry, self.folder)  # type: ignore[no-untyped-call]  # the library's
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
