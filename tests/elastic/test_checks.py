"""The check of nodes before a start: pairs, verdicts, and what the leader makes of them."""

from dataclasses import replace

import pytest

from fleetrun.elastic.rendezvous.checks import NO_CHECK, Check, Measured, digest, measures, pairs, suspects
from tests.support.simulation import SimulatedJob

GOOD = Measured(compute=0.1, memory=8e9, link=1e9)
SLOW_CPU = Measured(compute=0.9, memory=8e9, link=1e9)
SLOW_WAY = Measured(compute=0.1, memory=8e9, link=1e8)
NO_WAY = Measured(compute=0.1, memory=8e9, link_error="no answer")
LATE = Measured(took=4.0, late=4.0)
QUICK = Measured(compute=0.1, memory=8e9, link=1e9, took=0.3)
BUSY = Measured(compute=0.1, memory=8e9, link=1e9, took=1.5)
BROKEN = Measured(compute=0.1, link=1e9, error="a copy in memory differs from what was copied")


@pytest.mark.parametrize(
    ("ids", "bad", "expected"),
    [
        ("abcd", "", [(0, 1), (2, 3)]),
        ("abcde", "", [(0, 1), (2, 3)]),
        ("a", "", []),
        ("abcd", "ab", [(0, 2), (1, 3)]),
        ("abcd", "bcd", [(1, 0)]),
        ("abcde", "e", [(4, 0)]),
    ],
)
def test_who_measures_with_whom(ids, bad, expected):
    assert pairs(ids, bad) == expected


def test_who_has_nothing_to_do_in_the_second_turn():
    assert [measures("abcd", "a", rank) for rank in range(4)] == [True, True, False, False]
    assert [measures("abc", "bc", rank) for rank in range(3)] == [True, True, True]


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ([GOOD] * 4, {}),
        ([GOOD, SLOW_CPU, GOOD, GOOD], {1: "its CPU computes 9.0 times slower than the others'"}),
        ([GOOD, BROKEN], {1: "a copy in memory differs from what was copied"}),
        ([GOOD, SLOW_CPU], {1: "its CPU computes 9.0 times slower than the others'"}),
        ([GOOD, Measured(compute=0.3)], {}),
        (
            [GOOD, GOOD, SLOW_WAY, Measured(compute=0.1), GOOD, GOOD],
            dict.fromkeys((2, 3), "the link to its partner is 10.0 times slower than the other links"),
        ),
        (
            [GOOD, GOOD, SLOW_WAY, Measured(compute=0.1)],
            dict.fromkeys((2, 3), "the link to its partner is 10.0 times slower than the other links"),
        ),
        ([NO_WAY, Measured(), GOOD, GOOD], dict.fromkeys((0, 1), "the link to its partner: no answer")),
        ([Measured(memory=8e9), Measured(memory=1e9), Measured(memory=8e9)],
         {1: "its memory is 8.0 times slower than the others'"}),
        ([Measured(gpu=0.1), Measured(gpu=0.5), Measured(gpu=0.1)],
         {1: "its GPU computes 5.0 times slower than the others'"}),
        ([QUICK, LATE, QUICK, QUICK], {1: "the check took longer than 4 s"}),
        ([QUICK, LATE], {1: "the check took longer than 4 s"}),
        ([BUSY, LATE, BUSY, BUSY], {}),
        ([LATE, LATE, LATE, LATE], {}),
        ([QUICK, BUSY, QUICK, QUICK], {}),
        ([BUSY, Measured(link_error="no answer", took=4.0, late=4.0), BUSY, BUSY],
         dict.fromkeys((0, 1), "the link to its partner: no answer")),
    ],
)  # fmt: skip
def test_the_suspects_of_the_first_turn(found, wrong):
    assert suspects("abcdef"[: len(found)], dict(enumerate(found)), NO_CHECK) == wrong


def test_in_the_second_turn_a_way_tells_which_end_it_is():
    check = Check(turn=2, suspects=("a", "b"), usual=1e9)
    nothing = Measured(compute=0.1)
    assert suspects("abcd", {0: NO_WAY, 1: GOOD, 2: nothing, 3: nothing}, check) == {
        0: "the link to its partner: no answer"
    }
    assert suspects("abcd", {0: GOOD, 1: SLOW_WAY, 2: nothing, 3: nothing}, check) == {
        1: "the link to its partner is 10.0 times slower than the other links"
    }
    assert suspects("abcd", {0: GOOD, 1: GOOD, 2: nothing, 3: nothing}, check) == {}


def test_a_suspect_without_another_partner_is_judged_by_itself_alone():
    check = Check(turn=2, suspects=("a", "b"), usual=1e9)
    assert suspects("abc", {0: NO_WAY, 1: SLOW_CPU, 2: GOOD}, check).keys() == {0, 1}
    assert suspects("abc", {0: GOOD, 1: GOOD, 2: GOOD}, check) == {}


