"""Decisions, by table: from the content of the store and the state of a node to its next acts."""

import dataclasses

import pytest

from fleetrun.elastic.rendezvous import actions, records
from fleetrun.elastic.rendezvous.actions import Policy
from fleetrun.elastic.rendezvous.member import decide
from fleetrun.elastic.rendezvous.records import (
    Cause,
    CauseKind,
    MemberStatus,
    Node,
    Report,
    Round,
    State,
    Verdict,
)
from fleetrun.elastic.rendezvous.view import Failure, MemberState, Phase, View
from fleetrun.elastic.store import Entry
from fleetrun.envs.contract import NodeLoss
from fleetrun.plan.topology import Offer

LEASE = 10.0
POLICY = Policy(fewest=2, most=2, lease=LEASE)
NODES = {id: Node(id=id, host=f"host-{id}", name="", offer=Offer()) for id in "abcx"}
FAILED = Cause(why=CauseKind.FAILED, node="host-b", rank=1, headline="exit 7", code=7)
LOST = Cause(why=CauseKind.LOST, node="host-b", rank=1, headline="b is gone", code=125)


class Case:
    """One node's knowledge: `me` of the nodes that are `there`, at time 5."""

    def __init__(self, me="a", *, there="ab", leader="a", members="ab", policy=POLICY, **round_):
        self.mirror = {}
        self.revision = 0
        self.policy = policy
        self.view = View(me, 0.0)
        self.view.up = True
        self.own = MemberState(NODES[me], 0.0, seen_alive=True, was_up=True)
        for id in there:
            self.put(records.node_key(id), records.pack(NODES[id]))
        if leader:
            self.put(records.LEADER_KEY, leader.encode())
        if round_:
            self.round = Round(**{"generation": 1, "topology": "1/a.0" if members else "", **round_})
            self.put(records.ROUND_KEY, records.pack(self.round))
            if members:
                self.view.learned(self.round.topology, tuple(NODES[id] for id in members))
        self.members = members
        self.look(0.0)

    def put(self, key, value):
        self.revision += 1
        old = self.mirror.get(key)
        self.mirror[key] = Entry(value, old.created if old else self.revision, self.revision)

    def report(self, **done):
        for id, each in done.items():
            self.put(records.report_key(self.round.generation, id), records.pack(Report(done=each)))
        return self.look(0.0)

    def gone(self, *ids, at=5.0):
        for id in ids:
            del self.mirror[records.node_key(id)]
        return self.look(at)

    def taking_part(self, phase, *, completed=False):
        members = tuple(NODES[id] for id in self.members)
        self.own.take(self.round, members, [node.id for node in members].index(self.own.node.id))
        self.own.phase, self.own.completed = phase, completed
        return self

    def look(self, now):
        self.view.refresh(self.mirror, now)
        return self

    def decision(self, now=5.0):
        self.look(now)
        return decide(self.view, self.own, self.policy, now)

    def acts(self, now=5.0, *, but=(actions.WriteReport, actions.WriteCensus)):
        decided = self.decision(now).acts
        assert str(decided) == str(self.decision(now).acts), "asking again gives the same"
        return [act for act in decided if not isinstance(act, but)]

    def moves(self, now=5.0):
        """The states to which the round is moved."""
        found = [act for act in self.acts(now) if isinstance(act, actions.WriteRound | actions.Propose)]
        assert all(act.expect == self.view.round_revision for act in found)
        return [act.round.state for act in found]


# ---- to be there and to lead


def test_who_is_not_registered_registers_and_nothing_else():
    assert Case(there="", leader="").acts() == [actions.Register()]


