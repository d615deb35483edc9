"""What stops a job, and what is reported: failures, nodes that are lost or leave, their order."""

import pytest

from fleetrun.elastic.rendezvous.records import Cause, CauseKind
from fleetrun.envs.contract import NodeLoss
from fleetrun.plan.topology import Offer
from fleetrun.pod.policy import Budget
from tests.support.simulation import SimulatedJob

LEASE = 10.0


def running(count, *, most=None, **policy):
    job = SimulatedJob(fewest=count, most=most or count, lease=LEASE, elastic_timeout=1, **policy)
    for _ in range(count):
        job.add()
    job.until(job.all_run())
    job.loop.run_for(5)
    return job


def alive(job):
    return [player for player in job.players if not player.crashed and not player.left]


def ends(job):
    """The one end that all remaining nodes have seen."""
    (end,) = {(player.end[0], player.end[1].why, player.end[1].headline) for player in alive(job)}
    return end


# ---- which cause


def test_the_oldest_failure_is_the_cause_though_it_was_told_later():
    job = running(3)
    job.players[0].fail(1, age=0.0)
    job.players[2].fail(9, age=0.1)
    job.until(job.all_over)
    assert ends(job) == (9, CauseKind.FAILED, "trainer 2 exited with code 9")


def test_a_failure_seen_while_stopping_may_be_the_older_one():
    job = running(2)
    job.players[0].fail(1)
    job.loop.run_for(0.01)
    job.players[1].membership.note(
        Cause(why=CauseKind.FAILED, node="", headline="trainer 1 was killed", code=137, age=0.5)
    )
    job.until(job.all_over)
    assert ends(job) == (137, CauseKind.FAILED, "trainer 1 was killed")
    assert job.players[0].end[1].rank == 1


def test_the_end_comes_within_a_second_though_processes_take_long_to_stop():
    job = running(3)
    for player in job.players:
        player.stop_takes = 30
    began = job.loop.now
    job.players[1].fail(7)
    job.until(job.all_over, within=1)
    assert job.loop.now - began < 0.5


def test_the_end_comes_though_one_node_cannot_answer():
    job = running(3)
    job.players[2].store.cut()
    job.players[1].fail(7)
    job.until(lambda: all(player.over for player in job.players[:2]), within=5.2)
    job.players[2].store.heal()
    job.until(job.all_over, within=1)
    assert ends(job)[0] == 7


def test_when_all_fail_at_once_all_tell_the_same():
    job = running(5)
    for number, player in enumerate(job.players):
        player.fail(10 + number, age=0.1 * number)
    job.until(job.all_over)
    assert ends(job)[0] == 14


def test_the_failures_of_others_follow_from_a_node_that_has_gone():
    job = running(3, on_loss=NodeLoss.FAIL)
    job.players[2].crash()
    job.loop.run_for(LEASE - 2)
    job.until(lambda: job.ledger.get("nodes/n3") is None)
    job.players[1].fail(7, age=1.0)
    job.until(job.all_over)
    code, why, headline = ends(job)
    assert (code, why) == (125, CauseKind.LOST)
    assert headline.startswith("h3 (10.0.0.3) is lost")


def test_a_failure_before_the_job_stopped_for_a_newcomer_is_the_cause():
    job = running(2, most=3)
    job.add()
    job.until(lambda: job.players[0].stops)
    job.players[1].membership.note(Cause(why=CauseKind.FAILED, node="", headline="oh", code=9, age=1.0))
    job.until(job.all_over)
    assert {player.end[0] for player in job.players} == {9}


def test_a_timeout_of_the_job_is_never_answered_with_a_restart():
    job = running(2, on_loss=NodeLoss.SHRINK, budget=Budget(5))
    cause = Cause(why=CauseKind.TIMEOUT, node="", headline="the job took longer than 5 s", code=124)
    job.players[0].membership.failed(cause, True, 0.0)
    job.until(job.all_over)
    assert ends(job) == (124, CauseKind.TIMEOUT, "the job took longer than 5 s")


