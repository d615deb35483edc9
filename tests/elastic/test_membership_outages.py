"""The store is unreachable, comes back, comes back empty, or has the data of another job."""

import random

import pytest

from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.records import CauseKind
from fleetrun.errors import LaunchError, RendezvousError
from fleetrun.pod.policy import Budget
from tests.support.simulation import LossyStore, SimulatedJob

LEASE = 10.0


def running(count, **policy):
    job = SimulatedJob(**{"fewest": count, "most": count, "lease": LEASE, "elastic_timeout": 5, **policy})
    for _ in range(count):
        job.add()
    job.until(job.all_run())
    job.loop.run_for(5)
    return job


def cut(job, why="gone"):
    for player in job.players:
        player.store.cut(why)


def heal(job):
    for player in job.players:
        player.store.heal()


@pytest.mark.parametrize("seconds", [3, 9, 60, 3600])
def test_training_continues_while_the_store_is_away(seconds):
    job = running(3)
    cut(job)
    job.loop.run_for(seconds)
    heal(job)
    job.loop.run_for(3 * LEASE)
    assert all(player.downs == ["gone"] and player.ups == 1 for player in job.players)
    assert not any(player.stops or player.over for player in job.players)
    for player in job.players:
        player.complete()
    job.until(job.all_over)
    assert {player.code for player in job.players} == {0}


def test_nodes_that_come_back_one_after_the_other_are_waited_for():
    job = running(3)
    cut(job)
    job.loop.run_for(30)
    for player in job.players:
        player.store.heal()
        job.loop.run_for(LEASE * 0.4)
    job.loop.run_for(3 * LEASE)
    assert not any(player.stops or player.over for player in job.players)


@pytest.mark.parametrize("offset", [0.0, 0.3, 0.6, 0.9])
def test_a_leader_whose_network_flickers_still_sees_who_has_gone(offset):
    job = running(2)
    job.players[1].crash()
    job.loop.run_for(offset)
    for _ in range(30):
        job.players[0].store.cut()
        job.loop.run_for(0.7)
        job.players[0].store.heal()
        job.loop.run_for(0.31)
    assert job.players[0].code == 125


def test_a_node_that_does_not_come_back_is_lost():
    job = running(3)
    cut(job)
    job.loop.run_for(30)
    job.players[2].crash()
    for player in job.players[:2]:
        player.store.heal()
    job.until(lambda: all(player.over for player in job.players[:2]), within=2 * LEASE + 2)
    assert {(player.code, player.end[1].node) for player in job.players[:2]} == {(125, "h3 (10.0.0.3)")}


def test_while_the_store_is_away_nothing_is_asked_of_it():
    job = running(2)
    cut(job)
    job.loop.run_for(0.1)
    before = [player.store.asked.total() for player in job.players]
    job.players[0].complete()
    job.loop.run_for(50)
    assert [player.store.asked.total() for player in job.players] == before


def lossy(count):
    """Every message that was on its way when the network failed is lost."""
    job = SimulatedJob(fewest=count, most=count, lease=LEASE)
    dice = random.Random(1)
    dice.random = lambda: 1.0
    job.store_for = lambda id, lease: LossyStore(
        job.ledger, job.loop, id, lease=lease, delay=lambda: 0.05, dice=dice
    )
    for _ in range(count):
        job.add()
    job.until(job.all_run())
    job.loop.run_for(1)
    return job


def test_a_report_that_was_lost_is_told_again():
    job = lossy(2)
    for player in job.players:
        player.complete()
        player.store.cut()
    job.loop.run_for(2)
    heal(job)
    job.until(job.all_over, within=5)
    assert [player.end for player in job.players] == [(0, None)] * 2


def test_a_failure_that_was_lost_is_told_again():
    job = lossy(2)
    job.players[1].fail(7)
    job.players[1].store.cut()
    job.loop.run_for(2)
    assert not job.players[0].stops
    heal(job)
    job.until(job.all_over, within=5)
    assert {player.code for player in job.players} == {7}


def test_keys_under_a_lease_that_ends_are_written_under_the_new_one():
    job = lossy(3)
    for player in job.players[:2]:  # the first one leads
        player.store.renew()
    job.loop.run_for(3 * LEASE)
    assert not any(player.stops or player.over for player in job.players)
    assert job.ledger.get(records.LEADER_KEY).value == b"n1"