# ---- what the leader makes of it


def job_of(count, *, bad=(), found=SLOW_CPU, **policy):
    """Nodes that check themselves; what is found where a bad one takes part is `found`."""
    options = {"fewest": 4, "most": 4, "spares": 2, "check": "fast", "exclude_after": 2, "rdzv_timeout": 60}
    job = SimulatedJob(lease=10.0, **{**options, **policy})

    def measure(round, members, rank):
        ids = [node.id for node in members]
        if not found.link_error:
            return found if ids[rank] in bad else GOOD
        for pair in pairs(ids, round.check.suspects):
            if rank in pair and any(ids[each] in bad for each in pair):
                return found
        return GOOD

    for _ in range(count):
        job.add(join=False).measure = measure
    for player in job.players:
        player.membership.join()
    return job


def running(job):
    return sorted(player.node.id for player in job.players if player.running)


def test_good_nodes_start_after_one_turn():
    job = job_of(6)
    job.until(lambda: len(running(job)) == 4, within=2)
    assert [len(player.checks) for player in job.players[:4]] == [1, 1, 1, 1]
    assert job.players[0].faults == ()


@pytest.mark.parametrize("found", [SLOW_CPU, NO_WAY])
@pytest.mark.parametrize("bad", ["n1", "n2", "n4"])
def test_a_bad_node_is_found_in_two_turns_and_a_spare_takes_its_place(bad, found):
    job = job_of(6, bad=(bad,), found=found)
    job.until(lambda: len(running(job)) == 4, within=5)
    assert running(job) == sorted({"n1", "n2", "n3", "n4", "n5"} - {bad})
    (left,) = [player for player in job.players if player.error]
    assert left.node.id == bad
    assert left.error.exit_code == 123
    assert "after 2 faults: check 1 of 2: " in left.error.message
    assert {fault.node for fault in job.players[4].faults} == {left.node.title}


@pytest.mark.parametrize(
    ("count", "hangs", "takes", "seconds"),
    [
        (4, "n2", 0.15, 2.0),  # no node is suspected before 1 s
        (3, "n3", 0.15, 2.0),
        (3, "n2", 0.15, 8.0),  # no pair has answered: until the launchers give up
        (4, "n2 n5", 0.15, 4.0),  # the spare's as well
        (4, "n2", 0.5, 4.8),  # four times as long as it takes the others, and twice as long as their ways
        (2, "n2", 0.15, 8.0),
    ],
)
def test_a_check_that_hangs_costs_two_turns(count, hangs, takes, seconds):
    job = job_of(count + 2, fewest=count, most=count)

    def measure(round, members, rank):
        ids = [node.id for node in members]
        if ids[rank] in hangs:
            return LATE
        ways = [pair for pair in pairs(ids, round.check.suspects) if rank in pair]
        if any(ids[each] in hangs for pair in ways for each in pair):
            return replace(NO_WAY, took=takes, waited=2.5)
        return replace(QUICK, took=takes, waited=0.2) if ways else replace(QUICK, took=takes, link=0.0)

    def check_takes(round, members, rank):
        found = measure(round, members, rank)
        return found.took + found.waited

    for player in job.players:
        player.measure, player.check_takes = measure, check_takes
    began = job.loop.now
    job.until(lambda: len(running(job)) == count, within=20)
    assert not set(running(job)).intersection(hangs.split())
    assert seconds < job.loop.now - began < seconds + 1


@pytest.mark.parametrize("bad", ["n1", "n2"])
def test_of_three_nodes_the_ends_of_a_bad_way_have_a_turn_each_with_the_third(bad):
    job = job_of(4, bad=(bad,), found=NO_WAY, fewest=3, most=3, spares=1)
    job.until(lambda: len(running(job)) == 3, within=5)
    assert running(job) == sorted({"n1", "n2", "n3", "n4"} - {bad})
    assert {fault.node for fault in job.players[3].faults} == {f"h{bad[1]} (10.0.0.{bad[1]})"}


@pytest.mark.parametrize(("limit", "faults"), [(1, 2), (3, 3), (5, 5)])
def test_what_a_check_has_confirmed_leaves_a_machine_out_however_many_faults_that_takes(limit, faults):
    job = job_of(6, bad=("n2",), exclude_after=limit)
    job.until(lambda: len(running(job)) == 4, within=5)
    assert running(job) == ["n1", "n3", "n4", "n5"]
    message = job.players[1].error.message
    assert f"after {faults} faults: check 1 of 2: " in message
    assert "; check 2 of 2: " in message


