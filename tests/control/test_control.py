"""What a launcher of a job on several machines is asked, and whom it asks."""

import pytest

from fleetrun.control.node_status import MANY, unpack
from fleetrun.control.server import Control
from fleetrun.elastic.ask import Answer
from fleetrun.pod.loop import Loop
from tests.support.record_lines import line, met
from tests.support.status import job_status


class Others:
    """Remembers what it was asked; answers when it is told to."""

    within = 2.0

    def __init__(self):
        self.asked = []

    def ask(self, verb, options, then, rank):
        self.asked.append((verb, options, rank))
        self.then = then


@pytest.fixture
def control():
    loop = Loop()
    status, others = job_status(clock=lambda: 5.0), Others()  # two answers have one time
    line(status, "launch", job="job", pod="abcdef", pid=1, log_dir="/logs")
    made = Control(loop, status, print, print, print, others, print)
    made.status, made.others, made.loop = status, others, loop
    yield made
    loop.close()


def meet(control, count):
    met(control.status, [f"h{rank}" for rank in range(count)], 0)


def ask(control, **more):
    said = []
    control.answer({"ask": "status", "everywhere": True, **more})(said.append)
    return said


def test_others_are_asked_only_when_somebody_wants_to_know(control):
    meet(control, 2)
    assert control.answer({"ask": "status"}) == control.status.fields()
    assert control.answer({"ask": "status", "everywhere": 1}) == control.status.fields()
    assert control.others.asked == []
    alone = Control(control.loop, control.status, print, print, print, None, print)
    assert alone.answer({"ask": "status", "everywhere": True}) == control.status.fields(), "it has none"


def test_the_answer_comes_when_they_have_answered(control):
    meet(control, 3)
    said = ask(control)
    assert said == []
    meet(control, 4)
    control.others.then({1: Answer(b"x", 0.0, 0.1), 2: None})
    first, second, third, new = said[0]["nodes"]
    assert second == {"rank": 1, "title": "h1", "this": False, "packed": "eA=="}
    assert third["silent"] == "no answer within 2 s"
    assert ("silent" in first, "silent" in new) == (False, False), "as it is now, and nobody asked that one"


@pytest.mark.parametrize(
    ("count", "more", "asked"),
    [
        (MANY, {}, (None, False)),
        (MANY + 1, {}, (None, True)),
        (MANY + 1, {"all": True}, (None, False)),
        (MANY + 1, {"node": 3}, (3, False)),
        (2, {"node": 2}, (None, False)),
        (2, {"node": -1}, (None, False)),
        (2, {"node": "1", "all": "x"}, (None, False)),
        (2, {"node": [1]}, (None, False)),
    ],
)
def test_of_many_machines_it_wants_to_know_less(control, count, more, asked):
    meet(control, count)
    ask(control, **more)
    rank, brief = asked
    assert control.others.asked == [("state", {"brief": brief}, rank)]


def test_what_it_tells_another(control):
    meet(control, 2)
    said = unpack(control.status.packed(False, 1 << 10))
    assert said is not None
    assert (said["pod"], said["containers"]) == ("abcdef", [])
    assert "containers" not in (unpack(control.status.packed(True, 1 << 10)) or {})
