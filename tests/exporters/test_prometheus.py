"""The metrics of a job, and the server that Prometheus asks."""

import math
import os
import re
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fleetrun.exporters.job_state import Job
from fleetrun.exporters.prometheus import (
    SERVER_GAUGES,
    TABLE_COUNTERS,
    TABLE_GAUGES,
    JobMetrics,
    serve,
    usage,
)
from tests.exporters.messages import BUSY, begin, event, exited, failed, hung, pod, report, sent, started
from tests.support.traces import wait_until

# ---- Metrics as Prometheus reads them.

NUMBERS = dict.fromkeys((*SERVER_GAUGES, *TABLE_GAUGES, *TABLE_COUNTERS), 1)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


def scraped(*lines):
    """Samples by name and the labels that matter."""
    job = Job()
    for line in lines:
        job.take(line, 1000.0)
    registry = CollectorRegistry()
    registry.register(JobMetrics(job))
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "role"}
            found[(sample.name, *labels.values())] = sample.value
    return found


def test_before_anything_happens():
    found = scraped(begin())
    assert found[("fleetrun_job_start_time_seconds",)] == 1000.0
    assert found[("fleetrun_restarts_total",)] == 0.0
    assert not [name for name, *rest in found if rest and not name.startswith("fleetrun_job_info")]


def test_ranks_that_the_others_wait_for():
    """Of the whole job, and not of the round before."""
    late = event("lateness", late=[{"rank": 5, "share": 0.34}, {"rank": 0, "share": 0.01}])
    found = scraped(pod(0, 1), late)
    assert (found[("fleetrun_late_ratio", "5")], found[("fleetrun_late_ratio", "0")]) == (0.34, 0.01)
    assert ("fleetrun_late_ratio", "5") not in scraped(pod(0, 1), late, pod(0, 1))


def test_tables_of_a_process_that_was_restarted_are_not_those_of_the_one_before():
    said = report(server={"step": 3}, tables={"user": {"rows": 7, "pulls": 2}, "item": {"rows": 1}})
    found = scraped(pod(0), started(), said, report(tables={"user": {"rows": 8, "pulls": 3}}))
    assert found[("fleetrun_server_step", "0")] == 3.0
    assert found[("fleetrun_table_rows", "0", "user")] == 8.0
    assert found[("fleetrun_table_rows", "0", "item")] == 1.0
    assert found[("fleetrun_table_pulls_total", "0", "user")] == 3.0
    assert ("fleetrun_table_bytes", "0", "user") not in found
    assert ("fleetrun_table_rows", "0", "user") not in scraped(pod(0), started(), said, exited(), started())


def test_processes_that_did_not_start_are_down():
    found = scraped(pod(0, 1), started("trainer.1", pid=os.getpid()))
    assert (found[("fleetrun_process_up", "0")], found[("fleetrun_process_up", "1")]) == (0.0, 1.0)
    assert ("fleetrun_step", "1") not in found, "it has said nothing"
    assert found[("fleetrun_process_start_time_seconds", "1")] == 100.0


def test_what_a_process_reports():
    line = report(
        step=12, samples=384, loss=0.5, values={"lr": 0.1, 'a "b"\n': 2.0}, rate=100.0, activity=BUSY
    )
    found = scraped(pod(), started(pid=os.getpid()), line)
    assert {name: found[(name, "0")] for name in (
        "fleetrun_step", "fleetrun_samples_total", "fleetrun_loss", "fleetrun_samples_per_second",
        "fleetrun_last_report_time_seconds",
    )} == {
        "fleetrun_step": 12, "fleetrun_samples_total": 384, "fleetrun_loss": 0.5,
        "fleetrun_samples_per_second": 100.0, "fleetrun_last_report_time_seconds": 1000.0,
    }  # fmt: skip
    scalars = {key[1:]: value for key, value in found.items() if key[0] == "fleetrun_scalar"}
    assert sorted(scalars.values()) == [0.1, 2.0]
    assert [value for key, value in found.items() if key[0] == "fleetrun_activity_ratio"] == [0.25]


def test_a_loss_that_is_no_number_is_told():
    assert math.isnan(scraped(pod(), report(loss=math.nan))[("fleetrun_loss", "0")])


