"""Which rank the others wait for, from where all stand."""

from dataclasses import replace

import pytest

from fleetrun.probe.states import Call, Frame, Group, RankState, Served
from fleetrun.probe.verdict import decide

LOAD = Frame("/job/data.py", 31, "load", "time.sleep(60)")
ALL = (0, 1, 2)


def call(
    number, operation="all_reduce", *, group="0", sizes="[4]", dtypes="Float", entered=100.0, done=False
):
    return Call(group, operation, number, sizes, dtypes, entered, done)


def rank(number, *calls, ranks=ALL, **more):
    """It has entered these calls and waits in the last, unless that is done."""
    entered = {each.group: each.number for each in calls}
    groups = {name: Group(ranks, count) for name, count in entered.items()} or {"0": Group(ranks, 0)}
    known = {"groups": groups, "answered": True, "now": 112.0, **more}
    return RankState(rank=number, title=f"trainer {number}", calls=calls, **known)


def there(*states):
    verdict = decide(states)
    assert verdict is not None
    return verdict


def test_one_has_not_entered_what_the_others_wait_in():
    verdict = there(
        rank(0, call(4)), rank(1, call(3, done=True, entered=100.0), stack=(LOAD,)), rank(2, call(4))
    )
    assert (verdict.kind, verdict.ranks) == ("not entered", (1,))
    for noun in ("trainer 1 ", "all_reduce #4", "trainers 0, 2 wait", "data.py:31", "#3, 12.0 s ago"):
        assert noun in verdict.sentence
    assert verdict.stack == ("/job/data.py:31 in load: time.sleep(60)",)


def test_several_have_not_entered():
    verdict = there(rank(0, call(1)), rank(1, stack=(LOAD,)), rank(2))
    assert verdict.ranks == (1, 2)
    assert "trainers 1, 2 have" in verdict.sentence
    assert "trainer 0 waits" in verdict.sentence


GLOO = (
    "[enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 2000 vs 1000. "
    "Received data size doesn't match expected size. Is there a distributed collective mismatch in your code?"
)


def test_one_that_gloo_has_ended_for_the_size_of_what_it_received():
    """Of what it had called nothing is left. Of two ranks both may be wrong; of more it is the odd one if all
    others made the same call.
    """
    ended = rank(1, alive=False, symptom=True, said=GLOO, how="was killed by SIGABRT", answered=False)
    verdict = there(rank(0, call(4, dtypes="Double"), ranks=(0, 1)), ended)
    assert (verdict.kind, verdict.ranks) == ("mismatch", (0, 1))
    for noun in (
        "trainer 1 received 2000 bytes",
        "expected 1000",
        "trainer 0 called all_reduce of Double [4]",
    ):
        assert noun in verdict.sentence
    assert there(rank(0, call(4)), ended, rank(2, call(4))).ranks == (1,)
    assert there(rank(0, call(4)), ended, rank(2)).ranks == (), "of one nothing is known"
    third = there(rank(0, call(4)), ended, rank(2, call(4, dtypes="Double")))
    assert "called all_reduce of Double" in third.sentence


def test_one_that_is_stopped():
    verdict = there(
        rank(0, call(4)), rank(1, call(4)), rank(2, call(3, done=True), note="stopped by a signal")
    )
    assert (verdict.kind, verdict.ranks) == ("stopped", (2,))
    assert "stopped by a signal" in verdict.sentence


@pytest.mark.parametrize(("ok", "kind"), [(True, "left early"), (False, "dead")])
def test_one_that_has_ended(ok, kind):
    ended = rank(1, call(3, done=True), alive=False, ok=ok, how="was killed by SIGKILL")
    verdict = there(rank(0, call(4)), ended, rank(2, call(4)))
    assert (verdict.kind, verdict.ranks) == (kind, (1,))
    assert "was killed by SIGKILL before all_reduce #4" in verdict.sentence
    assert ("uneven" in verdict.sentence) == ok


