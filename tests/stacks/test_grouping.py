"""Equal stacks together, the odd one first; how that looks."""

from __future__ import annotations

import pytest

from fleetrun.stacks.frames import groups, in_words
from fleetrun.stacks.text import as_json, clean, grouped_lines, stack_lines
from tests.stacks.made import taken, thread

WAIT = "wait /job/train.py 3"
LOAD = "load /job/train.py 7"


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([0], "0"), ([0, 1], "0, 1"), ([0, 1, 2], "0-2"), ([0, 1, 2, 5, 7, 8, 9], "0-2, 5, 7-9"), ([], "")],
)
def test_ranks_in_few_words(numbers: list[int], words: str):
    assert in_words(numbers) == words


def test_the_odd_one_comes_first():
    found = groups([taken(0, WAIT), taken(1, WAIT), taken(2, LOAD), taken(3, WAIT)])
    assert [group.who for group in found] == ["trainer 2", "trainers 0, 1, 3"]
    assert [group.where for group in found] == ["load (train.py:7)", "wait (train.py:3)"]


def test_groups_of_one_size_stay_in_their_order():
    found = groups([taken(0, WAIT), taken(1, LOAD)])
    assert [group.who for group in found] == ["trainer 0", "trainer 1"]


def test_roles_that_stand_at_one_place_are_named_both():
    (group,) = groups([taken(0, WAIT, role="ps"), taken(0, WAIT), taken(1, WAIT)])
    assert group.who == "server 0 and trainers 0, 1"


def test_another_line_is_another_place():
    assert len(groups([taken(0, WAIT), taken(1, "wait /job/train.py 4")])) == 2


def test_a_stopped_process_is_never_among_those_that_wait():
    found = groups([taken(0, WAIT), taken(1, WAIT, state="T"), taken(2, WAIT)])
    assert [group.who for group in found] == ["trainer 1", "trainers 0, 2"]
    assert found[0].where == "stopped by a signal, in wait (train.py:3)"


def test_what_is_stopped_comes_first_however_much_it_is():
    found = groups([taken(0, LOAD), taken(1, WAIT, state="T"), taken(2, WAIT, state="T")])
    assert [group.who for group in found] == ["trainers 1, 2", "trainer 0"]


def test_running_or_waiting_makes_no_difference():
    assert len(groups([taken(0, WAIT, state="R"), taken(1, WAIT)])) == 1


def test_what_a_container_started_is_told_from_it():
    found = groups([taken(0, WAIT), taken(0, WAIT, pid=900, command="pt_loader"), taken(1, WAIT)])
    assert [group.who for group in found] == ["pt_loader of trainer 0", "trainers 0, 1"]


def test_other_reasons_are_other_groups():
    found = groups([taken(0, note="it has ended"), taken(1, note="there was no time"), taken(2, WAIT)])
    assert [group.where for group in found] == ["it has ended", "there was no time", "wait (train.py:3)"]


def test_a_group_as_text():
    found = groups([taken(0, WAIT), taken(1, WAIT), taken(2, LOAD)])
    assert list(grouped_lines(found)) == [
        "trainer 2: 1 process, pid 102",
        "  MainThread, most recent call first:",
        "    load (/job/train.py:7)",
        "",
        "trainers 0, 1: 2 processes, pids 100, 101",
        "  MainThread, most recent call first:",
        "    wait (/job/train.py:3)",
    ]


def test_of_many_pids_some():
    (head, *_) = grouped_lines(groups([taken(rank, WAIT) for rank in range(10)]))
    assert head == "trainers 0-9: 10 processes, pids 100, 101, 102, 103, 104, 105, 106, 107 and 2 more"


@pytest.mark.parametrize(
    ("state", "word"), [("T", "kill -CONT"), ("D", "deaf to signals"), ("t", "debugger")]
)
def test_a_state_that_explains_a_hang_is_told(state: str, word: str):
    assert word in next(stack_lines(taken(0, WAIT, state=state)))


def test_a_long_stack_shows_both_ends():
    frames = [f"f{number} /x.py {number}" for number in range(100)]
    one = taken(0, WAIT)
    lines = list(stack_lines(type(one)(target=one.target, pid=1, command="x", state="S",
                                 threads=(thread(*frames, cut=7),))))  # fmt: skip
    assert lines[1] == "    f0 (/x.py:0)"
    assert lines[-1] == "    f99 (/x.py:99)"
    assert "    ... 67 more calls ..." in lines


def test_nothing_that_a_terminal_obeys_comes_through():
    one = taken(0, "\x1b[31mred /x\x07.py 1", command="x")
    assert "\x1b" not in "\n".join(stack_lines(one))
    assert clean("a\nb\x1b[2J\x00\u202e\ud800") == r"a\nb\x1b[2J\x00\u202e\ud800"


def test_a_line_has_an_end():
    assert len(clean("x" * 100_000)) < 2000


def test_json_has_everything():
    said = as_json(taken(3, WAIT, LOAD))
    assert (said["title"], said["rank"], said["pid"], said["state"]) == ("trainer 3", 3, 103, "S")
    assert said["threads"][0]["frames"][0] == {"function": "wait", "file": "/job/train.py", "line": 3}
