"""What the leader decides: which nodes are members with which rank, the cause of the end, and restarts."""

import dataclasses

import pytest

from fleetrun.elastic.rendezvous.actions import Policy
from fleetrun.elastic.rendezvous.admission import choose
from fleetrun.elastic.rendezvous.leader import LATEST, final_cause, may_restart
from fleetrun.elastic.rendezvous.records import Cause, CauseKind, MemberStatus, Node, Report, Round, State
from fleetrun.elastic.rendezvous.view import Candidate, ReceivedReport, Situation, View
from fleetrun.elastic.store import reconnect_grace
from fleetrun.envs.contract import NodeLoss
from fleetrun.plan.topology import Offer
from fleetrun.pod.policy import Budget, Spent


def node(text):
    """`id`, `id=rank`, `id@host`."""
    name, _, host = text.partition("@")
    id, _, rank = name.partition("=")
    return Node(id=id, host=host or f"host-of-{id}", name="", offer=Offer(), rank=int(rank or -1))


def candidate(text):
    return [
        Candidate(node=node(each), created=number, revision=number, since=0.0, fits=0)
        for number, each in enumerate(text.split())
    ]


@pytest.mark.parametrize(
    ("there", "previous", "most", "order"),
    [
        # by arrival, by wish
        ("a b c", "", 3, "a b c"),
        ("a=2 b=0 c=1", "", 3, "b c a"),
        ("a b=0 c", "", 3, "b a c"),
        ("a=5 b", "", 2, "a b"),  # a rank past the end of a smaller generation
        # too many: members, then those that ask for a rank, then the first
        ("a b c d", "", 2, "a b"),
        ("a b c=0 d", "", 2, "c a"),
        ("a b c d", "d c", 2, "d c"),
        ("a=0 b c", "b c", 2, "b c"),
        # ranks are kept
        ("c b a", "a b c", 3, "a b c"),
        ("c b a", "a b c", 4, "a b c"),
        ("d c b a", "a b c", 4, "a b c d"),
        # the last ranks move into the holes
        ("b c d", "a b c d", 4, "d b c"),
        ("c d", "a b c d", 4, "c d"),
        ("a d", "a b c d", 4, "a d"),
        ("b", "a b", 2, "b"),
        # newcomers fill what is left
        ("a c x", "a b c", 3, "a x c"),
        ("b c x y", "a b c", 4, "x b c y"),
        ("d x y", "a b c d", 4, "d x y"),
        # a machine that comes back has its place
        ("a d y@host-of-c x@host-of-b", "a b c d", 4, "a x y d"),
        ("a d x y@host-of-b", "a b c d", 4, "a y x d"),
        ("a x@same y@same", "a b@same c@same", 3, "a x y"),
        # a node that asks for a rank gets it, whatever it had before
        ("a b x=0", "a b", 3, "x b a"),
        ("a=0 b=1 x=2", "a b c", 3, "a b x"),
    ],
)
def test_order(there, previous, most, order):
    members = choose(candidate(there), [node(each) for each in previous.split()], most)
    assert " ".join(member.id for member in members) == order


@pytest.mark.parametrize(
    ("there", "previous", "most", "order"),
    [
        # x is a spare that came before d, and has its rank
        ("a=0 b=1 x=5 d=3 y=4", "a b c x", 4, "a b d x"),
        ("a=0 b=1 x d=3", "a b c x", 4, "a b d x"),
        ("a b x=1", "a b c", 3, "a b x"),
        ("a=0 c=2", "a b c", 3, "a c"),
    ],
)
def test_with_spares_members_keep_their_ranks(there, previous, most, order):
    nodes = [node(each) for each in previous.split()]
    members = choose(candidate(there), nodes, most, keep=True)
    assert " ".join(member.id for member in members) == order


def test_addresses_are_sorted_as_numbers_and_names_follow():
    hosts = ["b.example", "10.0.0.10", "fe80::1", "10.0.0.9", "a.example", "::1"]
    there = candidate(" ".join(f"n{number}@{host}" for number, host in enumerate(hosts)))
    members = choose(there, [], 6, sort_ip=True)
    assert [member.host for member in members] == [
        "10.0.0.9", "10.0.0.10", "::1", "fe80::1", "a.example", "b.example"
    ]  # fmt: skip


def test_addresses_do_not_move_those_who_have_a_rank():
    members = choose(candidate("a@10.0.0.9 b@10.0.0.2 c@10.0.0.1"), [node("a"), node("b")], 3, sort_ip=True)
    assert [member.id for member in members] == ["a", "b", "c"]


