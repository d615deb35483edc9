"""Who measures with whom: no machine twice in a turn, no pair twice at all."""

import pytest

from fleetrun.doctor.links import MOST_TURNS, partner, turns


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_few_machines_meet_each_other_once(count: int) -> None:
    pairs = [frozenset(pair) for turn in turns(count) for pair in turn]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {frozenset((one, other)) for one in range(count) for other in range(one)}


@pytest.mark.parametrize("count", [2, 7, 40, 1000])
def test_nobody_is_at_two_places(count: int) -> None:
    found = turns(count)
    assert len(found) <= MOST_TURNS
    for turn in found:
        players = [each for pair in turn for each in pair]
        assert len(players) == len(set(players))
        assert len(players) >= count - 1


def test_both_of_a_pair_know_who_measures() -> None:
    for turn in turns(5):
        for me in range(5):
            found = partner(turn, me)
            if found is not None:
                other, measures = found
                assert partner(turn, other) == (me, not measures)