# ---- restarts


def test_failures_are_answered_as_often_as_allowed():
    job = running(2, budget=Budget(2))
    for number in (1, 2):
        job.players[0].fail(7, restart=True)
        job.until(lambda number=number: all(len(player.runs) == number + 1 for player in job.players))
        assert {player.runs[-1].restarts for player in job.players} == {number}
    job.players[0].fail(7, restart=False)
    job.until(job.all_over)
    assert ends(job)[0] == 7


@pytest.mark.slow
def test_a_job_that_restarts_often_does_not_fill_the_store():
    job = running(3, budget=Budget(100))
    sizes = []
    for _ in range(20):
        job.players[0].fail(7, restart=True)
        job.until(job.all_run_again(*job.players))
        sizes.append(len(job.ledger.range("")))
    assert len(set(sizes[2:])) == 1


def test_a_restart_waits_for_processes_that_stop_slowly():
    job = running(2, budget=Budget(1))
    job.players[1].stop_takes = 8
    job.players[0].fail(7, restart=True)
    job.loop.run_for(7.9)
    assert job.players[0].running is None
    job.until(job.all_run(), within=0.5)


def test_a_restart_waits_as_long_as_the_policy_says():
    job = running(2, budget=Budget(1))
    began = job.loop.now
    job.players[0].fail(7, restart=True, after=4.0)
    job.until(lambda: all(len(player.runs) == 2 for player in job.players))
    assert job.loop.now - began == pytest.approx(4.5, abs=0.5)


@pytest.mark.parametrize(("code", "restarts"), [(2, False), (7, True)])
def test_whether_there_is_a_restart_is_decided_for_the_cause_that_it_turned_out_to_be(code, restarts):
    job = running(2, budget=Budget(1))
    job.players[0].fail(1, restart=not restarts)
    job.players[1].fail(code, restart=restarts, age=0.2)
    job.until(lambda: job.all_over() or all(len(player.runs) == 2 for player in job.players))
    assert job.all_over() is not restarts


# ---- nodes that go


def test_a_node_that_dies_ends_a_fixed_job_when_its_lease_does():
    job = running(3)
    began = job.loop.now
    job.players[2].crash()
    job.until(lambda: all(player.over for player in alive(job)))
    assert LEASE * 0.7 < job.loop.now - began < LEASE + 1.5
    assert ends(job) == (125, CauseKind.LOST, "h3 (10.0.0.3) is lost: it sent no heartbeat for 10 s")
    assert job.players[0].end[1].rank == 2


@pytest.mark.parametrize("leads", [False, True])
def test_a_launcher_that_ends_is_not_said_to_be_silent(leads):
    job = running(3)
    player = job.players[0 if leads else 2]
    session = player.store._session
    player.crash()
    job.ledger.revoke(session)  # as a store does whose connection to it was closed
    job.until(lambda: all(each.over for each in alive(job)), within=LEASE / 2)
    code, why, headline = ends(job)
    assert (code, why) == (125, CauseKind.LOST)
    assert "launcher has ended" in headline
    assert "heard" not in headline


def test_the_leader_is_not_missed_longer_than_anybody_else():
    job = running(3)
    began = job.loop.now
    job.players[0].crash()
    job.until(lambda: all(player.over for player in alive(job)))
    assert job.loop.now - began < LEASE + 1.5
    assert ends(job)[:2] == (125, CauseKind.LOST)
    job.until(lambda: all(player.membership.closed for player in alive(job)))
    assert job.ledger.range("") == {}


def test_two_that_die_together_with_the_leader_are_noticed_too():
    job = running(4)
    job.players[0].crash()
    job.players[1].crash()
    job.until(lambda: all(player.over for player in alive(job)), within=2 * LEASE + 2)
    assert ends(job)[:2] == (125, CauseKind.LOST)