def test_ends_failures_and_restarts():
    found = scraped(pod(), started(), exited(code=3), failed(restart=True), hung(), started(), exited())
    exits = {key[1:]: value for key, value in found.items() if key[0] == "fleetrun_process_exits_total"}
    assert {
        frozenset(key) & {"ok", "failed", "stopped"}: value for key, value in exits.items() if "0" in key
    } == {
        frozenset({"ok"}): 1,
        frozenset({"failed"}): 1,
        frozenset({"stopped"}): 0,
    }
    for name in ("fleetrun_failures_total", "fleetrun_restarts_total", "fleetrun_hangs_total"):
        assert found[(name,)] == 1
    assert found[("fleetrun_process_starts_total", "0")] == 2
    assert found[("fleetrun_process_up", "0")] == 0


def test_what_the_time_went_into():
    found = scraped(pod(), sent("spent", seconds={"steps": 3.0, "imports": 1.5}))
    assert found[("fleetrun_spent_seconds_total", "steps")] == 3.0
    assert found[("fleetrun_spent_seconds_total", "imports")] == 1.5


def test_what_a_process_uses():
    memory, seconds = usage(os.getpid())
    assert memory > 1 << 20
    assert 0 < seconds < 1e6
    assert usage(None) == (None, None)
    assert usage(2**22 + 1) == (None, None)


def test_every_name_is_documented_and_no_other():
    lines = [
        pod(),
        started(pid=os.getpid()),
        report(server=NUMBERS, tables={"user": NUMBERS}),
        report(step=1, samples=1, loss=1.0, rate=1.0, values={"a": 1.0}, activity=BUSY),
        event("lateness", late=[{"rank": 0, "share": 0.1}]),
        {"is": "spent", "seconds": {"steps": 3.0}},
    ]
    told = {name for name, *_ in scraped(begin(), *lines)}
    written = set(re.findall(r"^\| `(fleetrun_\w+)", DOCS.read_text(), re.MULTILINE))
    assert written == told


# ---- Metrics over HTTP: who asks, who asks nonsense, and who asks nothing.


class Served:
    def __init__(self, address="127.0.0.1", family=socket.AF_INET):
        self.job = Job()
        self.lock = threading.Lock()
        self.listening = socket.create_server((address, 0), family=family)
        self.port = self.listening.getsockname()[1]
        self.server = serve(self.listening, JobMetrics(self.job), self.lock, 0.01)

    def get(self, path="/metrics", host="127.0.0.1"):
        with urllib.request.urlopen(f"http://{host}:{self.port}{path}", timeout=60) as answer:
            return answer.read().decode()

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def served():
    made = Served()
    yield made
    made.close()


@pytest.mark.parametrize("path", ["/", "/metrics", "/metrics?name[]=fleetrun_failures_total"])
def test_metrics_are_there_as_they_are_now(served, path):
    assert "fleetrun_failures_total 0.0" in served.get(path)
    served.job.take(begin(), 5.0)
    served.job.take(pod(), 5.0)
    served.job.failures = 3
    text = served.get(path)
    assert "fleetrun_failures_total 3.0" in text
    assert list(text_string_to_metric_families(text))


def test_nothing_else_is_there(served):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        served.get("/etc/passwd")


@pytest.mark.parametrize("garbage", [b"\xff" * 5000, b"GET\r\n\r\n", b"POST / HTTP/1.0\r\n\r\n", b""])
def test_garbage_does_not_end_it(served, garbage):
    with served.connect() as client:
        client.sendall(garbage)
        client.shutdown(socket.SHUT_WR)
        while client.recv(4096):
            pass
    assert "fleetrun_failures_total" in served.get()


def test_clients_that_say_nothing_keep_nobody_waiting(served):
    silent = [served.connect() for _ in range(40)]
    assert "fleetrun_failures_total" in served.get(), "none of them has gone"
    gone = [client.recv(1) == b"" for client in silent[:25]]
    assert gone == [True] * 25, "the oldest made room"
    wait_until(lambda: len(served.server._clients) < 16, "the scrape has gone")
    for client in silent:
        client.close()


@pytest.mark.slow
def test_a_client_that_does_not_read_keeps_nobody_waiting(served):
    served.job.facts = {"job": "x" * 8_000_000}  # more than sockets hold
    served.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    deaf = []
    for _ in range(16):
        deaf.append(served.connect())
        deaf[-1].sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert deaf[-1].recv(1) == b"H", "it is being answered"
    with served.lock:
        served.job.facts = {}
    assert "fleetrun_failures_total" in served.get()
    for client in deaf:
        client.close()


def test_ipv6():
    try:
        made = Served("::1", socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    try:
        assert "fleetrun_failures_total" in made.get(host="[::1]")
    finally:
        made.close()