def test_each_reason_of_an_outage_is_told_once():
    """The first may be that nothing answers, and the next that other machines are missing."""
    job = running(2)
    store = job.players[0].store
    for why in ("one", "two", "one"):
        store.cut(why)
        job.loop.run_for(1)
    assert job.players[0].downs == ["one", "two"]
    for number in range(10):
        store.cut(f"reason {number}")
        job.loop.run_for(0.1)
    assert len(job.players[0].downs) == 5
    store.heal()
    job.until(lambda: job.players[0].ups == 1)
    store.cut("one")
    job.loop.run_for(1)
    assert job.players[0].downs[5:] == ["one"]


def test_a_failure_without_a_store_ends_this_node_soon():
    job = running(2)
    cut(job)
    job.loop.run_for(60)
    began = job.loop.now
    job.players[0].fail(7)
    job.until(lambda: job.players[0].over)
    assert job.loop.now - began == pytest.approx(5, abs=0.5)
    assert job.players[0].end[0] == 7
    assert job.players[0].stops == [(job.players[0].end[1], False)]
    job.players[1].store.heal()
    job.until(lambda: job.players[1].over, within=2 * LEASE + 2)
    assert job.players[1].code == 125


def test_a_failure_in_a_short_outage_reaches_the_others_after_it():
    job = running(2)
    cut(job)
    job.loop.run_for(1)
    job.players[0].fail(7)
    job.loop.run_for(2)
    heal(job)
    job.until(job.all_over, within=2)
    assert {player.code for player in job.players} == {7}


def test_a_stop_without_a_store_ends_with_its_cause():
    job = running(2, budget=Budget(1))
    job.players[0].fail(7, restart=True)
    job.until(lambda: all(player.stops for player in job.players))
    cut(job)
    job.until(job.all_over, within=70)
    assert {player.code for player in job.players} == {7}


def test_completed_without_a_store_no_node_waits_for_ever():
    job = running(2, rdzv_timeout=60)
    job.players[0].complete()
    job.loop.run_for(1)
    cut(job, "h1:6768: no answer")
    job.until(lambda: job.players[0].over, within=62)
    assert job.players[0].error.exit_code == 125
    assert "the ends of the other nodes are unknown" in job.players[0].error.message
    assert not job.players[1].over


def test_a_store_that_does_not_come_back_while_nodes_meet():
    job = SimulatedJob(fewest=3, most=3, rdzv_timeout=60)
    job.add()
    job.add()
    job.loop.run_for(30)
    cut(job)
    job.until(job.all_over, within=60.5)
    assert all(isinstance(player.error, RendezvousError) for player in job.players)
    assert job.players[0].error.message == "the rendezvous store did not come back within 60 s: gone"


def test_a_store_that_is_lost_for_good_ends_the_job_with_its_message():
    job = running(2)
    job.players[1].store.lose(LaunchError("h1:6768 is gone"))
    job.until(lambda: job.players[1].over)
    assert job.players[1].error.message == "h1:6768 is gone"
    assert job.players[1].stops[0][1] is False
    assert job.players[1].membership.closed


@pytest.mark.parametrize("lose", [lambda store: store.lose(LaunchError("gone")), lambda store: store.cut()])
def test_a_store_that_goes_with_the_node_that_left_does_not_hide_why(lose):
    """The others were told, but had no time to agree on it."""
    job = running(2)
    job.players[0].leave(143)
    job.until(lambda: job.players[1].stops)
    lose(job.players[1].store)
    job.until(job.all_over, within=6)
    code, cause = job.players[1].end
    assert (code, cause.node, cause.headline) == (143, "h1 (10.0.0.1)", "got SIGTERM")


def test_a_store_that_goes_with_a_node_without_which_the_job_would_go_on_is_lost():
    job = running(2, fewest=1)
    job.players[0].leave(143)
    job.until(lambda: job.players[1].stops)
    job.players[1].store.lose(LaunchError("h1:6768 is gone"))
    job.until(job.all_over)
    assert job.players[1].error.message == "h1:6768 is gone"


