"""What a picture shows of a record, in numbers."""

import math

import pytest

from fleetrun.plots.course import (
    Curve,
    Fate,
    course,
    known_paces,
    lonely,
    median,
    middle,
    pace_of_steps,
    thinned,
)
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


def test_named_values_are_series_of_each_process_that_break_at_a_restart():
    said = [launch("trainer.0", "trainer.1"), started(0, "trainer.0"), started(0, "trainer.1")]
    said += [progress(at, "trainer.0", values={"lr": at / 10, "AUC/train": 0.5}) for at in (1, 2)]
    said += [progress(3, "trainer.1", values={"lr": "nan"}), exited(4, "trainer.0", 1)]
    said += [started(5, "trainer.0", 1), progress(6, "trainer.0", values={"lr": 0.6, "odd": [1]})]
    found = course(said)
    assert not found.curves, "values alone are neither loss nor speed"
    lr = found.values["lr"]
    assert plain(lr["trainer", 0].values) == [0.1, 0.2, None, 0.6]
    assert [time - BEGIN for time in lr["trainer", 0].times] == [1, 2, 5, 6]
    assert plain(lr["trainer", 1].values) == [None]
    assert found.values["AUC/train"].keys() == {("trainer", 0)}
    assert plain(found.values["odd"]["trainer", 0].values) == [None]


def test_a_number_of_a_table_is_the_sum_of_what_each_server_said_last():
    said = [launch("ps.0", "ps.1")]
    rows = [(1, 0, 10.0), (2, 1, 5.0), (3, 0, 20.0)]
    said += [progress(at, f"ps.{rank}", tables={"user": {"rows": count}}) for at, rank, count in rows]
    said += [progress(4, "ps.1", tables={"user": {"rows": -1, "other": 3}, "item": 7, "cold": {"rows": "x"}})]
    found = course(said)
    assert not found.curves
    assert found.tables.keys() == {"rows"}
    assert found.tables["rows"].keys() == {"user"}
    assert found.tables["rows"]["user"].values == [10, 15, 25]


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


def test_processes_of_other_nodes_are_there_but_what_happened_to_the_job_is_there_once():
    again = event(5, "ready", attempt=1, containers=containers("trainer.0"))
    own = [launch("trainer.0"), started(1, "trainer.0"), again, event(7, "hung"), exited(9, "trainer.0")]
    more = [*own[:-1], exited(8, "trainer.0", 3), over(20)]
    found = course(own, None, [more])
    assert (found.restarts, found.hangs, found.code) == ([BEGIN + 5], [BEGIN + 7], None)
    assert lives(found) == [(1, 9, Fate.OK, 0)]
    assert lives(found, "trainer.0@0") == [(1, 8, Fate.FAILED, 0)]


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


# ---- Curves made fit for a picture.


def curve(losses, rank=0):
    made = Curve("trainer", rank)
    for time, loss in enumerate(losses):
        made.point(float(time), loss, loss * 10, float(time) if loss == loss else math.nan)
    return made


def points_of(values):
    return [None if math.isnan(value) else value for value in values]


def test_a_short_curve_stays():
    made = curve([1.0, 2.0, 3.0])
    assert thinned(made, 3) is made


def test_a_long_one_is_the_mean_of_neighbours():
    thin = thinned(curve([float(number) for number in range(1000)]), 100)
    assert len(thin.times) == 100
    assert (thin.losses[0], thin.times[0], thin.paces[0], thin.steps[0]) == (4.5, 4.5, 45.0, 4.5)


def test_gaps_stay_gaps():
    thin = thinned(curve([1.0] * 20 + [math.nan] + [2.0] * 19), 10)
    assert points_of(thin.losses) == [1.0] * 5 + [None] + [2.0] * 5


def test_what_broke_is_kept():
    made = curve([1.0] * 100)
    made.broken = [50.0]
    assert thinned(made, 10).broken == [50.0]


