"""Numbers as the status line and the tables write them."""

import math

import pytest

from fleetrun.console.text import (
    describe_duration,
    format_clock,
    format_count,
    format_duration,
    format_loss,
    format_short,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (512, "512"),
        (999.4, "999"),
        (999.6, "1k"),
        (999_700, "1M"),
        (9.996e14, "1e+15"),
        (12_345, "12.3k"),
        (-12_345, "-12.3k"),
        (2.5e6, "2.5M"),
        (3e9, "3G"),
        (1e30, "1e+30"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_paces_in_three_digits(number, text):
    assert format_short(number) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999, "999"), (1234567, "1,234,567")])
def test_steps_to_the_last_one(number, text):
    assert format_count(number) == text


@pytest.mark.parametrize(("number", "text"), [(0.123456, "0.1235"), (1e-9, "1e-09"), (math.nan, "nan")])
def test_losses_in_four_digits(number, text):
    assert format_loss(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (math.nan, ""),
        (math.inf, ""),
        (-5, "0s"),
        (0.9, "0s"),
        (59, "59s"),
        (60, "1m00s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (86_399, "23h59m"),
        (86_400 * 12 + 7200, "12d02h"),
    ],
)
def test_how_long_in_a_column(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.04, "0.0 s"),
        (2.5, "2.5 s"),
        (59.9, "59.9 s"),
        (60, "1m00s"),
        (751, "12m31s"),
        (7200, "2h00m"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_how_long_in_a_sentence(seconds, text):
    assert describe_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00:00"),
        (59.99, "0:00:59"),
        (3600, "1:00:00"),
        (86_399, "23:59:59"),
        (86_400, "1d 0:00:00"),
        (200 * 86_400 + 61, "200d 0:01:01"),
        (-3, "0:00:00"),
    ],
)
def test_how_long_where_it_ticks(seconds, text):
    assert format_clock(seconds) == text
