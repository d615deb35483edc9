"""Nodes of one job over a store: they meet, run, stop and end together, also thousands of them."""

import pytest

from fleetrun.elastic.rendezvous.records import CauseKind
from fleetrun.pod.policy import Budget
from tests.support.simulation import SimulatedJob


def job_of(count, **policy):
    job = SimulatedJob(**{"fewest": count, "most": count, **policy})
    for _ in range(count):
        job.add()
    return job


def running(count, **policy):
    job = job_of(count, **policy)
    job.until(job.all_run())
    return job


def test_nodes_meet_and_run():
    job = running(3)
    assert [player.runs[0].rank for player in job.players] == [0, 1, 2]
    assert {player.runs[0].members for player in job.players} == {("n1", "n2", "n3")}
    assert job.loop.now < 1001


def test_a_job_completes_when_all_trainers_have():
    job = running(2)
    job.players[0].complete()
    job.loop.run_for(30)
    assert not job.players[0].over
    job.players[1].complete()
    job.until(job.all_over)
    assert [player.end for player in job.players] == [(0, None)] * 2
    assert [player.finishes for player in job.players] == [1, 1]
    job.until(lambda: all(player.membership.closed for player in job.players))
    assert job.ledger.range("") == {}


def test_a_failure_ends_the_job_on_all_nodes():
    job = running(3)
    job.players[1].fail(7)
    began = job.loop.now
    job.until(lambda: all(player.stops for player in job.players))
    assert job.loop.now - began < 0.1
    job.until(job.all_over)
    assert job.loop.now - began < 1
    assert {player.code for player in job.players} == {7}
    for player in job.players:
        cause = player.end[1]
        assert (cause.why, cause.node, cause.rank) == (CauseKind.FAILED, "h2 (10.0.0.2)", 1)
        assert cause.headline == "trainer 1 exited with code 7"
    job.until(lambda: all(player.membership.closed for player in job.players))
    assert job.ledger.range("") == {}


def test_a_failure_restarts_the_job_on_all_nodes():
    job = running(3, budget=Budget(2))
    job.players[1].fail(7, restart=True, after=0.5)
    job.until(lambda: all(len(player.runs) == 2 for player in job.players))
    assert [(player.runs[1].rank, player.runs[1].restarts) for player in job.players] == [
        (0, 1), (1, 1), (2, 1)
    ]  # fmt: skip
    for player in job.players:
        player.complete()
    job.until(job.all_over)
    assert {player.code for player in job.players} == {0}


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
def test_a_member_sends_three_requests_and_the_leader_gets_two_changes_of_each(count, gap):
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
def test_a_thousand_nodes_learn_of_a_failure_in_one_message():
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
