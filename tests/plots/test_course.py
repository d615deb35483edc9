"""What a picture shows of a record, in numbers."""

import math

import pytest

from fleetrun.plots.course import LATE, LOSS, SAMPLES, STEPS
from tests.plots.record import (
    BEGIN,
    containers,
    course,
    event,
    exited,
    launch,
    over,
    progress,
    started,
    training,
)


def lives(found, name="trainer.0"):
    return [(each.begin - BEGIN, each.end - BEGIN, each.fate) for each in found.lives[name]]


def times(line):
    return [time - BEGIN for time, _ in line]


def values(line):
    return [None if math.isnan(value) else value for _, value in line]


# ---- lives


@pytest.mark.parametrize(
    ("code", "asked", "fate"),
    [
        (0, None, "completed"),
        (0, 15, "completed"),
        (3, None, "failed"),
        (-9, None, "failed"),
        (-15, 15, "stopped by fleetrun"),
        (None, None, "failed"),
    ],
)
def test_how_a_life_ended(code, asked, fate):
    found = course([launch("trainer.0"), started(1, "trainer.0"), exited(5, "trainer.0", code, asked)])
    assert lives(found) == [(1, 5, fate)]


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
    assert lives(found) == [(1, 2, "failed"), (4, 9, "completed")]
    assert found.restarts == [BEGIN + 3]
    assert (found.begin, found.end) == (BEGIN, BEGIN + 10)


def test_what_runs_lasts_until_now():
    found = course([launch("trainer.0"), started(1, "trainer.0")], BEGIN + 60)
    assert lives(found) == [(1, 60, "running")]
    assert found.end == BEGIN + 60


def test_where_the_launcher_was_killed_nobody_knows():
    found = course([launch("trainer.0"), started(1, "trainer.0"), progress(8, "trainer.0", step=1)])
    assert lives(found) == [(1, 8, "end not known")]


def test_an_end_that_is_not_on_record_is_the_next_start():
    said = [launch("trainer.0"), started(1, "trainer.0"), started(5, "trainer.0", 1), exited(6, "trainer.0")]
    assert lives(course(said)) == [(1, 5, "end not known"), (5, 6, "completed")]


def test_named_values_are_series_of_each_process_that_break_at_a_restart():
    said = [launch("trainer.0", "trainer.1"), started(0, "trainer.0"), started(0, "trainer.1")]
    said += [progress(at, "trainer.0", values={"lr": at / 10, "AUC/train": 0.5}) for at in (1, 2)]
    said += [progress(3, "trainer.1", values={"lr": "nan"}), exited(4, "trainer.0", 1)]
    said += [started(5, "trainer.0", 1), progress(6, "trainer.0", values={"lr": 0.6, "odd": [1]})]
    found = course(said)
    assert not found.curves, "values alone are neither loss nor speed"
    lr = found.values["lr"]
    assert values(lr["trainer", 0]) == [0.1, 0.2, None, 0.6]
    assert times(lr["trainer", 0]) == [1, 2, 5, 6]
    assert values(lr["trainer", 1]) == [math.inf]
    assert found.values["AUC/train"].keys() == {("trainer", 0)}
    assert values(found.values["odd"]["trainer", 0]) == [math.inf]


def test_a_number_of_a_table_is_the_sum_of_what_each_server_said_last():
    said = [launch("ps.0", "ps.1")]
    rows = [(1, 0, 10.0), (2, 1, 5.0), (3, 0, 20.0)]
    said += [progress(at, f"ps.{rank}", tables={"user": {"rows": count}}) for at, rank, count in rows]
    said += [progress(4, "ps.1", tables={"user": {"rows": -1, "other": 3}, "item": 7, "cold": {"rows": "x"}})]
    found = course(said)
    assert not found.curves
    assert found.tables.keys() == {"rows"}
    assert found.tables["rows"].keys() == {"user"}
    assert values(found.tables["rows"]["user"]) == [10, 15, 25]


def test_a_clock_that_was_set_back_makes_no_negative_life():
    found = course([launch("trainer.0"), started(10, "trainer.0"), exited(4, "trainer.0")])
    assert lives(found) == [(10, 10, "completed")]


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


def test_processes_of_other_nodes_are_there_but_what_happened_to_the_job_is_there_once():
    again = event(5, "ready", attempt=1, containers=containers("trainer.0"))
    own = [launch("trainer.0"), started(1, "trainer.0"), again, event(7, "hung"), exited(9, "trainer.0")]
    more = [*own[:-1], exited(8, "trainer.0", 3), over(20)]
    found = course(own, None, [more])
    assert (found.restarts, found.hangs) == ([BEGIN + 5], [BEGIN + 7])
    assert found.spans == course(own).spans
    assert lives(found) == [(1, 9, "completed")]
    assert lives(found, "trainer.0@1") == [(1, 8, "failed")]