@pytest.mark.parametrize(
    ("me", "state", "leaderless", "claims"),
    [
        ("x", None, 0, True),
        ("x", State.OPEN, 0, True),
        ("x", State.ENDED, 0, False),  # the job was its own: it ends
        ("a", State.FORMING, 0, True),
        ("a", State.RUNNING, 0, True),
        ("a", State.STOPPING, 0, True),
        ("x", State.FORMING, LEASE - 0.1, False),
        ("x", State.RUNNING, LEASE - 0.1, False),
        ("x", State.STOPPING, LEASE - 0.1, False),
        ("x", State.RUNNING, LEASE, True),
    ],
)
def test_which_node_claims_the_lead_when_there_is_no_leader(me, state, leaderless, claims):
    round_ = {"state": state, "cause": FAILED} if state is not None else {}
    case = Case(me, there="abx", leader="", **round_)
    if me == "a":
        case.taking_part(Phase.RUNNING)
    if state is State.ENDED:
        case.own.last = case.round
    decided = case.acts(leaderless)
    assert (actions.ClaimLead(0) in decided) is claims


def test_no_node_claims_a_lead_that_is_taken():
    assert actions.ClaimLead(0) not in Case("b", leader="a", state=State.OPEN, members="").acts()


def test_keys_of_an_ended_lease_are_written_again():
    case = Case(state=State.RUNNING).taking_part(Phase.RUNNING)
    case.own.renew = {"node", "leader"}
    assert case.acts()[:2] == [actions.Register(), actions.ClaimLead(case.view.leader_revision)]


def test_who_is_fenced_neither_registers_nor_leads_nor_reports():
    case = Case(there="b", leader="", state=State.OPEN, generation=2).taking_part(Phase.STOPPING)
    case.own.round = dataclasses.replace(case.round, generation=1)
    (act,) = case.decision().acts
    assert (type(act), act.at_once) == (actions.Stop, True)
    case.own.killed = True
    assert case.decision().acts == []


def test_a_verdict_ends_who_waits_but_not_who_runs():
    verdict = records.pack(Verdict(code=125, message="full"))
    waiting = Case("x", there="abx", state=State.RUNNING)
    running = Case("b", state=State.RUNNING).taking_part(Phase.RUNNING)
    for case in (waiting, running):
        case.put(records.verdict_key(case.own.node.id), verdict)
    assert [act.error.message for act in waiting.acts()] == ["full"]
    assert running.acts() == []


# ---- the leader, step by step


def test_the_first_round():
    decided = Case(there="a").acts()
    assert decided == [actions.WriteRound(Round(generation=1, state=State.OPEN), 0)]


def test_enough_nodes_are_formed():
    (form,) = Case(state=State.OPEN, members="").acts(0.0)
    assert [node.id for node in form.members] == ["a", "b"]
    assert (form.round.state, form.round.size, form.round.topology) == (State.FORMING, 2, "1/a.0")


def test_what_never_comes_about_is_not_proposed_for_ever():
    case = Case(state=State.OPEN, members="")
    assert case.moves(60.0) == [State.FORMING]
    assert case.moves(60.0 + 2 * LEASE) == [State.ENDED]


@pytest.mark.parametrize(
    ("reports", "now", "moves"),
    [
        ({}, 0.0, []),
        ({"a": MemberStatus.READY}, 1.0, []),
        ({"a": MemberStatus.READY, "b": MemberStatus.READY}, 0.0, [State.RUNNING]),
        ({"a": MemberStatus.READY}, LEASE / 2, [State.OPEN]),
    ],
)
def test_forming(reports, now, moves):
    case = Case(state=State.FORMING).taking_part(Phase.READY).report(**reports)
    assert case.moves(now) == moves


def test_a_ghost_is_dropped_and_who_is_ready_is_not():
    case = Case(state=State.FORMING).taking_part(Phase.READY).report(a=MemberStatus.READY)
    drop, move = case.acts(LEASE / 2)
    assert drop == actions.DropNode("b", case.view.nodes["b"].revision)
    assert (move.round.generation, move.round.topology, move.round.restarts) == (2, "1/a.0", 0)