def test_nodes_of_one_address_keep_their_order():
    members = choose(candidate("b@h a@h c@h"), [], 3, sort_ip=True)
    assert [member.id for member in members] == ["b", "a", "c"]


NODES = tuple(Node(id=id, host=id, name="", offer=Offer()) for id in "abc")
LEASE = 10.0
FIXED = Policy(fewest=3, most=3, lease=LEASE, budget=Budget(2))
ELASTIC = Policy(fewest=2, most=3, lease=LEASE, budget=Budget(2))
NOW = 50.0
"""When the round was seen to stop."""


def cause(why, rank, code=7, age=0.0):
    return Cause(why=why, node=NODES[rank].title, rank=rank, headline=f"{why} {rank}", code=code, age=age)


def seen(first, told=(), gone=(), completed=()):
    """A view in which the round stopped for `first`, `told` are causes with the times at which they
    happened, `departed` nodes with the times at which they went.
    """
    view = View("a", 0.0)
    view.round = Round(generation=1, state=State.STOPPING, cause=first, size=3)
    view.round_since = NOW
    view.nodes = dict.fromkeys("abc")
    for at, each in told:
        report = Report(done=MemberStatus.STOPPING, causes=(each,))
        view.reports["abc"[each.rank]] = ReceivedReport(report, ((at, each),))
    for id in completed:
        view.reports[id] = ReceivedReport(Report(done=MemberStatus.COMPLETED), ())
    for id, at in gone:
        del view.nodes[id]
        view.departed[id] = at
    return view


def final_cause_of(view, policy=FIXED, now=NOW + 1):
    return final_cause(Situation(view, view.round, NODES, policy, now))


F, L, T = CauseKind.FAILED, CauseKind.LOST, CauseKind.LEFT


@pytest.mark.parametrize(
    ("first", "told", "gone", "completed", "chosen"),
    [
        (cause(F, 0), [], [], "", (F, 0)),
        (cause(F, 0), [(NOW - 0.1, cause(F, 1))], [], "", (F, 1)),
        (cause(F, 0, age=0.3), [(NOW - 0.1, cause(F, 1))], [], "", (F, 0)),
        (cause(F, 0), [(NOW + 0.1, cause(F, 1)), (NOW - 0.2, cause(F, 2))], [], "", (F, 2)),
        # a node that has gone: before, soon after (its peers failed first), much later
        (cause(F, 0), [], [("c", NOW - 1)], "", (L, 2)),
        (cause(F, 0), [], [("c", NOW + 0.5)], "", (L, 2)),
        (cause(F, 0, age=1.1), [], [("c", NOW + 0.5)], "", (F, 0)),
        # a node that reported why it leaves, or had completed, is not lost
        (cause(T, 2), [], [("c", NOW)], "", (T, 2)),
        (cause(F, 0), [(NOW + 0.1, cause(T, 2))], [("c", NOW + 0.2)], "", (F, 0)),
        (cause(F, 0), [], [("c", NOW)], "c", (F, 0)),
        (cause(F, 2), [], [("c", NOW + 0.2)], "", (F, 2)),
        # of two that have gone the first
        (cause(L, 1, age=0.2), [], [("b", NOW - 0.2), ("c", NOW - 0.4)], "", (L, 2)),
    ],
)
def test_the_cause(first, told, gone, completed, chosen):
    view = seen(first, told, gone, completed)
    final = final_cause_of(view)
    assert (final.why, final.rank) == chosen


@pytest.mark.parametrize(
    ("lease", "after", "why"),
    [(2.0, 1.4, L), (10.0, 1.4, L), (10.0, 1.6, F), (30.0, 3.4, L), (30.0, 3.6, F), (1000.0, 4.4, L)],
)
def test_a_killed_launcher_is_the_cause_however_long_its_connection_is_forgiven(lease, after, why):
    view = seen(cause(F, 0), gone=[("c", NOW + after)])
    final = final_cause_of(view, dataclasses.replace(ELASTIC, lease=lease), NOW + 5)
    assert final.why is why


def test_nothing_is_decided_while_a_broken_connection_may_be_forgiven():
    assert all(reconnect_grace(lease) + 0.5 < LATEST for lease in (2.0, 10.0, 30.0, 1000.0))


