"""Metrics as Prometheus reads them."""

import math
import os
import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fleetrun.exporters.job_state import Job
from fleetrun.exporters.prometheus import JobMetrics, usage
from tests.exporters.said import BUSY, begin, event, exited, pod, report, started

DOCS = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"


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
    found = scraped(
        pod(), started(), exited(code=3), event("failed", restart=True), event("hung"), started(), exited()
    )
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
        report(step=1, samples=1, loss=1.0, rate=1.0, values={"a": 1.0}, activity=BUSY),
    ]
    told = {name for name, *_ in scraped(begin(), *lines)}
    written = set(re.findall(r"^\| `(fleetrun_\w+)", DOCS.read_text(), re.MULTILINE))
    assert written == told