def test_a_member_that_goes_while_a_generation_forms_is_not_waited_for():
    case = (
        Case(state=State.FORMING).taking_part(Phase.READY).report(a=MemberStatus.READY, b=MemberStatus.READY)
    )
    case.report(b=MemberStatus.READY)
    case.mirror.pop(records.report_key(1, "b"))
    assert case.gone("b", at=0.1).moves(0.1) == [State.OPEN]


def test_a_thousand_members_have_longer_to_read_their_topology():
    case = Case(state=State.FORMING).taking_part(Phase.READY)
    case.view.learned("1/a.0", (NODES["a"], NODES["b"]) * 1000)
    assert case.moves(LEASE / 2) == []
    assert case.moves(LEASE) == [State.OPEN]


@pytest.mark.parametrize(
    ("reports", "moves"),
    [
        ({"a": MemberStatus.READY, "b": MemberStatus.READY}, []),
        ({"a": MemberStatus.COMPLETED, "b": MemberStatus.READY}, []),
        ({"a": MemberStatus.COMPLETED, "b": MemberStatus.COMPLETED}, [State.ENDED]),
    ],
)
def test_running(reports, moves):
    case = Case(state=State.RUNNING).taking_part(Phase.RUNNING).report(**reports)
    assert case.moves(5.0) == moves


@pytest.mark.parametrize(
    ("policy", "restart"),
    [
        (POLICY, False),
        (Policy(fewest=1, most=2, lease=LEASE), True),
        (Policy(fewest=2, most=2, on_loss=NodeLoss.WAIT, lease=LEASE), True),
        (Policy(fewest=2, most=2, on_loss=NodeLoss.SHRINK, lease=LEASE), True),
    ],
)
def test_a_member_that_goes_stops_the_round(policy, restart):
    case = Case(state=State.RUNNING, policy=policy).taking_part(Phase.RUNNING).gone("b")
    (move,) = case.acts()
    assert (move.round.state, move.round.restart) == (State.STOPPING, restart)
    assert (move.round.cause.why, move.round.cause.rank, move.round.cause.code) == (CauseKind.LOST, 1, 125)


def test_a_member_that_a_new_leader_has_not_seen_may_come_yet():
    case = Case("a", there="a", state=State.RUNNING).taking_part(Phase.RUNNING)
    assert case.acts(LEASE - 0.1) == []
    assert case.decision(LEASE - 0.1).until == pytest.approx(LEASE)
    assert case.moves(LEASE) == [State.STOPPING]


def test_after_an_outage_members_may_come_yet():
    case = Case(state=State.RUNNING).taking_part(Phase.RUNNING)
    del case.mirror[records.node_key("b")]
    case.view.refresh(case.mirror, 50.0, whole=True)
    assert case.moves(50.0 + LEASE - 0.1) == []
    assert case.moves(50.0 + LEASE) == [State.STOPPING]


@pytest.mark.parametrize(
    ("policy", "kinds"),
    [
        (POLICY, [actions.Refuse]),
        (Policy(fewest=2, most=3, lease=LEASE), [actions.WriteRound]),
        (Policy(fewest=1, most=2, lease=LEASE), []),
    ],
)
def test_a_newcomer(policy, kinds):
    case = Case(there="abx", state=State.RUNNING, size=2, policy=policy).taking_part(Phase.RUNNING)
    assert [type(act) for act in case.acts(1.0)] == kinds


@pytest.mark.parametrize(
    ("reports", "restart", "now", "moves"),
    [
        ({"a": MemberStatus.STOPPING, "b": MemberStatus.STOPPING}, False, 0.2, []),
        ({"a": MemberStatus.STOPPING, "b": MemberStatus.STOPPING}, False, 0.3, [State.ENDED]),
        ({"a": MemberStatus.STOPPING}, False, 4.9, []),
        ({"a": MemberStatus.STOPPING}, False, 5.0, [State.ENDED]),
        ({"a": MemberStatus.STOPPED, "b": MemberStatus.STOPPING}, True, 50.0, []),
        ({"a": MemberStatus.STOPPED, "b": MemberStatus.STOPPED}, True, 0.3, [State.OPEN]),
    ],
)
def test_stopping(reports, restart, now, moves):
    case = Case(state=State.STOPPING, cause=FAILED, restart=restart).taking_part(Phase.STOPPED)
    assert case.report(**reports).moves(now) == moves


