"""What is told of the other nodes."""

import pytest

from fleetrun.elastic.rendezvous.actions import Waiting
from fleetrun.elastic.rendezvous.records import Cause, CauseKind
from fleetrun.launcher.cluster import NodeReporter


def _waiting(present: int, fewest: int, most: int, missing: tuple[str, ...] = ()) -> Waiting:
    return Waiting(present=present, fewest=fewest, most=most, missing=missing, left=59.6)


def _cause(node: str, headline: str, lines: tuple[str, ...] = (), summary: str = "") -> Cause:
    why = CauseKind.FAILED
    return Cause(why=why, node=node, rank=1, headline=headline, lines=lines, summary=summary)


@pytest.mark.parametrize(
    ("note", "line"),
    [
        (_waiting(2, 2, 2), "all 2 nodes have joined"),
        (_waiting(1, 3, 3), "1 of 3 nodes have joined; waiting up to 60 s more"),
        (_waiting(1, 2, 4, ("h2",)), "1 of 2 to 4 nodes have joined; waiting up to 60 s more; missing: h2"),
        (_waiting(1, 1, 4), "1 node has joined; waiting 60 s for more, up to 4"),
        (_waiting(2, 2, 4), "2 nodes have joined; waiting 60 s for more, up to 4"),
        (
            _waiting(1, 10, 10, tuple(f"h{n}" for n in range(9))),
            "1 of 10 nodes have joined; waiting up to 60 s more; "
            "missing: h0, h1, h2, h3, h4, h5, h6 and 2 more",
        ),
    ],
)
def test_waiting(said, note, line):
    made = said()
    NodeReporter(made.console, 100).waiting(note)
    assert made.err.endswith(f" {line}\n")


def test_a_spare_waits(said):
    made = said()
    NodeReporter(made.console, 100).waiting(Waiting(present=2, fewest=2, most=2, spare=True))
    assert made.err.endswith(" the job runs on 2 nodes; this node is a spare, and waits\n")


def test_what_runs_on_this_node_is_told_when_all_have_come_and_once(said):
    made = said()
    nodes = NodeReporter(made.console, 100, "2 trainers of train.py on CPU; logs: log/x.*.log")
    nodes.met(1, 2, 0, ["h1", "h2"])
    nodes.met(2, 2, 0, ["h1", "h3"])
    first, second = made.err.splitlines()
    assert first.endswith(" Node 0 of 2: h1, h2; here 2 trainers of train.py on CPU; logs: log/x.*.log")
    assert second.endswith(" Node 0 of 2 (generation 2): h1, h3")


def test_a_stop_names_the_node_once(said):
    made = said()
    voice = NodeReporter(made.console, 100)
    voice.stopping("h1 (10.0.0.1)", 2, "h1 (10.0.0.1) does not answer any more", "stopping the job")
    assert made.err.endswith(" node 2, h1 (10.0.0.1) does not answer any more; stopping the job\n")


def test_a_stop_that_no_node_caused(said):
    made = said()
    NodeReporter(made.console, 100).stopping("", -1, "2 of 4 nodes met", "stopping the job")
    assert made.err.endswith(" 2 of 4 nodes met; stopping the job\n")


def test_the_report_of_another_node(said):
    made = said()
    lines = ("First failure: trainer 3 exited with code 7", "  its \033[31mlast words")
    headline, summary = "trainer 3 exited with code 7", "trainer 3: ValueError: \033[2Jx at train.py:3"
    NodeReporter(made.console, 60).final(_cause("h1", headline, lines, summary))
    assert made.err.splitlines() == [
        "=" * 60,
        "On node 1, h1:",
        "First failure: trainer 3 exited with code 7",
        "  its last words",
        "node 1, h1: trainer 3: ValueError: x at train.py:3",
    ]


def test_a_report_without_lines(said):
    made = said()
    NodeReporter(made.console, 60).final(_cause("h1", "h1 does not answer any more"))
    assert made.err.splitlines()[1:] == ["node 1, h1 does not answer any more"]


def test_an_outage_is_told_once_and_its_end_too(said):
    made = said()
    voice = NodeReporter(made.console, 60)
    voice.store_up()
    assert made.err == ""
    voice.store_down("h1:6768: Connection refused")
    voice.store_up()
    voice.store_up()
    lines = made.err.splitlines()
    assert len(lines) == 2
    assert "h1:6768: Connection refused" in lines[0]
    assert lines[1].endswith("reached the rendezvous store")


def test_the_meeting_point_is_there_again_for_those_who_were_there(said):
    made = said()
    voice = NodeReporter(made.console, 60)
    voice.met(1, 1, 0, ["h1"])
    voice.store_down("h1:6768: Connection refused")
    voice.store_up()
    assert made.err.endswith("reconnected to the rendezvous store\n")


def test_what_other_machines_are_called_does_nothing_to_a_terminal(said):
    made = said()
    voice = NodeReporter(made.console, 60)
    evil = "h\033]0;x\007\033[2J\n2"
    voice.waiting(_waiting(1, 2, 2, (evil,)))
    voice.met(1, 1, 0, [evil])
    voice.stopping(evil, 1, "trainer 1 exited with code 7", "stopping the job")
    voice.ending(evil)
    voice.final(_cause(evil, "trainer 1 exited with code 7"))
    assert "\033" not in made.err
    assert "\007" not in made.err
    assert made.err.count("\n") == 4 + 2