def test_the_victim_of_a_timeout_waited_in_its_last_call():
    """torch takes a collective that failed for completed."""
    victim = rank(0, call(4, done=True), alive=False, symptom=True, how="exited with code 1")
    assert there(victim, rank(1, call(3, done=True)), rank(2, call(4))).ranks == (1,)


@pytest.mark.parametrize(
    "odd", [{"operation": "broadcast"}, {"sizes": "[8]"}, {"dtypes": "Half"}], ids=lambda odd: str(odd)
)
def test_a_call_that_differs(odd):
    verdict = there(rank(0, call(9)), rank(1, call(9, **odd)), rank(2, call(9)))
    assert (verdict.kind, verdict.ranks) == ("mismatch", (1,))
    assert "#9" in verdict.sentence
    assert "trainers 0, 2 called all_reduce" in verdict.sentence


def test_of_two_that_differ_none_is_blamed_alone():
    verdict = there(rank(0, call(9), ranks=(0, 1)), rank(1, call(9, "broadcast"), ranks=(0, 1)))
    assert verdict.ranks == (0, 1)


def test_sizes_may_differ_where_torch_allows_it():
    assert (
        decide([rank(0, call(1, "all_to_all", sizes="[1]")), rank(1, call(1, "all_to_all", sizes="[2]"))])
        is None
    )


def test_two_groups_in_different_order():
    first = rank(0, call(1, group="a"), ranks=(0, 1))
    second = rank(1, call(1, group="b"), ranks=(0, 1))
    groups = {"a": Group((0, 1), 1), "b": Group((0, 1), 0)}
    verdict = there(
        replace(first, groups=groups), replace(second, groups={"a": Group((0, 1), 0), "b": Group((0, 1), 1)})
    )
    assert (verdict.kind, set(verdict.ranks)) == ("deadlock", {0, 1})


def test_all_have_entered_and_none_goes_on():
    verdict = there(*(rank(number, call(5)) for number in ALL))
    assert (verdict.kind, verdict.ranks) == ("transport", ())


def test_one_that_came_when_another_had_given_up():
    gone = rank(0, call(4, done=True, entered=100.0), alive=False, symptom=True, how="exited with code 1")
    late = rank(1, call(4, entered=140.0))
    verdict = there(gone, late, rank(2, call(4, entered=100.5)))
    assert (verdict.kind, verdict.ranks) == ("late", (1,))
    assert "39.5 s" in verdict.sentence


def test_no_rank_was_late_where_all_came_together():
    gone = rank(0, call(4, done=True, entered=100.0), alive=False, symptom=True, how="exited with code 1")
    assert decide([gone, rank(1, call(4, entered=100.2)), rank(2, call(4, done=True, entered=100.1))]) is None


def test_a_receiver_waits_for_its_sender():
    verdict = there(rank(0, peer=("recv", 1)), rank(1, stack=(LOAD,)))
    assert verdict.ranks == (1,)
    assert "recv" in verdict.sentence


def test_an_ended_rank_does_not_wait_for_its_sender():
    assert decide([rank(0, peer=("recv", 1), alive=False, how="exited with code 1"), rank(1)]) is None


def test_one_that_has_not_come_to_init_process_group():
    join = Frame("/env/site-packages/torch/c.py", 5, "init_process_group")
    verdict = there(
        *(rank(number, stack=(join,), groups={}) for number in (0, 2)), rank(1, stack=(LOAD,), groups={})
    )
    assert (verdict.kind, verdict.ranks) == ("not entered", (1,))
    assert "init_process_group, in which trainers 0, 2 wait" in verdict.sentence


def test_the_first_mismatch_is_told():
    first, second = call(3, done=True), call(4)
    odd = rank(1, replace(first, operation="barrier"), replace(second, operation="broadcast"))
    verdict = there(rank(0, first, second), odd, rank(2, first, second))
    assert "#3" in verdict.sentence
    assert "barrier" in verdict.sentence


