"""How a job stands after what the launcher said."""

import math

import pytest

from fleetrun.exporters import job_state
from fleetrun.exporters.job_state import MOST_NAMES, Job
from fleetrun.pod.companion import read_warning, warning_message
from tests.exporters.messages import BUSY, begin, event, exited, failed, hung, pod, report, started


def job(*lines):
    made = Job()
    for number, line in enumerate(lines):
        made.take(line, 1000.0 + number)
    return made


def test_the_job_itself():
    made = job(begin(), pod(), failed(restart=True), failed(restart=False), hung())
    assert made.facts == {"job": "ads", "pod": "abcdef", "mode": "ps", "host": "node1"}
    assert (made.started, made.failures, made.restarts, made.hangs) == (1000.0, 2, 1, 1)


def test_a_process_from_its_start():
    made = job(pod(4, 5), started("trainer.1", pid=77)).processes["trainer.1"]
    assert (made.role, made.rank, made.up, made.pid, made.starts, made.started) == (
        "trainer", 5, True, 77, 1, 100.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "asked", "outcome"),
    [(0, None, "ok"), (0, 15, "ok"), (3, None, "failed"), (-9, None, "failed"), (-15, 15, "stopped")],
)
def test_how_it_ended(code, asked, outcome):
    made = job(pod(), started(), report(rate=5.0, activity=BUSY), exited(code=code, asked=asked))
    process = made.processes["trainer.0"]
    assert process.exits == {outcome: 1}
    assert (process.up, process.rate, process.activity) == (False, None, None)


def test_the_last_word_on_each_thing_counts():
    made = job(
        pod(),
        started(),
        report(step=1, samples=10, loss=0.5, values={"lr": 0.1, "a": 1.0}, rate=3.0, activity=BUSY),
        report(step=2, values={"lr": 0.2}, rate=4.0),
    ).processes["trainer.0"]
    assert (made.step, made.samples, made.loss, made.rate) == (2, 10, 0.5, 4.0)
    assert made.values == {"lr": 0.2, "a": 1.0}
    assert made.activity is None, "it does that no more"
    assert made.reported == 1003.0


def test_another_process_has_said_nothing_yet():
    made = job(pod(), started(), report(step=9, loss=0.5, values={"a": 1.0}), exited(code=1), started(pid=8))
    process = made.processes["trainer.0"]
    assert (process.step, process.loss, process.values, process.reported) == (None, None, {}, None)
    assert (process.starts, process.pid) == (2, 8)


def test_names_are_bounded():
    names = {f"name{number}": 1.0 for number in range(MOST_NAMES + 50)}
    made = job(pod(), report(values={"first": 1.0}), report(values=names), report(values={"first": 2.0}))
    values = made.processes["trainer.0"].values
    assert len(values) == MOST_NAMES
    assert values["first"] == 2.0


def test_a_machine_that_joins_again_keeps_what_it_knows_of_a_rank():
    made = job(pod(0, 1), started("trainer.0"), started("trainer.1"), exited("trainer.1"), pod(1, 2))
    assert {name: (each.rank, each.starts) for name, each in made.processes.items()} == {
        "trainer.0": (1, 1),
        "trainer.1": (2, 0),
    }


def test_who_is_not_known_is_passed_over():
    made = job(report(step=1), started(), exited(), pod(), report("trainer.9"), started("trainer.9"))
    assert {each.starts for each in made.processes.values()} == {0}


# ---- What the launcher says to the process that exports, and what that says back.


def test_a_report_arrives_as_it_was():
    line = report(step=3, samples=96, loss=0.5, values={"lr": 0.1}, activity=BUSY, time=12.5, rate=8.0)
    assert line == {
        "is": "report",
        "container": "trainer.0",
        "step": 3,
        "samples": 96,
        "loss": 0.5,
        "values": {"lr": 0.1},
        "rate": 8.0,
        "activity": ["loading tables", 3.0, 12.0],
        "server": {},
        "tables": {},
        "time": 12.5,
    }


def test_numbers_that_are_none_arrive_too():
    line = report(loss=math.nan, values={"a": math.inf})
    assert math.isnan(line["loss"])
    assert line["values"] == {"a": math.inf}


def test_what_was_not_said_is_none():
    line = report()
    assert {line[name] for name in ("step", "samples", "loss", "rate", "activity", "time")} == {None}


def test_the_processes_are_those_with_a_rank():
    hook = {"name": "pre_hook", "role": "pre_hook", "rank": None}
    servers = [{"name": "ps.0", "role": "ps", "rank": 1}, {"name": "trainer.0", "role": "trainer", "rank": 4}]
    made = job(event("ready", containers=[hook, *servers]))
    assert {name: (each.role, each.rank) for name, each in made.processes.items()} == {
        "ps.0": ("ps", 1),
        "trainer.0": ("trainer", 4),
    }


def test_a_line_of_the_record_arrives_as_it_was():
    line = event("progress", container="trainer.0", step=3, loss=math.nan)
    assert line == {
        "is": "event", "event": "progress", "time": 100.0, "container": "trainer.0", "step": 3, "loss": "nan",
    }  # fmt: skip


@pytest.mark.parametrize("line", [b"", b"\n", b"{", b"[]", b'"is"', b'{"a": 1}', b'{"is": 3}', b"\xff\n"])
def test_anything_else_is_no_line(line):
    assert job_state.read_message(line) is None


def test_each_is_one_line():
    for line in (job_state.message("begin", {"facts": {"job": "a\nb"}}), warning_message("a\nb")):
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
    assert begin()["facts"]["host"] == "node1"


def test_a_warning_is_told_from_other_output():
    assert read_warning(warning_message("full")) == "full"
    assert [read_warning(line) for line in (b"Traceback", b'{"warning": 3}', b"[]", b"")] == [None] * 4