def test_a_node_that_was_away_for_less_than_its_lease_is_forgiven():
    job = running(3)
    for player in job.players:
        player.store.cut()
        job.loop.run_for(LEASE * 0.7)
        player.store.heal()
        job.loop.run_for(LEASE)
    assert not any(player.stops for player in job.players)


def test_a_node_that_is_told_to_leave_ends_a_fixed_job_at_once():
    job = running(3)
    began = job.loop.now
    job.players[1].leave(143)
    job.until(lambda: all(player.over for player in job.players))
    assert job.loop.now - began < 1.2
    assert ends(job) == (143, CauseKind.LEFT, "got SIGTERM")
    assert job.players[0].end[1].node == "h2 (10.0.0.2)"
    assert job.players[1].end[0] == 143


def test_the_leader_that_leaves_hands_over():
    job = running(3)
    job.players[0].leave(130)
    job.until(job.all_over, within=2)
    assert ends(job) == (130, CauseKind.LEFT, "got SIGTERM")


def test_a_node_that_leaves_after_its_failure_has_failed():
    job = running(3)
    job.players[1].fail(7)
    job.loop.run_for(0.1)
    job.players[1].leave(143)
    job.until(job.all_over, within=2)
    assert {player.code for player in alive(job)} == {7}
    assert job.players[1].code == 143


def test_a_stranger_does_not_take_the_lead_from_the_members():
    job = running(3)
    job.players[0].crash()
    job.add()
    job.until(lambda: (entry := job.ledger.get("state/leader")) is not None and entry.value != b"n1")
    assert job.ledger.get("state/leader").value in (b"n2", b"n3")


def test_all_leave_at_once():
    job = running(4)
    for player in job.players:
        player.leave(143)
    job.until(job.all_over, within=2)
    assert {player.end[0] for player in job.players} == {143}


def test_a_node_that_died_after_it_had_completed_is_not_missed():
    job = running(2)
    job.players[1].complete()
    job.loop.run_for(1)
    job.players[1].crash()
    job.loop.run_for(3 * LEASE)
    assert not job.players[0].stops
    job.players[0].complete()
    job.until(lambda: job.players[0].over)
    assert job.players[0].end == (0, None)


def test_a_server_that_fails_after_its_trainers_completed_is_a_failure():
    job = running(2)
    job.players[1].complete()
    job.loop.run_for(1)
    job.players[1].fail(9)
    job.until(job.all_over)
    assert ends(job)[0] == 9


def test_no_node_ends_with_0_before_its_servers_have_exited():
    job = running(2)
    job.players[1].stop_takes = 6
    for player in job.players:
        player.complete()
    job.until(lambda: job.players[0].over)
    assert not job.players[1].over
    job.until(job.all_over)
    assert [player.end for player in job.players] == [(0, None)] * 2


def test_every_step_of_a_stop_survives_the_death_of_the_leader():
    for step in range(12):
        job = running(3, budget=Budget(1))
        job.players[1].fail(7)
        job.loop.run_for(step * 0.05)
        job.players[0].crash()
        job.until(lambda job=job: all(player.over for player in alive(job)), within=LEASE + 5)
        assert ends(job)[0] == 7, step


@pytest.mark.parametrize("first", [True, False])
def test_a_node_whose_servers_others_need_is_missed_though_it_has_no_trainers(first):
    job = SimulatedJob(fewest=2, most=2, lease=LEASE, elastic_timeout=1)
    servers = Offer(servers=("10.0.0.9:6170",), service="10.0.0.9:6171")
    trainers = None if first else job.add()
    serving = job.add(offer=servers)
    trainers = trainers or job.add()
    job.until(job.all_run())
    serving.complete()
    job.loop.run_for(1)
    serving.crash()
    job.until(lambda: trainers.over, within=LEASE + 2)
    assert ends(job)[:2] == (125, CauseKind.LOST)