def test_with_exclude_after_0_what_a_check_finds_is_noted_and_the_machine_takes_part():
    job = job_of(6, bad=("n2",), exclude_after=0)
    job.until(lambda: len(running(job)) == 4, within=5)
    assert running(job) == ["n1", "n2", "n3", "n4"]
    assert [fault.node for fault in job.players[0].faults] == ["h2 (10.0.0.2)"] * 2


def test_a_bad_spare_is_found_before_it_takes_a_place():
    job = job_of(6, bad=("n5",))
    job.until(lambda: len(running(job)) == 4, within=2)
    job.players[1].crash()
    job.until(lambda: running(job) == ["n1", "n3", "n4", "n6"], within=40)
    assert job.players[4].error.exit_code == 123


def test_a_spare_is_checked_while_it_waits_and_makes_room_if_it_is_bad():
    job = job_of(6)
    bad = job.players[4]
    bad.measure = lambda round, members, rank: SLOW_CPU
    job.until(lambda: bad.error is not None, within=5)
    assert running(job) == ["n1", "n2", "n3", "n4"]
    assert bad.error.exit_code == 123
    assert "after 2 faults: check 1 of 2: its CPU computes 9.0 times slower" in bad.error.message
    (better,) = [job.add(join=False)]
    better.membership.join()
    job.until(lambda: better.checks == [(1, 0), (1, 0)], within=5)
    assert [player.error for player in job.players if player is not bad] == [None] * 6
    assert [len(player.runs) for player in job.players] == [1, 1, 1, 1, 0, 0, 0]


def test_a_spare_that_is_busy_for_a_moment_stays_and_each_start_checks_it_again():
    job = job_of(5, spares=1)
    spare, found = job.players[4], [LATE, QUICK, BROKEN, QUICK]
    spare.measure = lambda round, members, rank: found.pop(0)
    job.until(lambda: len(found) == 2, within=9)
    job.players[0].fail(1, restart=True)
    job.until(lambda: not found, within=9)
    job.loop.run_for(5)
    assert spare.error is None
    assert spare.faults == ()


def test_what_the_check_of_a_spare_finds_is_noted_once_where_no_machine_is_left_out():
    job = job_of(5, spares=1, exclude_after=0)
    job.players[4].measure = lambda round, members, rank: BROKEN
    job.until(lambda: job.players[0].faults, within=5)
    job.loop.run_for(20)
    assert [fault.what for fault in job.players[0].faults] == [
        f"check {turn} of 2: a copy in memory differs from what was copied" for turn in (1, 2)
    ]
    assert job.players[4].error is None


def test_a_bad_node_that_nobody_can_replace_takes_part():
    job = job_of(4, bad=("n3",), spares=0)
    job.until(lambda: len(running(job)) == 4, within=5)
    assert [len(player.checks) for player in job.players] == [2, 2, 2, 2]
    assert len(job.players[0].faults) == 2


def test_of_two_nodes_nobody_knows_which_is_bad():
    job = job_of(2, bad=("n2",), found=NO_WAY, fewest=2, most=2)
    job.until(lambda: len(running(job)) == 2, within=5)
    assert job.players[0].faults == ()
    job = job_of(2, bad=("n2",), found=BROKEN, fewest=2, most=2, spares=0)
    job.until(lambda: len(running(job)) == 2, within=5)
    assert {fault.node for fault in job.players[0].faults} == {"h2 (10.0.0.2)"}


def test_a_restart_checks_again():
    job = job_of(4, spares=0)
    job.until(lambda: len(running(job)) == 4, within=5)
    job.players[0].fail(1, restart=True)
    job.until(job.all_run_again(*job.players), within=5)
    assert [len(player.checks) for player in job.players] == [2, 2, 2, 2]


def test_the_time_of_checks_is_not_that_of_meeting():
    """They take longer than nodes may take to meet again."""
    bad = []
    job = job_of(5, bad=bad, spares=1, check="full", elastic_timeout=1.0)
    for player in job.players:
        player.check_takes = lambda round, members, rank: 50.0
    job.until(lambda: len(running(job)) == 4, within=60)
    bad.append("n2")
    job.players[0].fail(1, restart=True)
    job.until(lambda: running(job) == ["n1", "n3", "n4", "n5"], within=200)
    assert job.players[1].error.exit_code == 123


def test_a_node_that_dies_in_a_check_is_replaced():
    job = job_of(5, spares=1)
    job.until(lambda: all(player.checks for player in job.players[:4]), within=5)
    job.players[2].crash()
    job.until(lambda: running(job) == ["n1", "n2", "n4", "n5"], within=60)


def test_without_the_option_nothing_is_checked():
    job = job_of(6, check="off")
    job.until(lambda: len(running(job)) == 4, within=2)
    assert not any(player.checks for player in job.players)


def test_the_digest_is_that_of_a_set():
    assert digest(["a", "b"]) == digest(["b", "a"]) != digest(["a", "c"])
