"""Which rank the others wait for, from where all stand."""

import json
from dataclasses import replace

import pytest

from fleetrun.probe.states import Call, Frame, Group, Peer, RankState, Served, read_state
from fleetrun.probe.verdict import decide

LOAD = Frame("/job/data.py", 31, "load", "time.sleep(60)")
ALL = (0, 1, 2)


def call(
    number, operation="all_reduce", *, group="0", sizes="[4]", dtypes="Float", entered=100.0, done=False
):
    return Call(group, operation, number, (tuple(json.loads(sizes)),), dtypes, entered, done)


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
    ended = rank(1, alive=False, symptom=True, last_words=GLOO, how="was killed by SIGABRT", answered=False)
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


def test_a_mismatch_shows_where_both_are():
    """The majority may be wrong."""
    verdict = there(rank(0, call(9), stack=(LOAD,)), rank(1, call(9, sizes="[8]")), rank(2, call(9)))
    assert [row for row in verdict.stack if row.startswith("trainer")] == ["trainer 1:", "trainer 0:"]
    assert verdict.stack[-1].startswith("/job/data.py:31 in load")


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


def aborted(number, *timeouts, waited=(96.0, 100.0)):
    """As NCCL's watchdog ends a rank: its probe answers no more."""
    told = {"alive": False, "symptom": True, "how": "was killed by SIGABRT"}
    works = [[group, name, work, values, *waited] for group, name, work, values in timeouts]
    return read_state({"rank": number, "title": f"trainer {number}", **told, "timeouts": works})


WORK = ("0", "all_reduce", 27, 1000)


def test_ranks_that_nccls_watchdog_has_ended_waited_for_the_one_that_lives():
    entered = {"0": Group(ALL, 26), "1": Group(ALL, 5)}
    verdict = there(
        aborted(0, WORK, ("1", "all_reduce", 6, 1000)),
        rank(1, groups=entered, stack=(LOAD,)),
        aborted(2, ("1", "all_reduce", 6, 1000)),
    )
    assert (verdict.kind, verdict.ranks) == ("not entered", (1,))
    assert "data.py:31" in verdict.sentence


def test_a_call_that_differs_where_nccls_watchdog_has_ended_all():
    verdict = there(aborted(0, WORK), aborted(1, ("0", "broadcast", 27, 1000)), aborted(2, WORK))
    assert (verdict.kind, verdict.ranks) == ("mismatch", (1,))
    assert "trainers 0, 2 called all_reduce of [1000]" in verdict.sentence
    assert there(aborted(0, WORK), aborted(1, ("0", "all_reduce", 27, 900)), aborted(2, WORK)).ranks == (1,)
    typed = rank(1, call(27, sizes="[1000]", entered=97.0))
    assert decide([aborted(0, WORK), typed, aborted(2, WORK)]) is None, "the type of the others is not known"


def test_what_a_call_without_types_is_alike_is_not_known():
    """Of a rank that lives torch tells the call in other words than the watchdogs of those that ended."""
    lives = rank(1, call(27, "broadcast", sizes="[1000]", entered=97.0))
    verdict = there(aborted(0, WORK), lives, aborted(2, ("0", "broadcast", 27, 1000)))
    assert (verdict.kind, verdict.ranks) == ("mismatch", (0, 2))
    assert "trainer 0 called all_reduce" in verdict.sentence
    assert "trainer 1" not in verdict.sentence


def test_of_those_that_nccls_watchdog_has_ended_none_is_blamed():
    """Nothing tells for which rank they waited."""
    assert decide([aborted(0, WORK), aborted(1, WORK), aborted(2, WORK)]) is None
    waits = rank(1, call(28, sizes="[1000]", entered=99.0), groups={"0": Group(ALL, 28)})
    assert decide([aborted(0, WORK), waits, aborted(2, WORK)]) is None


def test_one_that_came_when_nccls_watchdog_had_ended_the_wait_of_the_others():
    came = call(27, sizes="[1000]", done=True, entered=101.5)
    late = rank(1, came, call(28, sizes="[1000]", entered=110.0))
    verdict = there(aborted(0, WORK), late, aborted(2, WORK))
    assert (verdict.kind, verdict.ranks) == ("late", (1,))
    assert "came to all_reduce #27 5.5 s after the others" in verdict.sentence