def test_a_store_that_lost_its_data_is_told_what_runs():
    job = running(3)
    cut(job)
    job.loop.run_for(LEASE * 3)
    job.ledger.delete_prefix("")
    job.ledger.revision = 0
    heal(job)
    job.loop.run_for(3 * LEASE)
    assert not any(player.stops or player.over for player in job.players)
    stranger = job.add()
    job.until(lambda: stranger.over, within=1)
    assert "full" in stranger.error.message
    job.players[1].fail(7)
    job.until(lambda: all(player.over for player in job.players[:3]), within=2)
    assert {player.code for player in job.players[:3]} == {7}


def test_a_stranger_that_finds_a_store_without_data_first_does_not_end_the_job():
    job = running(2)
    cut(job)
    job.loop.run_for(LEASE * 3)
    job.ledger.delete_prefix("")
    job.ledger.revision = 0
    stranger = job.add()
    job.loop.run_for(0.5)
    heal(job)
    job.until(lambda: stranger.over, within=LEASE)
    assert "full" in stranger.error.message
    job.loop.run_for(3 * LEASE)
    assert not any(player.stops or player.over for player in job.players[:2])


def test_a_node_that_comes_back_after_the_job_has_ended_and_gone_says_so():
    job = running(2, elastic_timeout=60)
    away = job.players[1]
    away.complete()
    away.store.cut()
    job.players[0].fail(7)
    job.until(lambda: job.players[0].membership.closed)
    assert job.ledger.range("") == {} or job.loop.run_until(lambda: job.ledger.range("") == {}, within=LEASE)
    away.store.heal()
    job.until(lambda: away.over, within=1)
    assert (
        away.error.message == "the job ended while h2 (10.0.0.2) was disconnected, so its result is unknown"
    )


def test_a_node_that_comes_back_to_the_next_job_of_that_name_does_not_take_part_in_it():
    job = running(2)
    away = job.players[1]
    away.store.cut()
    job.players[0].fail(7)
    job.until(lambda: job.players[0].membership.closed)
    again = [job.add(), job.add()]
    job.until(job.all_run(*again), within=2 * LEASE)
    assert again[0].running.generation == away.running.generation == 1
    away.store.heal()
    job.until(lambda: away.over and away.running is None, within=5)
    assert "full" in away.error.message
    job.loop.run_for(30)
    assert not any(player.stops for player in again)


def test_something_else_in_the_place_of_a_round_is_said():
    job = SimulatedJob(fewest=2, most=2)
    job.ledger.put(records.ROUND_KEY, b"not ours")
    player = job.add()
    job.until(lambda: player.over, within=1)
    assert player.error.message.startswith(
        "another version of fleetrun, or another program, uses this job ID"
    )


def test_something_else_among_the_nodes_is_not_counted():
    job = SimulatedJob(fewest=2, most=2)
    job.ledger.put(records.node_key("x"), b"[]")
    job.ledger.put(records.node_key("y"), b'{"id":"z","host":"h","name":"","offer":{},"options":{}}')
    job.add()
    job.loop.run_for(5)
    assert not job.players[0].runs
    job.add()
    job.until(job.all_run())


# ---- what an earlier job has left


@pytest.mark.parametrize("when", ["meeting", "running", "stopping", "open again", "ended"])
def test_a_new_job_starts_where_an_old_one_died(when):
    job = SimulatedJob(fewest=2, most=2, lease=LEASE, budget=Budget(3))
    old = [job.add(), job.add()] if when != "meeting" else [job.add()]
    job.loop.run_for(1)
    if when == "stopping":
        old[0].fail(7, restart=True)
        job.loop.run_for(0.05)
    if when == "open again":
        old[0].fail(7, restart=True, after=5)
        job.loop.run_for(1)
    if when == "ended":
        old[0].fail(7)
        job.loop.run_for(0.05 + 0.3)
    for player in old:
        player.crash()
    new = [job.add(), job.add()]
    job.until(job.all_run(*new), within=3 * LEASE + 3)
    assert {player.running.restarts for player in new} == {0}
    assert all(player.running.members == tuple(p.node.id for p in new) for player in new)


def test_a_new_job_waits_while_the_old_one_cleans_up():
    job = running(2)
    job.players[0].stop_takes = 5
    for player in job.players:
        player.complete()
    job.loop.run_for(1)
    new = [job.add(), job.add()]
    job.until(job.all_run(*new), within=3 * LEASE)
    assert [player.end for player in job.players[:2]] == [(0, None)] * 2
    assert job.players[0].end[1] is None or job.players[0].end[1].why is CauseKind.FAILED
