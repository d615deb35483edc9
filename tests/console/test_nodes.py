"""What is told of the other nodes."""

from types import SimpleNamespace

import pytest

from fleetrun.aliases import Fields
from fleetrun.elastic.agent import Assignment, Departing, Stopping
from fleetrun.elastic.membership import StoreDown, StoreUp
from fleetrun.elastic.rendezvous.actions import Waiting
from fleetrun.elastic.rendezvous.records import Cause, CauseKind, Node
from fleetrun.envs.settings.options import LaunchSettings
from fleetrun.launcher.nodes import Nodes
from fleetrun.plan.topology import Offer
from fleetrun.pod.policy import Spent
from fleetrun.record.state import State

OFFER = Offer(trainers=("10.0.0.1:6170",), service="10.0.0.1:6171")


class Voice:
    """What the console shows of the nodes' events."""

    def __init__(self, said, width: int = 60, facts: str = "") -> None:
        self.made = said()
        self.state = State()
        self.lines: list[Fields] = []
        session = SimpleNamespace(
            console=self.made.console,
            settings=LaunchSettings(script="train.py", nnodes=(2, 2), master="h1:6768", rdzv_timeout=60.0),
            notices=None,
            wall=lambda: 5.0,
            journal=SimpleNamespace(write=self._write),
            status=self.state,
            spec=None,
        )
        victims = SimpleNamespace(blame_another_node=lambda: None)
        runner = SimpleNamespace(victims=victims)
        self.nodes = Nodes(session, runner, facts)  # type: ignore[arg-type]
        self.nodes._width = width

    def _write(self, event: str, **fields: object) -> None:
        self.lines.append({"time": 5.0, "event": event, **fields})
        self.state.handle(self.lines[-1])

    @property
    def err(self) -> str:
        return self.made.err

    def meets(self, generation: int, *hosts: str) -> None:
        """This node is the first of these."""
        there = tuple(Node(id=each, host=each, name=each, offer=OFFER) for each in hosts)
        counts = {"attempts": 0, "restarts": 0, "spent": Spent(), "edit": ""}
        self.nodes.handle(
            Assignment(generation=generation, members=there, rank=0, first=True, **counts)  # type: ignore[arg-type]
        )

    def stops(self, node: str, rank: int, headline: str) -> None:
        cause = Cause(why=CauseKind.FAILED, node=node, rank=rank, headline=headline)
        self.nodes.handle(Stopping(cause, restart=False))


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
    made = Voice(said)
    made.nodes.handle(note)
    assert made.err.endswith(f" {line}\n")


def test_a_spare_waits(said):
    made = Voice(said)
    made.nodes.handle(Waiting(present=2, fewest=2, most=2, spare=True))
    assert made.err.endswith(" the job runs on 2 nodes; this node waits as a spare\n")


def test_what_runs_on_this_node_is_told_when_all_have_come_and_once(said):
    made = Voice(said, 100, "2 trainers of train.py on CPU; logs: log/x.*.log")
    made.meets(1, "h1", "h2")
    made.meets(2, "h1", "h3")
    first, second = made.err.splitlines()
    assert first.endswith(" Node 0 of 2: h1, h2; here 2 trainers of train.py on CPU; logs: log/x.*.log")
    assert second.endswith(" Node 0 of 2 (generation 2): h1, h3")


def test_a_stop_names_the_node_once(said):
    made = Voice(said)
    made.stops("h1 (10.0.0.1)", 2, "h1 (10.0.0.1) does not answer any more")
    assert made.err.endswith(" node 2, h1 (10.0.0.1) does not answer any more; stopping the job\n")


def test_a_stop_that_no_node_caused(said):
    made = Voice(said)
    made.stops("", -1, "2 of 4 nodes met")
    assert made.err.endswith(" 2 of 4 nodes met; stopping the job\n")


def test_the_report_of_another_node(said):
    made = Voice(said)
    lines = ("First failure: trainer 3 exited with code 7", "  its \033[31mlast words")
    headline, summary = "trainer 3 exited with code 7", "trainer 3: ValueError: \033[2Jx at train.py:3"
    made.nodes._final(_cause("h1", headline, lines, summary))
    assert made.err.splitlines() == [
        "=" * 60,
        "On node 1, h1:",
        "First failure: trainer 3 exited with code 7",
        "  its last words",
        "node 1, h1: trainer 3: ValueError: x at train.py:3",
    ]


def test_a_report_without_lines(said):
    made = Voice(said)
    made.nodes._final(_cause("h1", "h1 does not answer any more"))
    assert made.err.splitlines()[1:] == ["node 1, h1 does not answer any more"]


def test_an_outage_is_told_once_and_its_end_too(said):
    made = Voice(said)
    made.nodes.handle(StoreUp())
    assert made.err == ""
    made.nodes.handle(StoreDown("h1:6768: Connection refused"))
    made.nodes.handle(StoreUp())
    made.nodes.handle(StoreUp())
    lines = made.err.splitlines()
    assert len(lines) == 2
    assert "h1:6768: Connection refused" in lines[0]
    assert lines[1].endswith("reached the rendezvous store")


def test_the_meeting_point_is_there_again_for_those_who_were_there(said):
    made = Voice(said)
    made.meets(1, "h1")
    made.nodes.handle(StoreDown("h1:6768: Connection refused"))
    made.nodes.handle(StoreUp())
    assert made.err.endswith("reconnected to the rendezvous store\n")


def test_what_other_machines_are_called_does_nothing_to_a_terminal(said):
    made = Voice(said)
    evil = "h\033]0;x\007\033[2J\n2"
    made.nodes.handle(_waiting(1, 2, 2, (evil,)))
    made.meets(1, evil)
    made.stops(evil, 1, "trainer 1 exited with code 7")
    made.nodes.handle(Departing(evil))
    made.nodes._final(_cause(evil, "trainer 1 exited with code 7"))
    assert "\033" not in made.err
    assert "\007" not in made.err
    assert made.err.count("\n") == 4 + 2


def test_the_state_follows_and_only_the_wait_before_the_first_meeting_is_not_recorded(said):
    made = Voice(said)
    made.nodes.handle(StoreDown("h1:6768: Connection refused"))
    assert made.state.store == {"name": "the rendezvous store at h1:6768", "until": 65.0}
    made.nodes.handle(StoreUp())
    assert made.state.store is None
    made.nodes.handle(_waiting(1, 2, 2, ("h2",)))
    assert (made.state.state, made.state.waiting["missing"], made.state.waiting["until"]) == (
        "meeting", ["h2"], 64.6,
    )  # fmt: skip
    assert [each.get("wanted") for each in made.lines] == [None, None]
    made.meets(1, "h1", "h2")
    assert made.state.waiting is None
    assert made.state.nodes == [
        {"rank": 0, "title": "h1", "this": True},
        {"rank": 1, "title": "h2", "this": False},
    ]
    made.stops("h2", 1, "h2 does not answer any more")
    assert (made.state.state, made.state.why) == ("ending", "h2 does not answer any more")
    made.nodes.handle(_waiting(1, 2, 2))
    assert (made.lines[-1]["present"], made.lines[-1]["wanted"], made.state.state) == (1, 2, "meeting")
    again = State()
    for line in made.lines:
        again.handle(line)
    assert vars(again) == vars(made.state)
