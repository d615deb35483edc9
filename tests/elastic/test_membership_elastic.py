"""Jobs that survive the coming and going of nodes: --nnodes MIN:MAX and --elastic_level."""

import pytest

from fleetrun.elastic.rendezvous.records import CauseKind
from fleetrun.envs.contract import NodeLoss
from fleetrun.pod.policy import Budget
from tests.support.simulation import SimulatedJob

LEASE = 10.0


def running(fewest, most, count=None, **policy):
    job = SimulatedJob(fewest=fewest, most=most, lease=LEASE, **{"elastic_timeout": 5, **policy})
    for _ in range(count or most):
        job.add()
    job.until(job.all_run())
    job.loop.run_for(5)
    return job


def last_run(job):
    (members,) = {player.runs[-1].members for player in job.players if player.running}
    return members


def test_a_newcomer_joins_and_all_start_anew():
    job = running(1, 3, 2)
    began = job.loop.now
    job.add()
    job.until(job.all_run())
    assert job.loop.now - began < 1
    assert last_run(job) == ("n1", "n2", "n3")
    assert job.players[0].stops[0][0].why is CauseKind.JOINED
    assert job.players[0].stops[0][1] is True
    assert {player.runs[-1].restarts for player in job.players} == {0}


def test_several_newcomers_cost_one_restart():
    job = running(1, 6, 2)
    for _ in range(3):
        job.add()
        job.loop.run_for(0.5)
    job.until(job.all_run())
    assert last_run(job) == ("n1", "n2", "n3", "n4", "n5")
    assert len(job.players[0].runs) == 2


def test_a_lost_node_is_done_without():
    job = running(2, 3)
    job.players[1].crash()
    job.until(lambda: all(len(job.players[number].runs) == 2 for number in (0, 2)))
    assert last_run(job) == ("n1", "n3")
    assert job.players[2].runs[-1].restarts == 0
    assert job.loop.now < 1005 + LEASE + 4


def test_a_node_that_leaves_is_done_without_at_once():
    job = running(2, 4)
    began = job.loop.now
    job.players[0].leave()
    job.until(job.all_run_again(*job.players[1:]))
    assert job.loop.now - began < 4
    assert last_run(job) == ("n4", "n2", "n3")


def test_below_the_fewest_the_job_ends_and_says_why():
    job = running(2, 3)
    job.players[0].leave()
    job.until(job.all_run_again(*job.players[1:]))
    job.players[1].crash()
    job.until(lambda: job.players[2].over)
    code, cause = job.players[2].end
    assert (code, cause.why, cause.node) == (125, CauseKind.LOST, "h2 (10.0.0.2)")


@pytest.mark.parametrize("on_loss", [NodeLoss.WAIT, NodeLoss.SHRINK])
def test_unless_it_fails_it_waits_for_a_replacement_first(on_loss):
    job = running(2, 2, on_loss=on_loss, elastic_timeout=20)
    job.players[1].crash()
    job.until(
        lambda: job.players[0].notes and job.players[0].notes[-1].missing == ("h2 (10.0.0.2) (rank 1)",)
    )
    job.loop.run_for(5)
    replacement = job.add()
    job.until(job.all_run(job.players[0], replacement), within=1)
    assert last_run(job) == ("n1", "n3")


@pytest.mark.parametrize("on_loss", [NodeLoss.WAIT, NodeLoss.SHRINK])
def test_without_a_replacement_it_names_who_is_missing(on_loss):
    job = running(2, 2, on_loss=on_loss, elastic_timeout=20)
    job.players[1].crash()
    job.until(lambda: job.players[0].over, within=LEASE + 22)
    code, cause = job.players[0].end
    assert (code, cause.why) == (124, CauseKind.TIMEOUT)
    assert cause.headline == "1 of 2 nodes joined again within 20 s; missing h2 (10.0.0.2) (rank 1)"
    assert "h2 (10.0.0.2) is lost" in cause.lines[0]


def test_level_0_a_node_that_fails_leaves_and_the_others_hold():
    job = running(3, 3, on_loss=NodeLoss.WAIT, elastic_timeout=20, budget=Budget(3))
    job.players[1].fail(7, restart=True)
    job.until(lambda: job.players[1].over, within=2)
    assert job.players[1].end[0] == 7
    assert job.players[1].end[1].rank == 1
    job.loop.run_for(10)
    assert job.players[0].running is None
    replacement = job.add()
    job.until(job.all_run(job.players[0], replacement, job.players[2]), within=1)
    assert last_run(job) == ("n1", "n4", "n3")


