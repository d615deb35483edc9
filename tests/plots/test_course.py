"""What a picture shows of a record, in numbers."""

import math

import pytest

from fleetrun.plots.course import Fate, course
from tests.plots.record import (
    BEGIN,
    containers,
    event,
    exited,
    launch,
    over,
    progress,
    started,
    training,
)


def lives(found, name="trainer.0"):
    return [(each.begin - BEGIN, each.end - BEGIN, each.fate, each.attempt) for each in found.lives[name]]


def plain(values):
    return [None if math.isnan(value) else value for value in values]


# ---- lives


@pytest.mark.parametrize(
    ("code", "asked", "fate"),
    [
        (0, None, Fate.OK),
        (0, 15, Fate.OK),
        (3, None, Fate.FAILED),
        (-9, None, Fate.FAILED),
        (-15, 15, Fate.STOPPED),
        (None, None, Fate.FAILED),
    ],
)
def test_how_a_life_ended(code, asked, fate):
    found = course([launch("trainer.0"), started(1, "trainer.0"), exited(5, "trainer.0", code, asked)])
    assert lives(found) == [(1, 5, fate, 0)]


def test_each_attempt_is_a_life():
    name = "trainer.0"
    said = [
        started(1, name),
        exited(2, name, 1),
        event(3, "restarting"),
        started(4, name, 1),
        exited(9, name),
    ]
    found = course([launch(name), *said, over(10)])
    assert lives(found) == [(1, 2, Fate.FAILED, 0), (4, 9, Fate.OK, 1)]
    assert found.restarts == [BEGIN + 3]
    assert (found.code, found.begin, found.end) == (0, BEGIN, BEGIN + 10)


def test_what_runs_lasts_until_now():
    found = course([launch("trainer.0"), started(1, "trainer.0")], BEGIN + 60)
    assert lives(found) == [(1, 60, Fate.RUNNING, 0)]
    assert found.end == BEGIN + 60


def test_where_the_launcher_was_killed_nobody_knows():
    found = course([launch("trainer.0"), started(1, "trainer.0"), progress(8, "trainer.0", step=1)])
    assert lives(found) == [(1, 8, Fate.UNKNOWN, 0)]
    assert found.code is None


def test_an_end_that_is_not_on_record_is_the_next_start():
    said = [launch("trainer.0"), started(1, "trainer.0"), started(5, "trainer.0", 1), exited(6, "trainer.0")]
    assert lives(course(said)) == [(1, 5, Fate.UNKNOWN, 0), (5, 6, Fate.OK, 1)]


def test_a_clock_that_was_set_back_makes_no_negative_life():
    found = course([launch("trainer.0"), started(10, "trainer.0"), exited(4, "trainer.0")])
    assert lives(found) == [(10, 10, Fate.OK, 0)]


def test_processes_are_in_the_order_of_the_launch_and_called_as_messages_do():
    names = ["ps.0", "trainer.0", "trainer.1"]
    said = [exited(9, name) for name in reversed(names)]
    found = course([launch(*names), *(started(1, name) for name in names), *said])
    assert [found.titles[name] for name in found.lives] == ["server 0", "trainer 0", "trainer 1"]


def test_machines_that_start_again_together():
    """There no `restarting` is written, but another pod."""
    again = event(5, "ready", attempt=1, containers=containers("trainer.0"))
    found = course([launch("trainer.0"), event(0, "ready", attempt=0), again, event(7, "hung")])
    assert (found.restarts, found.hangs) == ([BEGIN + 5], [BEGIN + 7])


# ---- curves


def test_a_curve_for_each_rank():
    found = course(training(["trainer.0", "trainer.3"]))
    assert list(found.curves) == [("trainer", 0), ("trainer", 3)]
    curve = found.curves["trainer", 3]
    assert curve.title == "trainer 3"
    assert [time - BEGIN for time in curve.times] == list(range(1, 100, 10))
    assert curve.losses == [1 / at for at in range(1, 100, 10)]
    assert (found.paced, found.lossy) == (True, True)


def test_a_line_breaks_where_an_attempt_ends():
    name = "trainer.0"
    said = [progress(1, name, loss=3.0, step=1), progress(2, name, loss=2.0, step=2)]
    again = [started(5, name, 1), progress(6, name, loss=2.5, step=1)]
    found = course([launch(name), started(0, name), *said, exited(3, name, 1), *again])
    assert plain(found.curves["trainer", 0].losses) == [3.0, 2.0, None, 2.5]


def test_the_first_pace_of_an_attempt_is_the_one_after_it():
    name = "trainer.0"
    said = [progress(1, name, step=0, loss=1.0), progress(2, name, step=9, loss=1.0, rate=50.0)]
    found = course(
        [started(0, name), *said, progress(3, name, step=10), progress(4, name, step=11, rate=40.0)]
    )
    assert plain(found.curves["trainer", 0].paces) == [50.0, 50.0, None, 40.0]


@pytest.mark.parametrize("loss", ["nan", "NaN", "inf", "-Infinity", math.nan, 1e300, "text"])
def test_a_loss_that_is_no_number(loss):
    found = course([progress(1, "trainer.0", step=1, loss=1.0), progress(2, "trainer.0", step=2, loss=loss)])
    curve = found.curves["trainer", 0]
    assert plain(curve.losses) == [1.0, None]
    assert curve.broken == [BEGIN + 2]


def test_a_job_that_reports_steps_only():
    found = course([progress(at, "trainer.0", step=at) for at in range(3)])
    assert (found.paced, found.lossy) == (False, False)


# ---- whatever stands in a record

HOSTILE = [
    {},
    {"event": "started"},
    {"time": 1.0},
    event(1, "started"),
    event(1, "started", container=None, rank="x", attempt="many"),
    event(1, "exited", container=["a"], code="x", asked={}),
    event(1, "progress", container="trainer.0", rank="0", loss=1.0),
    event(1, "progress", container="trainer.0", rank=0, loss=[], rate={}, step="x"),
    event(1, "progress", container="trainer.0", rank=0, loss=True, rate=-1, step=-3),
    event(1, "progress", container="trainer.0", rank=0, loss=10**400, rate=10**400, step=10**400),
    event(1, "launch", containers="none"),
    event(
        1, "launch", containers=[1, None, {"name": 3}, {"name": "a"}, {"name": "b", "role": [], "rank": 1}]
    ),
    event(1, "over", code="x", reason=None),
    event(1, "ready", attempt="x", containers={}),
    {"time": "x", "event": "started"},
    {"time": 1e300, "event": "hung"},
    {"time": -5, "event": "hung"},
    {"time": True, "event": "hung"},
    {"time": math.nan, "event": "hung"},
]


@pytest.mark.parametrize("said", HOSTILE, ids=str)
def test_odd_events_are_no_trouble(said):
    found = course([said, *training(["trainer.1"])])
    assert lives(found, "trainer.1") == [(0.5, 100, Fate.OK, 0)]
    assert not found.hangs
    assert all(abs(loss) < 1e30 for each in found.curves.values() for loss in each.losses if loss == loss)


def test_an_empty_record():
    found = course([])
    assert (found.begin, found.end, found.lives, found.curves) == (0.0, 0.0, {}, {})