def test_a_failure_whose_cause_is_known_comes_before_an_older_symptom():
    symptom = dataclasses.replace(cause(F, 0, age=0.3), symptom=True)
    known, later = (NOW - 0.1, cause(F, 1)), (NOW + 0.1, cause(F, 2))
    assert final_cause_of(seen(symptom, [later, known])).rank == 1
    assert final_cause_of(seen(symptom)).rank == 0
    left = (NOW + 0.1, cause(T, 1))
    assert final_cause_of(seen(symptom, [left])).rank == 0


@pytest.mark.parametrize(("symptom", "closed", "rank"), [(True, (), 2), (True, "c", 0), (False, (), 0)])
def test_a_wait_that_timed_out_while_a_node_was_not_heard_of_was_for_that_node(symptom, closed, rank):
    failure = dataclasses.replace(cause(F, 0, age=FIXED.lease - 1), symptom=symptom)
    view = seen(failure, gone=[("c", NOW)])
    view.closed.update(closed)
    assert final_cause_of(view).rank == rank
    view = seen(cause(L, 2), [(NOW - FIXED.lease + 1, failure)])
    view.closed.update(closed)
    assert final_cause_of(view).rank == rank


R = CauseKind.RESTARTED


@pytest.mark.parametrize(
    ("first", "told", "before"),
    [
        ("server 1 was restarted", [(NOW - 9, 1), (NOW - 4, 1)], 4),
        ("servers 0, 1 were restarted", [(NOW - 3, 1)], 3),
        ("server 2 was restarted", [(NOW - 4, 1)], 0),
        ("out of range", [(NOW - 4, 1)], 0),
        ("server 1 was restarted", [(NOW + 1, 1)], 0),
    ],
)
def test_a_server_that_was_restarted_leads_the_report_that_names_it(first, told, before):
    failure = dataclasses.replace(cause(F, 0), lines=(first,))
    ends = [
        (at, dataclasses.replace(cause(R, rank), headline=f"server {rank} ended", lines=("server 0",)))
        for at, rank in told
    ]
    began = [f"Began with: server 1 ended on node 1, b, {before}.0 s before"] if before else []
    final = final_cause_of(seen(failure, ends))
    assert (final.why, final.rank, final.lines) == (F, 0, (*began, first))


def test_a_server_that_was_restarted_does_not_explain_that_its_node_has_gone():
    view = seen(cause(F, 0), [(NOW - 4, cause(R, 2))], gone=[("c", NOW - 1)])
    assert final_cause_of(view).why is L


def test_the_age_of_a_cause_counts_to_now():
    final = final_cause_of(seen(cause(F, 0, age=0.5)))
    assert final.age == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("why", "code", "policy", "here", "restarts", "again"),
    [
        (F, 7, FIXED, 3, 0, True),
        (F, 7, FIXED, 3, 2, False),
        (F, 2, FIXED, 3, 0, False),
        (F, 127, ELASTIC, 3, 0, False),
        (F, 7, FIXED, 2, 0, False),  # another one is gone
        (F, 7, ELASTIC, 2, 0, True),
        (L, 125, FIXED, 2, 0, False),
        (L, 125, ELASTIC, 2, 0, True),
        (L, 125, ELASTIC, 2, 2, True),  # counts nothing
        (L, 125, ELASTIC, 1, 0, False),
        (L, 125, dataclasses.replace(FIXED, on_loss=NodeLoss.WAIT), 1, 0, True),
        (T, 143, FIXED, 2, 0, False),
        (T, 143, dataclasses.replace(FIXED, on_loss=NodeLoss.SHRINK), 2, 0, True),
        (CauseKind.JOINED, 0, ELASTIC, 3, 2, True),
        (CauseKind.TIMEOUT, 124, ELASTIC, 3, 0, False),
    ],
)
def test_whether_there_is_another_generation(why, code, policy, here, restarts, again):
    first = cause(CauseKind.JOINED, 0, code=0)
    round_ = Round(
        generation=1, state=State.STOPPING, cause=first, restart=True, spent=Spent((0.0,) * restarts)
    )
    assert may_restart(round_, cause(why, 1, code), here, policy) is again


@pytest.mark.parametrize("wish", [True, False])
def test_the_node_that_failed_first_decides(wish):
    first = cause(F, 0)
    round_ = Round(generation=1, state=State.STOPPING, cause=first, restart=wish, restarts=0)
    assert may_restart(round_, dataclasses.replace(first, age=9.0), len(NODES), FIXED) is wish