def test_a_restart_counts_for_a_failure_and_not_for_a_loss():
    for cause, restarts in ((FAILED, 2), (LOST, 1)):
        policy = Policy(fewest=1, most=2, lease=LEASE)
        case = Case(state=State.STOPPING, cause=cause, restart=True, restarts=1, policy=policy)
        case.taking_part(Phase.STOPPED).report(a=MemberStatus.STOPPED, b=MemberStatus.STOPPED)
        (move,) = case.acts(0.5)
        assert (move.round.generation, move.round.restarts, move.round.after) == (2, restarts, 0.0)


def test_the_last_one_cleans_up():
    case = Case(state=State.ENDED, cause=FAILED)
    case.own.last, case.own.phase = case.round, Phase.OVER
    assert case.acts(1.0) == []
    assert case.acts(LEASE) == [actions.DeleteJob()]
    assert case.gone("b", at=1.0).acts(1.0) == [actions.DeleteJob()]


def test_an_ended_round_of_an_earlier_job_is_opened_afresh():
    case = Case("x", there="x", leader="x", state=State.ENDED, generation=7, restarts=3)
    case.own.seen_alive = False
    (move,) = case.acts()
    assert move.round == Round(generation=8, state=State.OPEN)


def test_without_any_member_the_round_is_opened_afresh_when_none_can_come_back():
    case = Case("x", there="x", leader="x", state=State.RUNNING, generation=7, restarts=3)
    assert case.acts(LEASE - 0.1) == []
    (move,) = case.acts(LEASE)
    assert move.round == Round(generation=8, state=State.OPEN)


# ---- a member, step by step


@pytest.mark.parametrize(
    ("state", "phase", "kinds"),
    [
        (State.FORMING, Phase.IDLE, [actions.Accept]),
        (State.FORMING, Phase.READY, []),
        (State.RUNNING, Phase.IDLE, [actions.Accept]),
        (State.STOPPING, Phase.IDLE, [actions.Accept]),
        (State.RUNNING, Phase.READY, [actions.Start]),
        (State.RUNNING, Phase.RUNNING, []),
        (State.STOPPING, Phase.READY, [actions.Stop]),
        (State.STOPPING, Phase.RUNNING, [actions.Stop]),
        (State.STOPPING, Phase.STOPPING, []),
        (State.STOPPING, Phase.STOPPED, []),
        (State.OPEN, Phase.READY, [actions.Leave]),
        (State.OPEN, Phase.STOPPED, [actions.Leave]),
        (State.OPEN, Phase.RUNNING, [actions.Stop]),  # it went on without this node
        (State.OPEN, Phase.STOPPING, [actions.Stop]),  # and what still stops is killed
        (None, Phase.READY, [actions.Leave]),
        (None, Phase.RUNNING, [actions.Propose]),  # the store has lost its data
    ],
)
def test_a_member_follows_its_round(state, phase, kinds):
    case = Case("b", state=state or State.RUNNING, cause=FAILED)
    if phase is not Phase.IDLE:
        case.taking_part(phase)
    if state is State.OPEN:
        case.put(records.ROUND_KEY, records.pack(dataclasses.replace(case.round, state=state, generation=2)))
    if state is None:
        case.view = View("b", 0.0)
        case.view.up = True
        del case.mirror[records.ROUND_KEY]
    assert [type(act) for act in case.acts(1.0)] == kinds


