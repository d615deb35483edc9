"""The rendezvous: which nodes are admitted, in which order, and what waiting and refused nodes are told."""

import pytest

from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.records import CauseKind
from fleetrun.errors import LaunchError, RendezvousError, UsageError
from fleetrun.pod.policy import Budget
from tests.support.simulation import SimulatedJob

LEASE = 10.0


def fixed(count, **policy):
    return SimulatedJob(fewest=count, most=count, lease=LEASE, **policy)


def ranks(job):
    return {player.node.id: player.runs[-1].rank for player in job.players if player.runs}


# ---- waiting


def test_no_node_starts_before_all_are_present():
    job = fixed(3)
    job.add()
    job.add()
    job.loop.run_for(30)
    assert not any(player.runs for player in job.players)
    job.add()
    job.until(job.all_run(), within=0.1)


def test_those_who_wait_hear_how_many_there_are():
    job = fixed(3, fixed_ranks=("10.0.0.1", "10.0.0.2", "10.0.0.3"))
    first = job.add(rank=0)
    job.loop.run_for(5)
    second = job.add(rank=1)
    job.loop.run_for(5)
    assert [(note.present, note.missing) for note in first.notes] == [
        (1, ("10.0.0.2", "10.0.0.3")),
        (2, ("10.0.0.3",)),
    ]
    assert first.notes[0].left == pytest.approx(60)
    assert [(note.present, note.missing) for note in second.notes] == [
        (1, ("10.0.0.2", "10.0.0.3")),
        (2, ("10.0.0.3",)),
    ]


def test_a_restart_does_not_say_how_few_there_were_at_the_start():
    job = fixed(2, budget=Budget(1))
    first = job.add()
    job.loop.run_for(5)
    second = job.add()
    job.until(job.all_run())
    told = len(second.notes)
    first.fail(7, restart=True)
    job.until(job.all_run_again(first, second))
    assert [note.present for note in second.notes[told:]] == []


def test_those_who_wait_long_hear_it_again_but_less_and_less():
    job = fixed(2, rdzv_timeout=600)
    alone = job.add()
    job.loop.run_for(400)
    assert [round(600 - note.left) for note in alone.notes] == [
        0,
        10,
        20,
        30,
        40,
        50,
        60,
        120,
        180,
        240,
        300,
        360,
    ]


def test_many_who_come_one_by_one_are_not_told_of_each():
    job = fixed(60)
    for _ in range(50):
        job.add()
        job.loop.run_for(0.1)
    job.loop.run_for(3)
    assert all(2 <= len(player.notes) <= 4 for player in job.players[1:20])
    assert {player.notes[-1].present for player in job.players[1:]} == {50}


def test_waiting_costs_next_to_nothing():
    job = fixed(2, rdzv_timeout=600)
    alone = job.add()
    job.loop.run_for(5)
    before = alone.store.asked.total()
    job.loop.run_for(300)
    assert alone.store.asked.total() == before


# ---- too late


@pytest.mark.parametrize(
    ("nodes", "policy", "missing"),
    [
        ([{}, {}], {}, ""),
        ([{"rank": 0}, {"rank": 2}], {}, "; missing ranks 1, 3"),
        (
            [{"rank": 0}, {"rank": 2}],
            {"fixed_ranks": ("10.0.0.1", "10.0.0.7", "10.0.0.2", "10.0.0.8")},
            "; missing 10.0.0.7, 10.0.0.8",
        ),
    ],
)
def test_a_timeout_names_who_is_missing_on_every_node(nodes, policy, missing):
    job = fixed(4, rdzv_timeout=60, endpoint="h1:6768", **policy)
    for node in nodes:
        job.add(**node)
        job.loop.run_for(3)
    job.until(job.all_over)
    assert job.loop.now == pytest.approx(1060)
    for player in job.players:
        code, cause = player.end
        assert (code, cause.why) == (124, CauseKind.TIMEOUT)
        assert cause.headline == f"2 of 4 nodes joined at h1:6768 within 60 s{missing}"
    job.until(lambda: all(player.membership.closed for player in job.players))
    assert job.ledger.range("") == {}


def test_an_elastic_job_starts_with_fewer_when_no_more_come():
    job = SimulatedJob(fewest=2, most=4, elastic_timeout=5)
    for _ in range(3):
        job.add()
        job.loop.run_for(3)
    job.loop.run_for(1.9)
    assert not any(player.runs for player in job.players)
    job.until(job.all_run(), within=0.2)
    assert job.players[0].runs[0].members == ("n1", "n2", "n3")


def test_an_elastic_job_starts_at_once_when_it_is_full():
    job = SimulatedJob(fewest=2, most=3, elastic_timeout=50)
    for _ in range(3):
        job.add()
    job.until(job.all_run(), within=0.1)


def test_an_elastic_job_that_has_enough_does_not_time_out():
    job = SimulatedJob(fewest=1, most=3, elastic_timeout=50, rdzv_timeout=20)
    job.add()
    job.until(job.all_run(), within=20.1)


# ---- order


