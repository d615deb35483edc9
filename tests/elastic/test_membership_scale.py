"""Thousands of nodes: what each asks of the store and hears from it does not depend on how many there are."""

import pytest

from tests.support.simulation import SimulatedJob


def meet(count, gap):
    job = SimulatedJob(fewest=count, most=count, rdzv_timeout=300)
    for number in range(count):
        job.loop.after(number * gap, job.add)
    started = []
    job.on_start = lambda player, run: started.append(player)
    job.until(lambda: len(started) == count, within=300)
    return job


@pytest.mark.slow
@pytest.mark.parametrize(("count", "gap"), [(1000, 0.001), (1000, 0.0), (3000, 0.001)])
def test_a_member_asks_three_times_and_the_leader_hears_twice_of_each(count, gap):
    job = meet(count, gap)
    leader, *others = job.players
    assert leader.membership._view.leads
    told = [player.store.asked["told"] for player in others]
    assert max(player.store.asked["put"] for player in others) <= 3
    assert {player.store.asked["read"] for player in others} == {1}
    assert max(told) <= 10
    assert leader.store.asked["told"] <= 2 * count + 20
    assert leader.store.asked.total() - leader.store.asked["told"] <= 15


@pytest.mark.slow
def test_all_of_a_thousand_hear_of_a_failure_in_one_message():
    job = meet(1000, 0.0)
    before = [player.store.asked["told"] for player in job.players]
    began = job.loop.now
    job.players[500].fail(7)
    job.until(lambda: all(player.stops for player in job.players))
    assert job.loop.now - began < 0.1
    job.until(job.all_over)
    assert job.loop.now - began < 1
    told = [player.store.asked["told"] - one for player, one in zip(job.players, before, strict=True)]
    assert max(told[1:]) <= 3


@pytest.mark.slow
def test_the_leader_looks_at_many_changes_at_once():
    job = meet(1000, 0.001)
    leader = job.players[0].membership
    looks = set()
    for player in job.players:
        job.loop.after(player.runs[0].rank * 0.001, player.complete)
        job.loop.after(player.runs[0].rank * 0.001, lambda: looks.add(leader._looked_at))
    job.until(job.all_over)
    assert len(looks) < 150
