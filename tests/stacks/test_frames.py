"""Frames of threads: reading py-spy's output, and groups of processes at one place."""

from __future__ import annotations

import json

import pytest

from fleetrun.envs.settings.parsing import ranks_in_words
from fleetrun.stacks.frames import (
    MOST_FRAMES,
    MOST_THREADS,
    Frame,
    groups,
    of_faulthandler,
    of_pyspy,
    place,
)
from fleetrun.stacks.text import as_json, clean, grouped_lines, of_json, stack_lines
from tests.stacks.samples import taken, thread

# ---- Equal stacks together, the odd one first; how that looks.

WAIT = "wait /job/train.py 3"
LOAD = "load /job/train.py 7"


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([0], "0"), ([0, 1], "0, 1"), ([0, 1, 2], "0-2"), ([0, 1, 2, 5, 7, 8, 9], "0-2, 5, 7-9"), ([], "")],
)
def test_ranks_in_few_words(numbers: list[int], words: str):
    assert ranks_in_words(numbers) == words


def test_the_odd_one_comes_first():
    found = groups([taken(0, WAIT), taken(1, WAIT), taken(2, LOAD), taken(3, WAIT)])
    assert [group.title for group in found] == ["trainer 2", "trainers 0, 1, 3"]
    assert [group.where for group in found] == ["load (train.py:7)", "wait (train.py:3)"]


def test_groups_of_one_size_stay_in_their_order():
    found = groups([taken(0, WAIT), taken(1, LOAD)])
    assert [group.title for group in found] == ["trainer 0", "trainer 1"]


def test_roles_that_stand_at_one_place_are_named_both():
    (group,) = groups([taken(0, WAIT, role="ps"), taken(0, WAIT), taken(1, WAIT)])
    assert group.title == "server 0 and trainers 0, 1"


def test_another_line_is_another_place():
    assert len(groups([taken(0, WAIT), taken(1, "wait /job/train.py 4")])) == 2


def test_a_stopped_process_is_never_among_those_that_wait():
    found = groups([taken(0, WAIT), taken(1, WAIT, state="T"), taken(2, WAIT)])
    assert [group.title for group in found] == ["trainer 1", "trainers 0, 2"]
    assert found[0].where == "stopped by a signal, in wait (train.py:3)"


def test_what_is_stopped_comes_first_however_much_it_is():
    found = groups([taken(0, LOAD), taken(1, WAIT, state="T"), taken(2, WAIT, state="T")])
    assert [group.title for group in found] == ["trainers 1, 2", "trainer 0"]


def test_running_or_waiting_makes_no_difference():
    assert len(groups([taken(0, WAIT, state="R"), taken(1, WAIT)])) == 1


def test_what_a_container_started_is_told_from_it():
    found = groups([taken(0, WAIT), taken(0, WAIT, pid=900, command="pt_loader"), taken(1, WAIT)])
    assert [group.title for group in found] == ["pt_loader of trainer 0", "trainers 0, 1"]


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
    ("state", "word"), [("T", "kill -CONT"), ("D", "uninterruptible"), ("t", "debugger")]
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


# ---- Reading what py-spy and faulthandler write, and saying a place in few words.


def said(name: str | None, number: int, *frames: tuple[str, str, object]) -> dict[str, object]:
    return {
        "pid": 7, "thread_name": name, "os_thread_id": number, "active": False,
        "frames": [{"name": each, "filename": file, "line": line} for each, file, line in frames],
    }  # fmt: skip


def test_the_main_thread_comes_first():
    text = json.dumps([said("worker", 9, ("f", "/w.py", 1)), said("MainThread", 7, ("g", "/m.py", 2))])
    main, worker = of_pyspy(text)
    assert (main.name, main.frames) == ("MainThread", (Frame("g", "/m.py", 2),))
    assert worker.name == "worker"


@pytest.mark.parametrize(("number", "name"), [(7, "MainThread"), (9, "thread 9")])
def test_threads_without_names_have_one(number: int, name: str):
    assert of_pyspy(json.dumps([said(None, number)]))[0].name == name


def test_a_recursion_is_cut_at_its_outer_end():
    frames = [("f", "/x.py", line) for line in range(MOST_FRAMES + 5)]
    (found,) = of_pyspy(json.dumps([said("MainThread", 7, *frames)]))
    assert (len(found.frames), found.frames[0].line, found.cut) == (MOST_FRAMES, 0, 5)


def test_so_many_threads_and_not_more():
    assert len(of_pyspy(json.dumps([said(None, 9)] * (MOST_THREADS + 3)))) == MOST_THREADS


@pytest.mark.parametrize("line", [None, "3", 1.5])
def test_a_line_that_is_no_number_is_0(line: object):
    assert of_pyspy(json.dumps([said(None, 7, ("f", "/x.py", line))]))[0].frames[0].line == 0


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '[{"frames": 1}]', '[{"frames": [1]}]', "[{}]", "nonsense"]
)
def test_what_is_no_answer_of_pyspy_is_refused(text: str):
    with pytest.raises(ValueError):  # noqa: PT011  # json's own error is one
        of_pyspy(text)


FAULTHANDLER = """step 12
Thread 0x00007f1 (most recent call first):
  File "/w.py", line 3 in work
Current thread 0x00007f2 (most recent call first):
step 13
  File "/a dir/m.py", line 8 in wait
  File "<string>", line ??? in <module>
the rest
"""


def test_what_another_node_says_is_read_and_grouped_with_its_own():
    said = json.loads(json.dumps([as_json(taken(rank, WAIT, LOAD)) for rank in (0, 3)]))
    first, other = [of_json(each, node) for node, each in enumerate(said)]
    assert json.loads(json.dumps(as_json(other))) == {**said[1], "node": 1}
    (head, *_) = grouped_lines(groups([first, other]))
    assert head == f"trainers 0, 3: 2 processes, node 0: pid {first.pid}; node 1: pid {other.pid}"


def test_faulthandlers_lines_are_found_among_others():
    first, second = of_faulthandler(FAULTHANDLER)
    assert first.frames == (Frame("work", "/w.py", 3),)
    assert second.frames == (Frame("wait", "/a dir/m.py", 8), Frame("<module>", "<string>", 0))
    assert (first.name, second.name) == ("thread 1", "thread 2")


def test_later_pythons_name_the_thread():
    (found,) = of_faulthandler('Thread 0x1f [loader] (most recent call first):\n  File "/x.py", line 1 in f')
    assert found.name == "loader"


def test_a_long_stack_of_faulthandler_is_cut_too():
    frames = '  File "/x.py", line 1 in f\n' * (MOST_FRAMES + 2)
    (found,) = of_faulthandler("Thread 0x1f (most recent call first):\n" + frames)
    assert (len(found.frames), found.cut) == (MOST_FRAMES, 2)


@pytest.mark.parametrize("text", ["", "step 1\n", '  File "/x.py", line 1 in f\n'])
def test_no_stacks_are_none(text: str):
    assert of_faulthandler(text) == ()


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ((), "no Python runs in it"),
        (("wait /job/train.py 3", "main /job/train.py 9"), "wait (train.py:3)"),
        (
            ("barrier /v/site-packages/torch/d.py 5", "f /usr/lib/python3.11/x.py 1", "step /job/train.py 9"),
            "barrier (d.py:5), called from step (train.py:9)",
        ),
        (("f /v/site-packages/a.py 1", "g <frozen> 2"), "f (a.py:1)"),
    ],
)
def test_a_place_in_few_words(frames: tuple[str, ...], words: str):
    assert place((thread(*frames),)) == words


def test_no_thread_is_no_place():
    assert place(()) == "no Python runs in it"
