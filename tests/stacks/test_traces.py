"""Reading what py-spy and faulthandler write, and saying a place in few words."""

from __future__ import annotations

import json

import pytest

from fleetrun.stacks.frames import MOST_FRAMES, MOST_THREADS, Frame, of_faulthandler, of_pyspy, place
from tests.stacks.made import thread


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