# ---- curves


def test_a_curve_for_each_rank():
    curves = course(training(["trainer.0", "trainer.3"])).curves
    assert list(curves[LOSS]) == [("trainer", 0), ("trainer", 3)]
    assert times(curves[LOSS]["trainer", 3]) == list(range(1, 100, 10))
    assert values(curves[LOSS]["trainer", 3]) == [1 / at for at in range(1, 100, 10)]
    assert set(values(curves[SAMPLES]["trainer", 3])) == {32.0}


def test_a_line_breaks_where_an_attempt_ends():
    name = "trainer.0"
    said = [progress(1, name, loss=3.0, step=1), progress(2, name, loss=2.0, step=2)]
    again = [started(5, name, 1), progress(6, name, loss=2.5, step=1)]
    found = course([launch(name), started(0, name), *said, exited(3, name, 1), *again])
    assert values(found.curves[LOSS]["trainer", 0]) == [3.0, 2.0, None, 2.5]


def test_a_report_without_a_pace_or_a_loss_breaks_no_line():
    name = "trainer.0"
    said = [progress(1, name, step=0, loss=1.0), progress(2, name, step=9, loss=1.0, rate=50.0)]
    found = course(
        [started(0, name), *said, progress(3, name, step=10), progress(4, name, step=11, rate=40.0)]
    )
    assert values(found.curves[SAMPLES]["trainer", 0]) == [50.0, 40.0]
    assert values(found.curves[LOSS]["trainer", 0]) == [1.0, 1.0]


@pytest.mark.parametrize("loss", ["nan", "NaN", "inf", "-Infinity", math.nan, 1e300, "text"])
def test_a_loss_that_is_no_number(loss):
    found = course([progress(1, "trainer.0", step=1, loss=1.0), progress(2, "trainer.0", step=2, loss=loss)])
    assert values(found.curves[LOSS]["trainer", 0]) == [1.0, math.inf]


def test_a_job_that_reports_steps_only():
    found = course([progress(at, "trainer.0", step=at) for at in range(3)])
    assert list(found.curves) == [STEPS]


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
    assert lives(found, "trainer.1") == [(0.5, 100, "completed")]
    assert not found.hangs
    assert all(abs(loss) < 1e30 or loss == math.inf for _, loss in found.curves[LOSS].get(("trainer", 0), []))


def test_an_empty_record():
    found = course([])
    assert (found.begin, found.end, found.lives, found.curves) == (0.0, 0.0, {}, {})


def test_the_pace_in_steps():
    steps = [(0, 0), (2, 10), (2, 11), (3, 4), (5, 9), (6, math.nan), (7, 20), (9, 24)]
    found = course([progress(at, "trainer.0", step=step) for at, step in steps])
    line = found.curves[STEPS]["trainer", 0]
    assert (times(line), values(line)) == ([0, 2, 3, 5, 7, 9], [None, 5.0, None, 2.5, 5.5, 2.0])


def test_reports_without_a_new_step_and_the_last_one_of_a_process_have_no_pace():
    """An evaluation at the end, with reports of it, is no training at no speed."""
    name = "trainer.0"
    said = [progress(at, name, step=10 * at, loss=1 / at, rate=320.0) for at in (1, 2, 3, 4)]
    said += [progress(9, name, step=40, loss=1 / 4, rate=0.0, age=0.5), exited(20, name)]
    late = progress(20, name, step=41, loss=0.5, rate=12.0, age=2.0)
    for events, at in ((said, [1, 2, 3, 4]), ([*said[:-1], late, said[-1]], [1, 2, 3, 4, 18])):
        curves = course([launch(name), started(0, name), *events]).curves
        assert times(curves[LOSS]["trainer", 0]) == at
        assert values(curves[SAMPLES]["trainer", 0]) == [320.0] * (len(at) - 1)
        assert values(curves[STEPS]["trainer", 0]) == [None] + [10.0] * (len(at) - 2)


def test_which_ranks_came_late():
    """Of a record that is not trusted."""
    said = [
        event(60, "lateness", late=[{"rank": 1, "share": 0.3, "seconds": 0.04}, {"rank": 0, "share": 7}]),
        event(120, "lateness", late="?"),
        event(180, "lateness", late=[{"rank": "1", "share": 1}, {"rank": -1, "share": 1}, 3, {"rank": 2}]),
        event(240, "lateness", late=[{"rank": 1, "share": 1}]),
    ]
    found = course([launch("trainer.0", "trainer.1"), *said]).curves[LATE]
    assert list(found) == [("trainer", 1)]
    assert found["trainer", 1] == [(BEGIN + 60, 30), (BEGIN + 120, 0), (BEGIN + 180, 0), (BEGIN + 240, 100)]