def test_of_groups_that_a_gpu_is_given_in_another_order():
    """All have entered all calls, and the GPUs wait in the first."""
    calls = [replace(call(4, group=each), queued=True) for each in ("0", "1")]
    verdict = there(rank(0, *calls), rank(1, *calls), rank(2, *calls[::-1]))
    assert (verdict.kind, verdict.ranks) == ("deadlock", (0, 2))
    assert decide([rank(each, *calls) for each in ALL]).kind == "transport"


def test_ranks_that_are_stuck_together_are_not_those_that_have_not_come():
    """The GPUs of two are in a call that both have entered, before the one in which the third waits."""
    first, second = (replace(call(4, group=each), queued=True) for each in ("pair", "0"))
    entered = {"0": Group(ALL, 4), "pair": Group((0, 1), 4)}
    both = [rank(each, first, second, groups=entered) for each in (0, 1)]
    verdict = there(*both, rank(2, second))
    assert (verdict.kind, verdict.ranks) == ("transport", ())
    assert "trainers 0, 1 have all entered all_reduce #4 of the group of ranks 0, 1" in verdict.sentence
    stopped = replace(both[0], note="stopped by a signal")
    assert there(stopped, both[1], rank(2, second)).ranks == (0,)


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
    verdict = there(rank(0, peer=Peer("recv", 1)), rank(1, stack=(LOAD,)))
    assert verdict.ranks == (1,)
    assert "recv" in verdict.sentence


def test_an_ended_rank_does_not_wait_for_its_sender():
    assert decide([rank(0, peer=Peer("recv", 1), alive=False, how="exited with code 1"), rank(1)]) is None


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


# ---- Who is not to be blamed

INNER = Frame("/env/site-packages/torch/distributed/distributed_c10d.py", 3000, "all_reduce", "work.wait()")
WAIT = Frame("/job/pipe.py", 12, "forward", "request.wait()")
SILENT = {"answered": False, "groups": {}}


def within(number, *calls, groups, **more):
    """`groups`: how many calls of the group of all it has entered, or of others with their ranks."""
    found = {
        name: Group(*each) if isinstance(each, tuple) else Group(ALL, each) for name, each in groups.items()
    }
    return replace(rank(number, *calls, **more), groups=found)


def test_a_rank_that_torchs_watchdog_has_killed_may_be_a_victim():
    killed = RankState(rank=0, title="trainer 0", alive=False, symptom=True, how="was killed by SIGABRT")
    assert there(killed, rank(1, call(3, done=True), stack=(LOAD,)), rank(2, call(4))).ranks == (1,)
    assert decide([killed, rank(1, call(4)), rank(2, call(4))]) is None


def test_the_surest_of_several_that_are_absent():
    """One has died, one is stopped, one loads data, and of one nothing is heard."""
    died = rank(1, call(3, done=True), alive=False, how="failed (ReadTimeout: of a storage service)")
    stopped = rank(1, call(3, done=True), note="stopped by a signal")
    loads = rank(0, call(3, done=True, entered=111.5), stack=(LOAD,))
    silent = rank(0, stack=(LOAD,), **SILENT)
    waits = rank(2, call(4))
    for sure, other in ((died, loads), (stopped, loads), (died, silent)):
        assert there(waits, sure, other).ranks == (1,)
    assert there(waits, silent, rank(1, call(3, done=True), stack=(LOAD,))).ranks == (1,)


def test_who_is_waited_for_a_moment_only_is_on_its_way():
    died = rank(0, call(3, done=True), alive=False, how="failed (ValueError: bad row)", ranks=(0, 1, 2, 3))
    waits, loads = call(4, group="b", entered=111.8), call(3, group="b", done=True)
    others = [rank(2, waits, ranks=(2, 3)), rank(3, loads, ranks=(2, 3), stack=(LOAD,))]
    assert decide([died, *others]) is None
    others[0] = rank(2, replace(waits, entered=105.0), ranks=(2, 3))
    assert there(died, *others).ranks == (3,)


def test_a_receiver_that_has_given_up_waited_for_its_sender():
    gone = rank(0, call(3, done=True), alive=False, symptom=True, how="failed", peer=Peer("recv", 1))
    assert there(gone, rank(1, call(3, done=True), stack=(LOAD,)), rank(2, call(4))).ranks == (1,)