def test_the_middle_of_many():
    curves = [curve([float(rank)] * 11, rank) for rank in (1, 2, 9)]
    times, values = middle(curves, [each.losses for each in curves], 5)
    assert set(values) == {2.0}
    assert times == pytest.approx([0.5, 2.5, 4.5, 6.5, 8.5, 10]), "the mean times of its points"


def test_there_is_none_where_most_say_nothing():
    curves = [
        curve([1.0] * 5 + [math.nan] * 4 + [1.0] * 2),
        curve([3.0] * 11),
        curve([2.0] * 5 + [math.nan] * 6),
    ]
    _, values = middle(curves, [each.losses for each in curves], 10)
    assert points_of(values) == [2.0] * 5 + [None] * 4 + [2.0] * 2
    assert middle([], [], 10) == ([], [])


@pytest.mark.parametrize(
    ("values", "found"), [([3.0], 3.0), ([1.0, 9.0, 2.0], 2.0), ([1.0, 2.0], 1.5), ([math.nan, 4.0], 4.0)]
)
def test_median(values, found):
    assert median(values) == found


def test_the_median_of_nothing():
    assert math.isnan(median([math.nan]))


def test_the_pace_in_steps():
    made = Curve("trainer", 0)
    for time, step in ((0.0, 0.0), (2.0, 10.0), (2.0, 11.0), (3.0, 4.0), (4.0, math.nan), (5.0, 9.0)):
        made.point(time, 1.0, math.nan, step)
    paces = pace_of_steps(made)
    assert (paces.times, points_of(paces.values)) == ([2.0, 3.0, 5.0], [5.0, None, 2.5])


def test_reports_without_a_new_step_and_the_last_one_of_a_process_have_no_pace():
    """An evaluation at the end, with reports of it, is no training at no speed."""
    name = "trainer.0"
    said = [progress(at, name, step=10 * at, loss=1 / at, rate=320.0) for at in (1, 2, 3, 4)]
    said += [progress(9, name, step=40, loss=1 / 4, rate=0.0, age=0.5), exited(20, name)]
    late = progress(20, name, step=41, loss=0.5, rate=12.0, age=2.0)
    for events, times in ((said, [1, 2, 3, 4]), ([*said[:-1], late, said[-1]], [1, 2, 3, 4, 18])):
        curve = course([launch(name), started(0, name), *events]).curves["trainer", 0]
        assert [time - BEGIN for time in curve.times] == times
        assert points_of(known_paces(curve).values) == [320.0] * (3 if len(times) == 4 else 4)
        assert points_of(pace_of_steps(curve).values) == [10.0] * (2 if len(times) == 4 else 3)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([], []),
        ([1.0, 2.0, 3.0], [0, 1, 2]),
        ([math.nan] * 20, []),
        ([1.0] * 20, []),
        ([math.nan, 1.0] * 20, [*range(1, 40, 2)]),
        ([1.0, math.nan, *[1.0] * 20, math.nan, 1.0], [0, 23]),
    ],
)
def test_points_that_no_line_shows(values, found):
    """Of a job that fails after each report no line can be drawn at all."""
    assert lonely(values) == found


def test_which_ranks_came_late():
    """Of a record that is not trusted."""
    said = [
        event(60, "lateness", late=[{"rank": 1, "share": 0.3, "seconds": 0.04}, {"rank": 0, "share": 7}]),
        event(120, "lateness", late="?"),
        event(180, "lateness", late=[{"rank": "1", "share": 1}, {"rank": -1, "share": 1}, 3, {"rank": 2}]),
    ]
    found = course([launch("trainer.0", "trainer.1"), *said])
    assert [at - BEGIN for at, _ in found.late] == [60, 120, 180]
    assert found.late[0][1] == {1: 0.3, 0: 1.0}
    assert found.late[1][1] == {}
    assert found.late[2][1] == {}
