"""Which numbers of a report belong into an event file."""

from fleetrun.exporters.job_state import MOST_NAMES
from fleetrun.exporters.tensorboard import LOSS, RATE, ChangedScalars
from tests.exporters.said import report


def points(scalars, *reports):
    return [scalars.take(each) for each in reports]


def test_everything_that_is_a_number_at_its_step():
    (point,) = points(ChangedScalars(), report(step=7, loss=0.5, values={"lr": 0.1}, rate=100.0))
    assert point.step == 7
    assert point.scalars == {LOSS: 0.5, RATE: 100.0, "lr": 0.1}


def test_a_number_is_written_once_for_a_step_unless_it_changes():
    said = [
        report(step=1, loss=0.5, values={"lr": 0.1}),
        report(step=1, loss=0.5, values={"lr": 0.1}),
        report(step=1, loss=0.5, values={"lr": 0.2}),
        report(step=2, loss=0.5, values={"lr": 0.2}),
    ]
    assert [point and point.scalars for point in points(ChangedScalars(), *said)] == [
        {LOSS: 0.5, "lr": 0.1},
        None,
        {"lr": 0.2},
        {LOSS: 0.5, "lr": 0.2},
    ]


def test_the_pace_is_written_once_for_a_step():
    said = [report(step=1, rate=5.0), report(step=1, rate=4.0), report(step=2, rate=3.0)]
    assert [point and point.scalars for point in points(ChangedScalars(), *said)] == [
        {RATE: 5.0},
        None,
        {RATE: 3.0},
    ]


def test_reports_without_a_step_are_counted():
    found = points(ChangedScalars(), report(values={"a": 1.0}), report(values={"a": 2.0}))
    assert [point.step for point in found] == [1, 2]


def test_a_sign_of_life_is_no_point():
    assert points(ChangedScalars(), report(), report(step=3)) == [None, None]


def test_the_first_of_each_attempt_begins_anew():
    scalars = ChangedScalars()
    said = [report(step=step, loss=1.0) for step in (5, 6)]
    assert [point.restart for point in points(scalars, *said)] == [True, False]
    scalars.restart()
    assert [(point.restart, point.step) for point in points(scalars, *said)] == [(True, 5), (False, 6)]


def test_names_are_bounded_and_those_that_came_first_stay():
    scalars = ChangedScalars()
    points(scalars, report(step=1, loss=0.1, rate=1.0, values={"first": 1.0}))
    assert not scalars.refused
    (point,) = points(scalars, report(step=2, loss=0.1, values={f"n{n}": 1.0 for n in range(MOST_NAMES)}))
    assert len(point.scalars) == MOST_NAMES - 1 + 1, "and the loss"
    assert scalars.refused
    (point,) = points(scalars, report(step=3, values={"first": 2.0, "another": 1.0}))
    assert point.scalars == {"first": 2.0}


def test_a_loss_that_is_no_number_is_written():
    (point,) = points(ChangedScalars(), report(step=1, loss=float("nan")))
    assert point.scalars[LOSS] != point.scalars[LOSS]