@pytest.mark.parametrize(
    ("nodes", "policy", "order"),
    [
        ([{"host": "10.0.0.9"}, {"host": "10.0.0.10"}, {"host": "10.0.0.2"}], {}, ["n1", "n2", "n3"]),
        (
            [{"host": "10.0.0.9"}, {"host": "10.0.0.10"}, {"host": "10.0.0.2"}],
            {"sort_ip": True},
            ["n3", "n1", "n2"],
        ),
        ([{"rank": 2}, {"rank": 0}, {"rank": 1}], {}, ["n2", "n3", "n1"]),
        ([{}, {"rank": 0}, {}], {}, ["n2", "n1", "n3"]),
    ],
)
def test_ranks(nodes, policy, order):
    job = fixed(3, **policy)
    for node in nodes:
        job.add(**node)
        job.loop.run_for(1)
    job.until(job.all_run())
    assert list(job.players[0].runs[0].members) == order


# ---- refused nodes


def test_a_third_node_of_two_is_refused_and_the_others_are_not_disturbed():
    job = fixed(2)
    first, second = job.add(), job.add()
    job.until(job.all_run())
    told = [player.store.asked["told"] for player in (first, second)]
    third = job.add()
    job.until(lambda: third.over, within=0.5)
    assert third.error.message == "the job is full: 2 of 2 nodes are running (h1 (10.0.0.1), h2 (10.0.0.2))"
    assert third.error.exit_code == 123
    assert not third.runs
    job.loop.run_for(60)
    assert all(len(player.runs) == 1 and not player.stops for player in (first, second))
    assert second.store.asked["told"] == told[1], "a member that does not lead hears nothing of it"
    assert third.membership.closed


def test_who_was_refused_leaves_nothing_behind():
    job = fixed(2)
    job.add(), job.add()
    job.until(job.all_run())
    before = set(job.ledger.range(""))
    job.add()
    job.until(lambda: job.players[2].membership.closed)
    assert set(job.ledger.range("")) == before


def test_of_three_for_two_places_the_first_two_run():
    job = fixed(2)
    players = [job.add() for _ in range(3)]
    job.until(lambda: sum(player.running is not None for player in players) == 2 and players[2].over)
    assert ranks(job) == {"n1": 0, "n2": 1}
    assert "full" in players[2].error.message


def test_a_rank_that_is_out_of_range_is_refused_at_once():
    job = fixed(2)
    job.add()
    wrong = job.add(rank=2)
    job.until(lambda: wrong.over, within=0.5)
    assert isinstance(wrong.error, UsageError)
    assert wrong.error.exit_code == 2
    assert wrong.error.message == "--rank 2 is out of range: this job has at most 2 nodes, 0 to 1"
    job.add()
    job.until(job.all_run(job.players[0], job.players[2]))


def test_of_two_with_one_rank_the_younger_is_refused():
    job = fixed(3)
    job.add()
    older = job.add(rank=1)
    younger = job.add(rank=1)
    job.until(lambda: younger.over)
    assert job.loop.now == pytest.approx(1000 + LEASE + 1, abs=0.1)
    assert younger.error.message == "--rank 1 is taken by h2 (10.0.0.2)"
    assert type(younger.error) is LaunchError
    last = job.add()
    job.until(job.all_run(job.players[0], older, last))


def test_a_rank_of_the_leader_itself_is_taken_for_sure():
    job = fixed(3)
    job.add(rank=1)
    younger = job.add(rank=1)
    job.until(lambda: younger.over, within=0.1)


def test_a_node_that_was_killed_and_started_again_takes_its_rank():
    job = fixed(3)
    job.add(rank=0)
    job.add(rank=1)
    job.loop.run_for(0.1)
    job.players[1].crash()
    again = job.add(rank=1)
    job.add(rank=2)
    job.until(job.all_run(job.players[0], again, job.players[3]))
    assert ranks(job) == {"n1": 0, "n3": 1, "n4": 2}
    assert job.loop.now < 1000 + LEASE + 1


@pytest.mark.parametrize(
    ("one", "other", "headline"),
    [
        (
            {"options": {"--max_restart": "3"}},
            {"options": {"--max_restart": "5"}},
            "--max_restart is 3 on h1 (10.0.0.1) and 5 on h2 (10.0.0.2)",
        ),
        (
            {"version": "0.1.0"},
            {"version": "0.2.0"},
            "fleetrun is 0.1.0 on h1 (10.0.0.1) and 0.2.0 on h2 (10.0.0.2)",
        ),
        (
            {"options": {"a": "1", "b": "2", "c": "3", "d": "4"}},
            {"options": {}},
            "a is 1 on h1 (10.0.0.1) and not given on h2 (10.0.0.2); "
            "b is 2 on h1 (10.0.0.1) and not given on h2 (10.0.0.2); "
            "c is 3 on h1 (10.0.0.1) and not given on h2 (10.0.0.2); 1 more",
        ),
    ],
)
def test_nodes_that_were_started_differently_do_not_start(one, other, headline):
    job = fixed(3)
    job.add(**one)
    job.loop.run_for(1)
    job.add(**other)
    job.until(job.all_over, within=0.2)
    for player in job.players:
        code, cause = player.end
        assert (code, cause.why, cause.headline) == (2, CauseKind.REFUSED, headline)
        assert not player.runs