@pytest.mark.parametrize(
    ("phase", "completed", "done"),
    [
        (Phase.IDLE, False, None),
        (Phase.READY, False, MemberStatus.READY),
        (Phase.RUNNING, False, MemberStatus.READY),
        (Phase.RUNNING, True, MemberStatus.COMPLETED),
        (Phase.STOPPING, True, MemberStatus.STOPPING),
        (Phase.STOPPED, False, MemberStatus.STOPPED),
    ],
)
def test_a_member_reports_how_far_it_is(phase, completed, done):
    case = Case("b", state=State.STOPPING, cause=FAILED)
    if phase is not Phase.IDLE:
        case.taking_part(phase, completed=completed)
    told = [act.report.done for act in case.decision().acts if isinstance(act, actions.WriteReport)]
    assert told == ([] if done is None else [done])


def test_what_was_told_is_not_told_again_unless_there_is_more():
    case = Case("b", state=State.STOPPING, cause=FAILED).taking_part(Phase.STOPPING)
    case.own.reported = (1, MemberStatus.STOPPING, 0)
    assert case.decision().acts == []
    case.own.causes.append((4.0, FAILED))
    (tell,) = case.decision(5.0).acts
    assert tell.report.causes[0].age == pytest.approx(1.0)


def test_a_failure_stops_the_round_with_its_age():
    case = Case("b", state=State.RUNNING).taking_part(Phase.RUNNING)
    case.own.failure = Failure(dataclasses.replace(FAILED, age=0.5), restart=True, after=2.0, since=4.0)
    (move,) = case.acts(5.0)
    assert move.round.cause.age == pytest.approx(1.5)
    assert (move.round.restart, move.round.after, move.expect) == (True, 2.0, case.view.round_revision)


def test_without_a_store_nothing_is_asked_of_it():
    case = Case(there="a", state=State.RUNNING).taking_part(Phase.RUNNING)
    case.view.up, case.own.down_since = False, 0.0
    assert case.decision(1000.0).acts == []


@pytest.mark.parametrize(
    ("last", "phase", "kinds"),
    [
        ({"code": 0}, Phase.RUNNING, [actions.Finish]),
        ({"code": 0}, Phase.FINISHING, []),
        ({"code": 0}, Phase.STOPPED, [actions.End]),
        ({"code": 0}, Phase.IDLE, [actions.Fail]),
        ({"code": 0, "generation": 2}, Phase.RUNNING, [actions.Stop, actions.Fail]),
        ({"code": 7, "cause": FAILED}, Phase.RUNNING, [actions.Stop, actions.End]),
        ({"code": 7, "cause": FAILED}, Phase.STOPPING, [actions.End]),
        ({"code": 7, "cause": FAILED}, Phase.IDLE, [actions.End]),
    ],
)
def test_the_end(last, phase, kinds):
    case = Case("b", state=State.RUNNING)
    if phase is not Phase.IDLE:
        case.taking_part(phase)
    case.own.last = dataclasses.replace(case.round, state=State.ENDED, **last)
    assert [type(act) for act in case.acts(but=(actions.Unregister,))] == kinds
    assert actions.Unregister() in case.acts()


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.STOPPING])
@pytest.mark.parametrize("end", [{"code": 0}, {"code": 7, "cause": FAILED}])
def test_what_still_runs_of_a_generation_that_the_job_went_on_without_is_killed_at_its_end(phase, end):
    case = Case("b", state=State.RUNNING).taking_part(phase)
    case.own.last = dataclasses.replace(case.round, state=State.ENDED, generation=2, **end)
    stop, last = case.acts(but=(actions.Unregister,))
    assert (stop.at_once, stop.restart) == (True, False)
    assert isinstance(last, actions.End if end["code"] else actions.Fail)
    case.own.killed = True
    assert [type(act) for act in case.acts(but=(actions.Unregister,))] == [type(last)]


# ---- A job that waits for a change (--watch)

WATCH = dataclasses.replace(POLICY, watch=True)
ASKED = Cause(why=CauseKind.ASKED, node="host-a", rank=0, headline="restart by a change of x.py")


def waiting(**more):
    round_ = {"state": State.ENDED, "restart": True, "cause": FAILED, "code": 7} | more
    return Case(policy=WATCH, **round_).taking_part(Phase.STOPPED)


def written(case):
    return [act.round for act in case.acts() if isinstance(act, actions.WriteRound)]


