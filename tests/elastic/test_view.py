"""A node's view of the job, and since when it has each record."""

import pytest

from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.records import Cause, CauseKind, MemberStatus, Node, Report, Round, State
from fleetrun.elastic.rendezvous.view import View
from fleetrun.elastic.store import Entry
from fleetrun.plan.topology import Offer

ROUND = Round(generation=1, state=State.RUNNING, topology="1/a.0")


class Mirror(dict):
    def put(self, key, value, revision):
        created = self[key].created if key in self else revision
        self[key] = Entry(value, created, revision)

    def node(self, id, revision):
        self.put(records.node_key(id), records.pack(Node(id=id, host="h", name="", offer=Offer())), revision)

    def round(self, revision, round_=ROUND):
        self.put(records.ROUND_KEY, records.pack(round_), revision)


@pytest.fixture
def mirror():
    made = Mirror()
    made.node("a", 10)
    made.round(20)
    return made


@pytest.fixture
def view(mirror):
    made = View("a", 0.0)
    made.refresh(mirror, 1.0)
    return made


def test_a_node_that_goes_while_looking_went_then(view, mirror):
    mirror.node("b", 21)
    view.refresh(mirror, 2.0)
    assert view.lost_at("b", 10.0) is None
    del mirror[records.node_key("b")]
    view.refresh(mirror, 3.0)
    assert view.lost_at("b", 10.0) == 3.0


def test_a_node_that_goes_while_away_may_come_yet(view, mirror):
    mirror.node("b", 21)
    view.refresh(mirror, 2.0)
    del mirror[records.node_key("b")]
    view.refresh(mirror, 3.0, whole=True)
    assert view.lost_at("b", 10.0) == 13.0
    mirror.node("b", 22)
    view.refresh(mirror, 4.0)
    assert view.lost_at("b", 10.0) is None
    assert view.nodes["b"].since == 4.0


def test_a_node_that_was_never_seen_counts_from_when_this_one_leads(view, mirror):
    mirror.put(records.LEADER_KEY, b"a", 23)
    view.refresh(mirror, 7.0)
    assert view.lost_at("x", 10.0) == 17.0
    view.left("x", 8.0)
    assert view.lost_at("x", 10.0) == 8.0


def test_a_record_is_read_once(view, mirror):
    mirror.node("b", 21)
    view.refresh(mirror, 2.0)
    before = view.nodes["b"]
    view.refresh(mirror, 3.0)
    assert view.nodes["b"] is before
    mirror.node("b", 22)
    view.refresh(mirror, 4.0)
    assert view.nodes["b"] is not before
    assert (view.nodes["b"].since, view.nodes["b"].created) == (2.0, 21)


def test_a_record_of_the_same_revision_may_be_another_one(view, mirror):
    """Where a store has lost its data."""
    mirror.node("b", 21)
    view.refresh(mirror, 2.0)
    other = Node(id="b", host="other", name="", offer=Offer())
    mirror[records.node_key("b")] = Entry(records.pack(other), 21, 21)
    view.refresh(mirror, 3.0, whole=True)
    assert view.nodes["b"].node.host == "other"


def test_a_report_counts_for_its_generation_and_tells_when(view, mirror):
    cause = Cause(why=CauseKind.FAILED, node="b", age=0.5)
    for generation in (1, 2):
        report = Report(done=MemberStatus.STOPPING, causes=(cause,))
        mirror.put(records.report_key(generation, f"b{generation}"), records.pack(report), 30 + generation)
    view.refresh(mirror, 5.0)
    assert view.reports.keys() == {"b1"}
    assert view.reports["b1"].causes[0][0] == 4.5
    mirror.round(40, Round(generation=2, state=State.OPEN, topology="1/a.0"))
    view.refresh(mirror, 6.0)
    assert view.reports == {}


def test_a_member_does_not_go_back(view, mirror):
    """A write that was repeated, because its outcome was unknown, may arrive after a later one."""
    for revision, done in enumerate((MemberStatus.COMPLETED, MemberStatus.READY), start=31):
        mirror.put(records.report_key(1, "b"), records.pack(Report(done=done)), revision)
        view.refresh(mirror, float(revision))
    assert view.done("b") is MemberStatus.COMPLETED


def test_since_when_nothing_runs(view, mirror):
    for at, state, since in [
        (2.0, State.STOPPING, 0.0), (3.0, State.OPEN, 3.0), (4.0, State.FORMING, 3.0), (5.0, State.OPEN, 3.0),
        (6.0, State.RUNNING, 3.0), (7.0, State.STOPPING, 3.0), (8.0, State.OPEN, 8.0),
    ]:  # fmt: skip
        mirror.round(int(20 + at), Round(generation=1, state=state))
        view.refresh(mirror, at)
        assert view.unformed_since == since


def test_a_round_that_is_gone_was_cleared_away(view, mirror):
    del mirror[records.ROUND_KEY]
    view.refresh(mirror, 2.0)
    assert view.cleared


@pytest.mark.parametrize(("revision", "cleared"), [(30, True), (3, False)])
def test_a_store_that_lost_its_data_counts_from_the_start(view, mirror, revision, cleared):
    mirror.clear()
    view.refresh(mirror, 2.0, whole=True)
    assert not view.cleared, "it cannot know yet"
    mirror.node("a", revision)
    view.refresh(mirror, 3.0)
    assert view.cleared is cleared


@pytest.mark.parametrize(("revision", "rewound"), [(30, False), (3, True)])
def test_another_round_in_a_store_that_lost_its_data(view, mirror, revision, rewound):
    mirror.clear()
    mirror.round(revision, Round(generation=1, state=State.OPEN))
    view.refresh(mirror, 2.0, whole=True)
    assert view.rewound is rewound


def test_nothing_was_cleared_away_where_nothing_was():
    view = View("a", 0.0)
    view.refresh(Mirror(), 1.0)
    assert not view.cleared


def test_junk_is_left_out(view, mirror):
    mirror.put(records.node_key("x"), b"junk", 31)
    mirror.put(records.verdict_key("a"), b"junk", 32)
    mirror.put(records.CENSUS_KEY, b"[]", 33)
    mirror.put(records.LEADER_KEY, b"\xff", 34)
    view.refresh(mirror, 2.0)
    assert view.nodes.keys() == {"a"}
    assert (view.verdict, view.census, view.foreign) == (None, None, "")
    mirror.put(records.ROUND_KEY, b"junk", 35)
    view.refresh(mirror, 3.0)
    assert view.foreign
