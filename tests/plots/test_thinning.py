"""Curves made fit for a picture."""

import math

import pytest

from fleetrun.plots.course import Curve, lonely, median, middle, pace_of_steps, thinned


def curve(losses, rank=0):
    made = Curve("trainer", rank)
    for time, loss in enumerate(losses):
        made.point(float(time), loss, loss * 10, float(time) if loss == loss else math.nan)
    return made


def plain(values):
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
    assert plain(thin.losses) == [1.0] * 5 + [None] + [2.0] * 5


def test_what_broke_is_kept():
    made = curve([1.0] * 100)
    made.broken = [50.0]
    assert thinned(made, 10).broken == [50.0]


def test_the_middle_of_many():
    curves = [curve([float(rank)] * 11, rank) for rank in (1, 2, 9)]
    times, values = middle(curves, [each.losses for each in curves], 5)
    assert set(values) == {2.0}
    assert times == pytest.approx([1, 3, 5, 7, 9, 11])


def test_there_is_none_where_most_say_nothing():
    curves = [
        curve([1.0] * 5 + [math.nan] * 4 + [1.0] * 2),
        curve([3.0] * 11),
        curve([2.0] * 5 + [math.nan] * 6),
    ]
    _, values = middle(curves, [each.losses for each in curves], 10)
    assert plain(values) == [2.0] * 5 + [None] * 4 + [2.0] * 2
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
    assert plain(pace_of_steps(made)) == [None, 5.0, None, None, None, None]


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