@pytest.mark.parametrize(
    "waits", [{"stack": (WAIT,)}, {"stack": (INNER,)}, {"peer": Peer("recv")}, {"stack": (INNER,), **SILENT}]
)
def test_a_rank_that_waits_for_one_that_is_not_known(waits):
    """In irecv(...).wait(), monitored_barrier or recv from any rank: it is no culprit, and has none, unless
    only one rank is left.
    """
    assert decide([rank(0, call(4)), rank(1, call(3, done=True), **waits), rank(2, call(4))]) is None
    alone = decide([rank(1, ranks=(1,), **waits), rank(0, ranks=(0,), stack=(LOAD,))])
    assert (alone.ranks if alone else None) == ((0,) if waits.get("answered", True) else None)

    loads = rank(2, call(3, done=True), stack=(LOAD,))
    assert there(rank(0, call(4)), rank(1, call(3, done=True), **waits), loads).ranks == (2,)


@pytest.mark.parametrize(("how", "known"), [("Timed out waiting 4000ms", True), ("Connection closed", False)])
def test_a_rank_that_gave_up_to_wait_for_the_only_other(how, known):
    """A connection may break for other reasons."""
    gone = rank(
        0, ranks=(0, 1), alive=False, symptom=True, how=f"failed (RuntimeError: {how})", stack=(WAIT,)
    )
    verdict = decide([gone, rank(1, ranks=(0, 1), stack=(LOAD,))])
    assert (verdict.ranks if verdict else None) == ((1,) if known else None)


def test_of_one_that_gave_up_the_last_collective_is_not_always_where_it_waited():
    """It had ended well: what failed was irecv(...).wait(), which torch does not record."""
    how = "failed (RuntimeError: Timed out waiting 4000ms for recv operation to complete)"
    gone = rank(2, call(4, done=True), alive=False, symptom=True, how=how, stack=(WAIT,), now=112.0)
    loads = rank(1, call(4, done=True), stack=(LOAD,))
    assert there(rank(0, call(5)), loads, gone).ranks == (1,)
    assert there(rank(0, call(4, done=True), stack=(WAIT,)), loads, gone).ranks == (1,)


def test_collectives_of_another_thread_while_the_main_one_does_something_else():
    aside = replace(call(4), aside=True)
    first, last = (rank(each, aside, stack=(LOAD,)) for each in (0, 2))
    assert there(first, rank(1, call(3, done=True), stack=(LOAD,)), last).ranks == (1,)

    groups = {"0": 4, "saves": 0}  # in each a thread saves with collectives of its own
    saves = replace(call(1, group="saves"), aside=True)
    loads = within(1, saves, groups={"0": 3, "saves": 1}, stack=(LOAD,))
    waits = [within(each, call(4), groups=groups, stack=(INNER,)) for each in (0, 2)]
    assert there(loads, *waits).ranks == (1,)


@pytest.mark.parametrize("waits", [{"stack": (WAIT,)}, {"peer": Peer("recv", 0)}, {"peer": Peer("recv")}])
def test_a_job_that_does_collectives_progresses(waits):
    """For all that a look finds ranks in send, recv and waits of torch's own."""
    just = call(3, done=True, entered=111.5)
    assert decide([rank(0, just, stack=(LOAD,)), rank(1, just, **waits), rank(2, just, **waits)]) is None
    waits = {"stack": (WAIT,)} if "peer" in waits and waits["peer"].rank is None else waits
    before = replace(just, entered=100.0)
    others = [rank(1, before, **waits), rank(2, before, **waits)]
    assert there(rank(0, before, stack=(LOAD,)), *others).ranks == (0,)


def test_two_that_send_and_receive_meet():
    assert decide([rank(0, peer=Peer("send", 1)), rank(1, peer=Peer("recv", 0)), rank(2)]) is None