def test_only_members_of_the_group_are_waited_for():
    waits = rank(0, call(2, group="a"), ranks=(0, 2))
    slow = rank(2, call(1, group="a", done=True), ranks=(0, 2), stack=(LOAD,))
    verdict = there(waits, rank(1), slow)
    assert verdict.ranks == (2,)
    assert "ranks 0, 2" in verdict.sentence


def test_the_one_at_the_end_of_a_chain_is_named():
    first = rank(0, call(2, group="a"), ranks=(0, 1))
    second = replace(
        rank(1, call(1, group="b"), ranks=(1, 2)), groups={"a": Group((0, 1), 1), "b": Group((1, 2), 1)}
    )
    third = replace(rank(2, stack=(LOAD,)), groups={"b": Group((1, 2), 0)})
    assert there(first, second, third).ranks == (2,)


def test_the_node_is_named():
    assert "(node 1, b)" in there(rank(0, call(1), node="node 0, a"), rank(1, node="node 1, b")).sentence


@pytest.mark.parametrize(
    "states", [[], [rank(0, call(4, done=True)), rank(1, call(4, done=True))]], ids=["nobody", "nobody waits"]
)
def test_without_a_wait_there_is_no_verdict(states):
    assert decide(states) is None


def test_a_rank_whose_probe_does_not_answer_is_the_one():
    """Not even its probe's thread runs: stuck in C with the interpreter's lock, or not in the group yet."""
    verdict = there(rank(0, call(4)), RankState(rank=1, title="trainer 1", stack=(LOAD,)))
    assert verdict.ranks == (1,)


# ---- Parameter servers


def trainer(number, *ranks, server=0, seconds=5.0, what="the push of step 6", why="", **more):
    served = Served(server, what, ranks, why, seconds)
    return RankState(rank=number, title=f"trainer {number}", answered=True, served=served, **more)


def computing(number):
    return RankState(rank=number, title=f"trainer {number}", answered=True, stack=(LOAD,))


def server(number, **more):
    return RankState(rank=number, title=f"server {number}", role="ps", **more)


def test_a_trainer_that_has_not_pushed():
    verdict = there(trainer(0, 1), computing(1), trainer(2, 0, 1), server(0))
    assert (verdict.kind, verdict.ranks, verdict.call) == ("not entered", (1,), "the push of step 6")
    for noun in ("trainer 1 ", "push of step 6", "trainers 0, 2 wait", "data.py:31"):
        assert noun in verdict.sentence


def test_a_server_that_does_not_answer():
    verdict = there(
        trainer(0, server=1), trainer(1, server=1), server(0), server(1, note="stopped by a signal")
    )
    assert (verdict.kind, verdict.ranks) == ("server", ())
    for noun in ("server 1 ", "5.0 s", "trainers 0, 1 wait", "stopped by a signal"):
        assert noun in verdict.sentence


def test_a_server_is_the_cause_for_trainers_that_wait_for_each_other():
    """Trainer 0 was told some seconds ago that trainer 1 was missing."""
    verdict = there(trainer(0, 1), trainer(1), server(0, stack=(Frame("/ps/saving.py", 7, "write"),)))
    assert verdict.kind == "server"
    assert "write (saving.py:7)" in verdict.sentence


def test_a_server_that_says_what_it_does():
    assert (
        "the tables to be written"
        in there(trainer(0, what="a save", why="the tables to be written")).sentence
    )


def test_an_answer_on_its_way_is_no_wait():
    assert decide([trainer(0, seconds=0.01), computing(1), server(0)]) is None


def test_a_trainer_of_which_nothing_is_known():
    assert decide([trainer(0, 7), server(0)]) is None


@pytest.mark.parametrize(("waited", "told"), [(0.5, False), (3.0, False), (6.0, True)])
def test_a_collective_that_all_have_entered_takes_its_time(waited, told):
    """On a GPU that is behind; and ranks that make progress wait for each other all the time."""
    entered = 112.0 - waited
    verdict = decide([rank(0, call(4, entered=entered)), rank(1, call(4, entered=entered), ranks=ALL[:2])])
    assert (verdict is not None) == told, verdict