def test_level_0_the_leader_may_be_the_one_that_fails():
    job = running(2, 2, on_loss=NodeLoss.WAIT, elastic_timeout=20, budget=Budget(3))
    job.players[0].fail(7, restart=True)
    job.until(lambda: job.players[0].over, within=2)
    replacement = job.add()
    job.until(job.all_run(job.players[1], replacement), within=5)
    assert last_run(job) == ("n3", "n2")


def test_level_1_a_node_that_fails_comes_back():
    job = running(2, 2, on_loss=NodeLoss.SHRINK, budget=Budget(3))
    began = job.loop.now
    job.players[1].fail(7, restart=True)
    job.until(lambda: all(len(player.runs) == 2 for player in job.players))
    assert job.loop.now - began < 1
    assert last_run(job) == ("n1", "n2")


def test_a_replacement_that_comes_before_the_loss_is_known_waits_for_it():
    job = running(2, 2, on_loss=NodeLoss.SHRINK, elastic_timeout=20)
    job.players[1].crash()
    replacement = job.add()
    job.until(job.all_run(job.players[0], replacement), within=LEASE + 3)
    assert last_run(job) == ("n1", "n3")


def test_a_machine_that_comes_back_has_its_rank_again():
    job = running(4, 4, on_loss=NodeLoss.SHRINK, elastic_timeout=30)
    job.players[1].crash()
    job.players[2].crash()
    job.loop.run_for(LEASE + 2)
    third, second = job.add(host="10.0.0.3", name="h3"), job.add(host="10.0.0.2", name="h2")
    job.until(job.all_run(job.players[0], job.players[3], second, third))
    assert last_run(job) == ("n1", second.node.id, third.node.id, "n4")


def test_a_node_that_was_cut_off_too_long_stops_and_comes_back_as_a_newcomer():
    job = running(1, 2)
    away = job.players[1]
    away.store.cut()
    job.until(lambda: len(job.players[0].runs) == 2)
    assert last_run_of(job.players[0]) == ("n1",)
    assert away.running.generation == 1
    away.store.heal()
    job.until(lambda: away.stops and away.running is None)
    assert (
        away.stops[-1][0].headline
        == "h2 (10.0.0.2) was disconnected from the job, which continued without it"
    )
    job.until(lambda: len(job.players[0].runs) == 3 and away.running is not None)
    assert last_run(job) == ("n1", "n2")


def last_run_of(player):
    return player.runs[-1].members


def test_a_full_elastic_job_refuses_more():
    job = running(1, 2)
    more = job.add()
    job.until(lambda: more.over, within=LEASE + 2)
    assert "full: 2 of 2" in more.error.message
    assert not job.players[0].stops


def test_a_newcomer_that_dies_while_it_is_taken_in_does_not_keep_the_others():
    job = running(2, 3, 2)
    newcomer = job.add()
    job.until(lambda: job.players[0].stops)
    newcomer.crash()
    job.until(job.all_run_again(*job.players[:2]), within=LEASE)
    assert last_run(job) == ("n1", "n2")


def test_a_failure_of_an_elastic_job_is_restarted_without_waiting_for_more_nodes():
    job = running(1, 4, 2, elastic_timeout=30, budget=Budget(1))
    began = job.loop.now
    job.players[0].fail(7, restart=True)
    job.until(lambda: all(len(player.runs) == 2 for player in job.players))
    assert job.loop.now - began < 1


def test_nodes_that_come_and_go_do_not_use_up_restarts():
    job = running(1, 3, 2, budget=Budget(1))
    job.add()
    job.until(job.all_run())
    job.players[2].leave()
    job.until(job.all_run_again(*job.players[:2]))
    job.players[0].fail(7, restart=True)
    job.until(job.all_run_again(*job.players[:2]))
    assert job.players[0].runs[-1].restarts == 1


def test_processes_of_a_generation_that_went_on_without_them_are_killed():
    """Whatever they would still do, such as a checkpoint on SIGTERM, would come between."""
    job = running(1, 2)
    away = job.players[1]
    away.stop_takes = 1000.0
    away.store.cut()
    job.until(lambda: len(job.players[0].runs) == 2)
    away.store.heal()
    job.until(lambda: away.kills == 1 and away.running is None, within=LEASE)


def test_a_node_that_is_given_up_while_it_stops_kills_what_is_left():
    """It was told to stop by another's failure, with the grace of that stop; then the others went on."""
    job = running(2, 3, on_loss=NodeLoss.SHRINK, budget=Budget(3))
    away = job.players[2]
    away.stop_takes = 1000.0
    job.players[0].fail(7, restart=True)
    job.until(lambda: away.stops)
    assert away.kills == 0
    away.store.cut()
    job.until(lambda: all(len(player.runs) == 2 for player in job.players[:2]))
    away.store.heal()
    job.until(lambda: away.kills == 1 and away.running is None, within=LEASE)
    job.until(lambda: len(away.runs) == 2, within=LEASE)
