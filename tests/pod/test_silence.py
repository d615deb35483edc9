"""When a job hangs, decided from looks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fleetrun.pod.hangs import LOOKS, Silence

SAME = {"a": 1, "b": 1}
LOOK_AGAIN = [SAME] * LOOKS


def verdicts(*seen: Mapping[str, int]) -> list[bool]:
    silence = Silence()
    return [silence.look(each) for each in seen]


def test_nothing_new_in_so_many_looks_is_a_hang():
    assert verdicts(SAME, *LOOK_AGAIN) == [False] * LOOKS + [True]


@pytest.mark.parametrize(
    "sign",
    [
        pytest.param({"a": 2, "b": 1}, id="one of them is enough"),
        pytest.param({"a": 1, "b": 0}, id="a log that became shorter"),
        pytest.param({"a": 1, "b": 1, "c": 1}, id="one more begins"),
        pytest.param({}, id="none runs"),
    ],
)
def test_a_sign_of_life_begins_the_count_anew(sign: Mapping[str, int]):
    before = [SAME] * LOOKS
    assert verdicts(*before, sign) == [False] * (LOOKS + 1)
    assert verdicts(*before, sign, *[sign] * (LOOKS - 1)) == [False] * (2 * LOOKS)


def test_one_that_ends_neither_gives_a_sign_nor_is_waited_for():
    alone = {"b": 1}
    assert verdicts(SAME, SAME, *[alone] * (LOOKS - 1)) == [False] * LOOKS + [True]


def test_where_none_runs_none_is_silent():
    assert verdicts(*[{}] * (3 * LOOKS)) == [False] * (3 * LOOKS)


def test_it_stays_a_hang_until_something_happens():
    assert verdicts(SAME, *LOOK_AGAIN, SAME, {"a": 2, "b": 1})[-3:] == [True, True, False]
