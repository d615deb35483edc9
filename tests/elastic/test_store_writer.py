"""Acts at the store: each under its condition, in order, and not sent again while under way."""

import pytest

from fleetrun.elastic.membership import RETRY_AFTER, VISIBLE_WITHIN, PendingWrites, StoreWriter
from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.actions import (
    ClaimLead,
    DropNode,
    Propose,
    ReadTopology,
    Refuse,
    Register,
    Unregister,
    WriteReport,
    WriteRound,
)
from fleetrun.elastic.rendezvous.records import MemberStatus, Node, Report, Round, State, Verdict
from fleetrun.elastic.rendezvous.view import MemberState, View
from fleetrun.elastic.store import Ledger
from fleetrun.plan.topology import Offer
from tests.support.simulation import CountingStore, SimulatedLoop

NODE = Node(id="a", host="h", name="", offer=Offer())
OPEN = Round(generation=1, state=State.OPEN)
FORMING = Round(generation=1, state=State.FORMING, topology="1/a.0")


class SilentListener:
    def changed(self): ...
    def up(self, *, fresh): ...
    def down(self, why): ...
    def lost(self, error): ...


class Office:
    """A writer and what is around it."""

    def __init__(self):
        self.loop = SimulatedLoop()
        self.ledger = Ledger()
        self.store = CountingStore(self.ledger, self.loop, "a")
        self.view, self.part = View("a", self.loop.now), MemberState(NODE, self.loop.now)
        self.looks = 0
        self.writer = StoreWriter(self.store, self.loop, self.view, self.part, self._look)
        for prefix in (records.STATE_PREFIX, records.NODES_PREFIX):
            self.store.watch(prefix)
        self.store.open(SilentListener())
        self.loop.run_for(0.01)

    def _look(self):
        self.looks += 1

    def take(self, *acts):
        for act in acts:
            self.writer.take(act)
        self.loop.run_for(0.01)

    def round(self):
        return records.read_round(self.ledger.get(records.ROUND_KEY).value)


@pytest.fixture
def writer():
    return Office()


def test_a_round_is_moved_only_from_where_it_was_seen(writer):
    writer.take(WriteRound(OPEN, 0))
    seen = writer.ledger.get(records.ROUND_KEY).revision
    writer.ledger.put(records.ROUND_KEY, records.pack(Round(generation=9, state=State.OPEN)))
    writer.take(WriteRound(FORMING, seen))
    assert writer.round().generation == 9
    writer.take(Propose(FORMING, (NODE,), seen))
    assert writer.round().generation == 9


def test_the_topology_stands_before_the_round_names_it(writer):
    told = []
    put = writer.ledger.put
    writer.ledger.put = lambda key, value, **options: told.append(key) or put(key, value, **options)
    writer.take(Propose(FORMING, (NODE,), 0))
    assert told == [records.topology_key("1/a.0"), records.ROUND_KEY]
    writer.view.round = FORMING
    assert [node.id for node in writer.view.members] == ["a"]


def test_a_claim_does_not_replace_the_leader(writer):
    writer.ledger.put(records.LEADER_KEY, b"b")
    writer.take(ClaimLead(0))
    assert writer.ledger.get(records.LEADER_KEY).value == b"b"


def test_a_ghost_that_came_back_is_not_dropped(writer):
    old = writer.ledger.put(records.node_key("g"), b"1").revision
    writer.ledger.put(records.node_key("g"), b"2")
    writer.take(DropNode("g", old))
    assert writer.ledger.get(records.node_key("g")) is not None


def test_the_lead_and_the_entry_go_with_the_lease_and_a_report_stays(writer):
    writer.take(Register(), ClaimLead(0), WriteReport(1, Report(done=MemberStatus.COMPLETED)))
    writer.store.close()
    assert set(writer.ledger.range("")) == {records.report_key(1, "a")}


def test_the_same_is_not_asked_twice_at_a_time(writer):
    for _ in range(3):
        for act in (
            Register(),
            ClaimLead(0),
            WriteRound(OPEN, 0),
            Refuse("x", Verdict(code=1, message="")),
            ReadTopology("1/x"),
        ):
            writer.writer.take(act)
    assert (writer.store.asked["put"], writer.store.asked["read"]) == (4, 1)


def test_what_was_refused_is_asked_again_after_a_moment(writer):
    writer.ledger.put(records.verdict_key("x"), b"")
    writer.take(ClaimLead(7))
    assert writer.writer.pending.forget_late(writer.loop.now) == pytest.approx(
        writer.loop.now + RETRY_AFTER, abs=0.02
    )
    writer.writer.pending.forget_late(writer.loop.now + RETRY_AFTER)
    writer.take(ClaimLead(0))
    assert writer.ledger.get(records.LEADER_KEY).value == b"a"


def test_a_topology_that_is_not_there_or_none_has_no_members(writer):
    writer.ledger.put(records.topology_key("2/b.0"), b"junk")
    for name in ("1/b.0", "2/b.0"):
        writer.view.round = Round(generation=1, state=State.FORMING, topology=name)
        assert writer.view.members is None
        writer.take(ReadTopology(name))
        assert writer.view.members == ()
    assert writer.looks >= 2


def test_who_unregisters_is_gone(writer):
    writer.take(Register())
    writer.take(Unregister())
    assert writer.ledger.get(records.node_key("a")) is None


def test_a_write_is_not_sent_again_before_the_mirror_shows_it():
    pending = PendingWrites()
    assert pending.begin("k", 3)
    assert not pending.begin("k", 3)
    pending.answered("k", True, 10.0)
    assert pending.forget_late(10.0 + VISIBLE_WITHIN / 2) == 10.0 + VISIBLE_WITHIN
    assert not pending.begin("k", 3)
    assert pending.begin("k", 4), "the mirror shows it"
    pending.answered("other", True, 0.0)
    pending.clear()
    assert pending.begin("k", 4)