def test_what_is_left_of_an_earlier_start_with_other_options_is_no_conflict():
    job = fixed(2)
    job.add(options={"--max_restart": "3"})
    job.loop.run_for(0.1)
    job.players[0].crash()
    job.add(options={"--max_restart": "5"})
    job.add(options={"--max_restart": "5"})
    job.until(job.all_run(*job.players[1:]), within=LEASE + 3)


def test_what_is_left_of_a_follower_of_an_earlier_start_is_no_conflict_either():
    """Its lease ends later than the leader's, so that a new leader still sees it."""
    job = fixed(3)
    job.add(options={"--max_restart": "3"})
    job.loop.run_for(2)
    job.add(options={"--max_restart": "3"})
    job.loop.run_for(2.9)
    for player in job.players:
        player.crash()
    for _ in range(3):
        job.add(options={"--max_restart": "5"})
    job.until(job.all_run(*job.players[2:]), within=2 * LEASE + 3)


def test_a_stranger_with_other_options_does_not_disturb_a_running_job():
    job = SimulatedJob(fewest=2, most=4, elastic_timeout=1)
    job.add(options={"a": "1"})
    job.add(options={"a": "1"})
    job.until(job.all_run())
    stranger = job.add(options={"a": "2"})
    job.until(lambda: stranger.over, within=1)
    assert stranger.error.message == "a is 1 on h1 (10.0.0.1) and 2 on h3 (10.0.0.3)"
    assert stranger.error.exit_code == 2
    job.loop.run_for(30)
    assert all(not player.stops for player in job.players)


# ---- ghosts


def test_a_node_that_died_while_waiting_is_replaced():
    job = fixed(3)
    job.add()
    job.add()
    job.loop.run_for(0.1)
    job.players[1].crash()
    job.add()
    job.loop.run_for(0.2)
    assert not any(player.runs for player in job.players)
    job.add()
    job.until(job.all_run(job.players[0], job.players[2], job.players[3]), within=LEASE)
    assert ranks(job) == {"n1": 0, "n3": 2, "n4": 1}


def test_a_node_that_seemed_dead_takes_part_again():
    job = fixed(3)
    job.add()
    slow = job.add()
    job.loop.run_for(0.5)
    slow.store.cut()
    job.add()
    job.loop.run_for(LEASE * 0.8)
    assert job.ledger.get(records.node_key("n2")) is None
    slow.store.heal()
    job.until(job.all_run())
    assert {player.runs[0].generation for player in job.players} == {job.players[0].runs[0].generation}


def test_a_leader_that_dies_while_nodes_meet_is_replaced():
    job = fixed(3)
    job.add()
    job.loop.run_for(0.1)
    job.players[0].crash()
    job.add()
    job.add()
    job.loop.run_for(LEASE + 2)
    job.add()
    job.until(job.all_run(*job.players[1:]), within=1)


def test_a_node_that_never_takes_part_does_not_keep_the_others_for_ever():
    job = fixed(2, rdzv_timeout=60)
    job.add()
    deaf = job.add(join=False)
    deaf.store.read = lambda key, then: None
    deaf.membership.join()
    job.until(lambda: job.players[0].over, within=60 + 3 * LEASE)
    assert not any(player.runs for player in job.players)
    assert job.players[0].end[0] == 124


def test_no_store_at_all_ends_in_time():
    job = fixed(2, rdzv_timeout=60, endpoint="h1:6768")
    player = job.add(join=False)
    player.store.cut("h1:6768: Connection refused (tried 57 times)")
    player.membership.join()
    job.until(lambda: player.over)
    assert job.loop.now == pytest.approx(1060)
    assert isinstance(player.error, RendezvousError)
    said = "cannot reach the rendezvous store h1:6768 within 60 s: Connection refused (tried 57 times)"
    assert player.error.message == said
    assert player.downs == ["h1:6768: Connection refused (tried 57 times)"]


def test_a_node_that_leaves_while_others_wait_is_not_counted():
    job = fixed(2)
    job.add()
    job.add(join=False)
    job.players[0].leave()
    assert job.players[0].end[0] == 143
    job.players[1].membership.join()
    job.loop.run_for(5)
    assert not job.players[1].runs
    job.add()
    job.until(job.all_run(*job.players[1:]))


def test_a_surplus_machine_of_the_store_waits_and_is_not_refused():
    """`--nnodes 2 --master A,B,C`: its launcher runs a part of the store."""
    job = SimulatedJob(fewest=2, most=2, lease=LEASE)
    for _ in range(3):
        job.add(has_store=True)
    *members, third = job.players
    job.until(lambda: all(player.running for player in members))
    stranger = job.add()
    job.loop.run_for(30)
    assert "job is full" in stranger.error.message
    assert (third.over, third.runs, third.notes[-1].spare) == (False, [], True)
    members[1].fail(1, restart=True)
    job.until(job.all_run_again(*members))
    assert (third.over, third.runs) == (False, [])
    for player in members:
        player.complete()
    job.until(job.all_over)
    assert [player.code for player in (*members, third)] == [0, 0, 0]
