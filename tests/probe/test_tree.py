"""Stacks of many ranks as one tree."""

from fleetrun.probe.states import Call, Frame, RankState
from fleetrun.probe.tree import MOST_LINES, merged

MAIN = (Frame("/job/train.py", 60, "main", "train()"), Frame("/job/train.py", 88, "<module>", "main()"))
REDUCE = Frame("/env/site-packages/torch/distributed.py", 5, "all_reduce", "work.wait()")
STEP = Frame("/job/train.py", 40, "step", "dist.all_reduce(x)")
LOAD = Frame("/job/data.py", 31, "load", "time.sleep(60)")
CALL = Call("0", "all_reduce", 412, "4", "float", 1.0, done=False)


def state(rank, *stack, **more):
    return RankState(rank=rank, title=f"trainer {rank}", stack=stack, **more)


def test_ranks_part_where_their_calls_do():
    there = [state(rank, REDUCE, STEP, *MAIN, calls=(CALL,)) for rank in (0, 2, 3)]
    assert merged([*there, state(1, LOAD, *MAIN)]) == (
        "trainers 0-3: <module> (train.py:88) > main (train.py:60): train()",
        "  trainer 1: load (data.py:31): time.sleep(60)",
        "  trainers 0, 2, 3: step (train.py:40) > in all_reduce #412",
    )


def test_a_node_is_named_where_it_is_one_of_several():
    there = [state(rank, LOAD, *MAIN, node=f"node {rank // 2}") for rank in range(3)]
    assert merged([*there, state(3, alive=False, how="was killed by SIGKILL", node="node 1")]) == (
        "trainer 3 on node 1: was killed by SIGKILL",
        "trainers 0-2: <module> (train.py:88) > main (train.py:60) > load (data.py:31): time.sleep(60)",
    )


def test_the_innermost_call_is_shown_where_it_is_of_a_library():
    (line,) = merged([state(0, REDUCE, STEP)])
    assert line == "trainer 0: step (train.py:40) > all_reduce (distributed.py:5): work.wait()"


def test_one_ends_where_others_go_deeper():
    assert merged([state(0, *MAIN), state(1, LOAD, *MAIN)]) == (
        "trainers 0, 1: <module> (train.py:88) > main (train.py:60): train()",
        "  trainer 1: load (data.py:31): time.sleep(60)",
    )


def test_what_is_not_known_and_a_stop():
    assert merged([state(0), state(1, note="stopped by a signal")]) == (
        "trainer 0: at an unknown place",
        "trainer 1: stopped by a signal",
    )


def test_very_many_places_are_cut():
    lines = merged([state(rank, Frame("a.py", rank, "f")) for rank in range(MOST_LINES + 3)])
    assert len(lines) == MOST_LINES + 1
    assert lines[-1] == "and 3 lines more"


def test_no_ranks():
    assert merged([]) == ()