def test_a_job_that_completed_or_failed_waits_when_all_processes_have_ended():
    done = Case(state=State.RUNNING, policy=WATCH).taking_part(Phase.RUNNING)
    done.report(a=MemberStatus.COMPLETED, b=MemberStatus.COMPLETED)
    assert [(each.state, each.restart) for each in written(done)] == [(State.ENDED, True)]
    failed = Case(state=State.STOPPING, cause=FAILED, policy=WATCH).taking_part(Phase.STOPPED)
    failed.report(a=MemberStatus.STOPPED, b=MemberStatus.STOPPING)
    assert written(failed) == []
    failed.report(b=MemberStatus.STOPPED)
    assert [(each.state, each.restart, each.code) for each in written(failed)] == [(State.ENDED, True, 7)]


@pytest.mark.parametrize("why", [CauseKind.LEFT, CauseKind.LOST, CauseKind.TIMEOUT])
def test_a_job_does_not_wait_after_another_end(why):
    cause = dataclasses.replace(FAILED, why=why)
    case = Case(state=State.STOPPING, cause=cause, policy=WATCH).taking_part(Phase.STOPPED)
    case.report(a=MemberStatus.STOPPED, b=MemberStatus.STOPPED)
    assert [(each.state, each.restart) for each in written(case)] == [(State.ENDED, False)]


def test_a_member_reports_the_wait_once_and_ends_it_for_a_change_or_for_its_user():
    case = waiting(restarts=1, attempts=2)
    assert case.acts() == [actions.Pause(case.round)]
    case.own.paused = True
    assert case.acts() == []
    case.own.failure = Failure(ASKED, True, 0.0, 5.0)
    (again,) = written(case)
    assert (again.state, again.generation, again.restart, again.code) == (State.OPEN, 2, False, 0)
    assert (again.cause, again.attempts, again.restarts) == (ASKED, 3, 0)
    case.own.failure = Failure(ASKED, False, 0.0, 5.0)
    assert written(case) == [dataclasses.replace(case.round, restart=False)]


@pytest.mark.parametrize(
    ("cause", "edit", "restarts"),
    [
        (ASKED, "1 a", 2),
        (dataclasses.replace(ASKED, edit="2 b"), "2 b", 0),
        (dataclasses.replace(FAILED, code=7), "1 a", 3),
    ],
)
def test_all_members_run_the_last_edit_and_count_restarts_from_it(cause, edit, restarts):
    stopping = {"state": State.STOPPING, "cause": cause, "restart": True, "edit": "1 a", "restarts": 2}
    case = Case(policy=WATCH, **stopping).taking_part(Phase.STOPPED)
    case.report(a=MemberStatus.STOPPED, b=MemberStatus.STOPPED)
    assert [(each.state, each.edit, each.restarts) for each in written(case)] == [
        (State.OPEN, edit, restarts)
    ]
    pause = waiting(edit="1 a")
    pause.own.paused = True
    pause.own.failure = Failure(cause, True, 0.0, 5.0)
    assert [each.edit for each in written(pause)] == [edit]


@pytest.mark.parametrize("done", [MemberStatus.COMPLETED, MemberStatus.STOPPED])
@pytest.mark.parametrize(("on_loss", "codes"), [(NodeLoss.FAIL, [125]), (NodeLoss.SHRINK, [])])
def test_the_loss_of_a_node_ends_the_wait_unless_the_job_can_do_without_it(done, on_loss, codes):
    case = waiting()
    case.policy = dataclasses.replace(WATCH, on_loss=on_loss)
    case.own.paused = True
    case.report(b=done).gone("b")
    assert [(each.code, each.restart) for each in written(case)] == [(code, False) for code in codes]


def test_a_new_job_does_not_wait_for_the_nodes_of_an_old_one():
    case = Case("x", there="x", leader="x", state=State.ENDED, restart=True, generation=7)
    assert case.moves(LEASE) == [State.OPEN]
