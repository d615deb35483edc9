"""Numbers as the foot and the tables write them."""

import math

import pytest

from fleetrun.console.figures import count, loss, short


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
    assert short(number) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999, "999"), (1234567, "1,234,567")])
def test_steps_to_the_last_one(number, text):
    assert count(number) == text


@pytest.mark.parametrize(("number", "text"), [(0.123456, "0.1235"), (1e-9, "1e-09"), (math.nan, "nan")])
def test_losses_in_four_digits(number, text):
    assert loss(number) == text