def test_a_collective_under_way_of_one_that_is_elsewhere():
    """A call that it will wait for later is no wait; of a GPU's, nothing is known."""
    groups = {"0": 2, "dp": ((0, 1), 5)}
    waits = within(0, call(3), groups={"0": 3, "dp": ((0, 1), 4)}, stack=(INNER,))
    other = rank(2, call(3))
    elsewhere = within(1, call(5, group="dp"), groups=groups, stack=(LOAD,))
    assert there(waits, elsewhere, other).ranks == (1,)
    queued = within(1, replace(call(5, group="dp"), queued=True), groups=groups, stack=(LOAD,))
    assert there(waits, queued, other).kind == "deadlock"


def test_of_two_calls_under_way_it_waits_in_the_innermost():
    control = call(1, "broadcast", group="control", entered=10.0)
    groups = {"0": 4, "control": 1}
    states = [
        within(0, call(4), groups={**groups, "control": 0}, stack=(INNER,)),
        within(1, control, call(4), groups=groups, stack=(INNER,)),
        within(2, control, call(3, done=True), groups={**groups, "0": 3}, stack=(LOAD,)),
    ]
    verdict = there(*states)
    assert verdict.ranks == (2,)
    assert "trainers 0, 1 wait" in verdict.sentence


def test_two_groups_that_wait_for_one_each():
    pair = {"a": ((0, 1), 5)}, {"b": ((2, 3), 7)}
    verdict = there(
        within(0, call(5, group="a"), groups=pair[0]),
        within(1, groups={"a": ((0, 1), 4)}, stack=(LOAD,)),
        within(2, call(7, "broadcast", group="b"), groups=pair[1]),
        within(3, groups={"b": ((2, 3), 6)}, stack=(LOAD,)),
    )
    assert verdict.ranks == (1, 3)
    assert "trainer 1 has not come to all_reduce #5 of the group of ranks 0, 1" in verdict.sentence
    assert "Trainer 3 has not come to broadcast #7 of the group of ranks 2, 3" in verdict.sentence


def test_one_that_is_stopped_within_a_collective():
    stopped = rank(1, call(4), note="stopped by a signal", stack=(INNER,))
    verdict = there(rank(0, call(4)), stopped, rank(2, call(4)))
    assert (verdict.kind, verdict.ranks) == ("stopped", (1,))
    assert "has not completed all_reduce #4" in verdict.sentence


def test_equally_many_values_are_the_same_collective():
    scalar, one = call(1, "broadcast", sizes="[]", done=True), call(1, "broadcast", sizes="[1]", done=True)
    assert decide([rank(0, scalar), rank(1, one)]) is None
    assert decide([rank(0, call(1, sizes="[2, 2]", done=True)), rank(1, call(1, done=True))]) is None


def test_what_has_no_meaning_for_all_ranks_says_nothing():
    """A group that was made again with its name; ranks that torch does not have; a group that is gone."""
    odd, even = call(1, "broadcast", group="h", done=True), call(1, group="h")
    again = {"h": ((0, 1), 1, True)}
    assert decide([within(0, even, groups={"h": ((0, 1), 1)}), within(1, odd, groups=again)]) is None
    worlds = [rank(number, call(9 - number, done=number > 1), world_rank=number // 2) for number in range(4)]
    assert decide(worlds) is None
    joins = Frame("/env/site-packages/torch/distributed/c10d_logger.py", 9, "init_process_group")
    worlds[0] = rank(0, world_rank=0, stack=(joins,), groups={})
    assert decide(worlds) is None
    assert decide([within(0, even, groups={"0": 1}), within(1, odd, groups={"0": 1})]) is None


def test_clocks_of_other_nodes_are_corrected():
    gone = rank(0, call(4, done=True), alive=False, symptom=True, how="exited with code 1", now=110.0)
    ahead = rank(1, call(4, done=True, entered=105.0), ahead=5.0, unsure=0.01, now=117.0)
    assert decide([gone, ahead]) is None
    hour = [rank(n, call(4, entered=111.8 + 3600 * n), now=112.0 + 3600 * n, ahead=3600.0 * n) for n in ALL]
    assert decide(hour) is None


def test_who_has_ended_and_is_not_needed_says_nothing():
    spare = RankState(rank=3, title="trainer 3", alive=False, ok=True, how="exited with code 0")
    waits, loads = rank(0, call(4, entered=111.9)), rank(1, call(3, done=True, entered=111.5), stack=(LOAD,))
    assert decide([waits, loads, spare]) is None


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
