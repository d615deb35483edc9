"""What the launcher says to the process that exports, and what that says back."""

import math

import pytest

from fleetrun.envs.contract import Role
from fleetrun.exporters import job_state
from tests.exporters.said import BUSY, begin, event, read, report, spec


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
        "time": 12.5,
    }


def test_numbers_that_are_none_arrive_too():
    line = report(loss=math.nan, values={"a": math.inf})
    assert math.isnan(line["loss"])
    assert line["values"] == {"a": math.inf}


def test_what_was_not_said_is_none():
    line = report()
    assert {line[name] for name in ("step", "samples", "loss", "rate", "activity", "time")} == {None}


def test_a_pod_is_its_roles_and_ranks():
    line = read(job_state.pod_message(spec((Role.SERVER, 1), (Role.TRAINER, 4), (Role.TRAINER, 5))))
    assert [tuple(each.values()) for each in line["containers"]] == [
        ("ps.0", "ps", 1),
        ("trainer.0", "trainer", 4),
        ("trainer.1", "trainer", 5),
    ]


def test_of_the_record_goes_what_is_exported_and_no_more():
    line = event("exited", container="trainer.0", code=1, asked=None, error="secret", log="/x")
    assert line == {
        "is": "event", "event": "exited", "time": 100.0, "container": "trainer.0", "pid": None,
        "attempt": None, "code": 1, "asked": None,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["launch", "progress", "node", "ready", "leaving"])
def test_the_rest_of_the_record_stays(name):
    assert job_state.event_message({"event": name, "time": 1.0}) is None


@pytest.mark.parametrize("line", [b"", b"\n", b"{", b"[]", b'"is"', b'{"a": 1}', b'{"is": 3}', b"\xff\n"])
def test_anything_else_is_no_line(line):
    assert job_state.read_message(line) is None


def test_each_is_one_line():
    for line in (job_state.begin_message(facts={"job": "a\nb"}), job_state.warning_message("a\nb")):
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
    assert begin()["facts"]["host"] == "node1"


def test_a_warning_is_told_from_other_output():
    assert job_state.read_warning(job_state.warning_message("full")) == "full"
    assert [job_state.read_warning(line) for line in (b"Traceback", b'{"warning": 3}', b"[]", b"")] == [
        None
    ] * 4
