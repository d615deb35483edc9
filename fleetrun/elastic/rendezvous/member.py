"""Decide what a node does next in the rendezvous, from its view of the job. Pure; `membership.py` carries it
out.

The states of a round follow. Each transition is one compare-and-set of `state/round`. L marks the leader's
transitions.

                 enough nodes (L)          all have read it (L)
        +------+ ---------------> +-------+ -------------------> +-------+
   ---> | OPEN |                  |FORMING|                      |RUNNING|
        +------+ <--------------- +-------+                      +-------+
          |    ^   a member is lost, or                            |     |
          |    |   silent: generation + 1 (L)                      |     | all completed (L)
          |    |                                                   |     |
          |    |   all have stopped: generation + 1 (L)  +--------+ |     |
          |    +-----------------------------------------|STOPPING|<+     |
          |                                              +--------+  a failure, a signal: any member;
          | not enough in time, or nodes                     |       a node lost or new: L
          | that differ (L)                                  |            |
          |                      no restart: the oldest      v            v
          |                      cause is the job's (L)   +------------------+
          +---------------------------------------------> |      ENDED       |
                                                          +------------------+
                               all nodes unregister; the leader deletes the job's keys

With --watch, a round that failed or completed waits in ENDED (`restart`). A change of the script leads to
OPEN. A lost node, or a member that the user ends, ends the wait.

The phases of a member in one generation (`view.py`):

   IDLE --> READY --> RUNNING --> STOPPING --> STOPPED --> IDLE (the next one)
                          |                        ^
                          +---> FINISHING ---------+--> OVER

A lost leader is replaced. A member takes the lead immediately (in OPEN any node does). Another node takes it
after a whole lease without a claim by a member. The store holds everything that a new leader needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fleetrun.elastic.rendezvous.actions import (
    Accept,
    CheckAlone,
    ClaimLead,
    Close,
    Decision,
    End,
    Fail,
    Finish,
    Leave,
    Pause,
    Policy,
    Propose,
    ReadTopology,
    Register,
    Start,
    Stop,
    Unregister,
    Waiting,
    WriteReport,
    WriteRound,
)
from fleetrun.elastic.rendezvous.checking import time_of_check
from fleetrun.elastic.rendezvous.leader import lead, meeting_time
from fleetrun.elastic.rendezvous.records import Cause, CauseKind, MemberStatus, Report, Round, State, Verdict
from fleetrun.elastic.rendezvous.view import Failure, MemberState, Phase, View
from fleetrun.elastic.store import ABSENT
from fleetrun.envs.contract import NodeLoss
from fleetrun.errors import LaunchError, NotNeededError, RendezvousError, UsageError
from fleetrun.frozen import frozen
from fleetrun.pod.policy import NOTHING_SPENT

LOST_CODE = 125
SLACK = 10.0
"""Seconds after the leader's deadline until a node that received no decision gives up."""

TAKING_PART = (State.FORMING, State.RUNNING, State.STOPPING)
"""States in which a node may find itself among the members. The last two follow a disconnection."""


@frozen
class Turn:
    """The input of a node's decision, and the decision so far."""

    view: View
    own: MemberState
    policy: Policy
    now: float
    decision: Decision


def decide(view: View, own: MemberState, policy: Policy, now: float) -> Decision:
    """Return the acts that are due now. Until they are done, another call returns the same acts."""
    decision = follow(view, own, policy, now)
    over = own.phase is Phase.OVER
    if view.up and view.leads and not fenced(view, own) and over == (own.last is not None):
        more = lead(view, policy, now, over=over)
        decision.do(*more.acts)
        decision.look_at(more.until)
        decision.waiting = more.waiting or decision.waiting
    return decision


def follow(view: View, own: MemberState, policy: Policy, now: float) -> Decision:
    """Decide what every node does, including the leader: register, claim the lead, take part, stop, end."""
    decision = Decision()
    turn = Turn(view, own, policy, now, decision)
    if own.phase is Phase.OVER:
        ended = view.round is not None and view.round.state is State.ENDED
        if not (view.up and view.leads and ended and own.last is not None):
            decision.do(Close())
        return decision
    if own.last is not None:
        _end(turn, own.last)
        return decision
    if view.verdict is not None and own.phase in (Phase.IDLE, Phase.READY):
        decision.do(Fail(error_of(view.verdict)))
    elif view.foreign:
        text = f"another version of fleetrun, or another program, uses this job ID: {view.foreign}"
        decision.do(Fail(LaunchError(text)))
    else:
        _take_part(turn)
        if view.up:
            _register(turn)
            _write_report(turn)
    return decision


def error_of(verdict: Verdict) -> LaunchError:
    """Return the error that a refusal stands for."""
    kind = {2: UsageError, 124: RendezvousError}.get(verdict.code, LaunchError)
    error = kind(verdict.message, hint=verdict.hint or None)
    error.exit_code = verdict.code
    return error


# ---- Registration, lead and reports


def _register(turn: Turn) -> None:
    """Register this node, and claim the lead if it is free."""
    view, own, decision = turn.view, turn.own, turn.decision
    if fenced(view, own):
        return
    if not view.registered or "node" in own.renew:
        decision.do(Register())
        if not view.registered:
            return
    if view.leads and "leader" in own.renew:
        decision.do(ClaimLead(view.leader_revision))
    if view.leader is not None or view.leaderless_since is None:
        return
    at = view.leaderless_since if _may_lead_at_once(view, own) else view.leaderless_since + turn.policy.lease
    if turn.now >= at:
        decision.do(ClaimLead(ABSENT))
    else:
        decision.look_at(at)


def _may_lead_at_once(view: View, own: MemberState) -> bool:
    """Return True for a member of the generation, or for any node if the round has no active members."""
    round_ = view.round
    if round_ is None or round_.state in (State.OPEN, State.ENDED):
        return True
    return own.is_in(round_)


def fenced(view: View, own: MemberState) -> bool:
    """Return True if this node has processes of a generation that has ended without it."""
    return own.active and view.round is not None and not own.is_in(view.round)


def _write_report(turn: Turn) -> None:
    own, round_ = turn.own, turn.view.round
    if round_ is None or not own.is_in(round_):
        return
    report = own.report(turn.now)
    if report is not None and own.reported != (own.generation, report.done, len(report.causes)):
        turn.decision.do(WriteReport(own.generation, report))


# ---- Taking part in a generation


def _take_part(turn: Turn) -> None:
    view = turn.view
    round_ = view.round
    if view.up and round_ is None:
        _without_round(turn)
    elif view.up and round_ is not None and turn.own.phase is not Phase.IDLE:
        _continue(turn, round_)
    elif view.up and round_ is not None and round_.state in TAKING_PART:
        _accept_place(turn, round_)
    elif view.up and round_ is not None and round_.restart:
        policy = turn.policy
        there = Waiting(present=round_.size, fewest=policy.fewest, most=policy.most, spare=True)
        turn.decision.waiting = there
    give_up(turn)


def _without_round(turn: Turn) -> None:
    """Act without a round. The job has not started, it has ended without this node, or the store lost its
    data during the job.
    """
    own, decision = turn.own, turn.decision
    if turn.view.cleared:
        text = f"the job ended while {own.node.title} was disconnected, so its result is unknown"
        if own.phase is Phase.RUNNING:
            decision.do(Stop(store_lost(text), False, at_once=True))
        decision.do(Fail(LaunchError(text)))
    elif own.phase is Phase.READY:
        decision.do(Leave())
    elif own.phase is not Phase.IDLE and own.round is not None and turn.view.registered:
        decision.do(Propose(own.round, own.members, ABSENT))


def _accept_place(turn: Turn, round_: Round) -> None:
    policy, decision = turn.policy, turn.decision
    members = turn.view.members
    if members is None:
        decision.do(ReadTopology(round_.topology))
        return
    for rank, node in enumerate(members):
        if node.id == turn.own.node.id:
            decision.do(Accept(round_, rank))
            return
    if _may_wait(turn.own, policy) and round_.state is State.RUNNING:
        if policy.check != "off":
            _check_alone(turn, round_)
        there = len(members)
        decision.waiting = Waiting(present=there, fewest=policy.fewest, most=policy.most, spare=True)


def _check_alone(turn: Turn, round_: Round) -> None:
    """Check this waiting node in each generation. A bad node then makes room for another."""
    own = turn.own
    if own.checked != round_.generation:
        turn.decision.do(CheckAlone(round_))
    elif own.measured is not None and own.reported != (round_.generation, MemberStatus.READY, 0):
        found = Report(done=MemberStatus.READY, measured=own.measured)
        turn.decision.do(WriteReport(round_.generation, found))


def _may_wait(own: MemberState, policy: Policy) -> bool:
    """Return True if this node may be present without taking part."""
    return policy.spares > 0 or own.node.has_store


def _continue(turn: Turn, round_: Round) -> None:
    own, decision = turn.own, turn.decision
    if not own.is_in(round_):
        _in_other_generation(turn, round_)
    elif round_.state is State.RUNNING:
        if own.phase is Phase.READY:
            decision.do(Start(round_))
        elif own.phase is Phase.RUNNING and own.failure is not None:
            decision.do(_stop_round(turn, own.failure, round_))
    elif round_.state is State.STOPPING and own.phase in (Phase.READY, Phase.RUNNING):
        assert round_.cause is not None
        decision.do(Stop(round_.cause, round_.restart))
    elif round_.state is State.ENDED:
        _wait_for_change(turn, round_)


def _wait_for_change(turn: Turn, round_: Round) -> None:
    own, decision = turn.own, turn.decision
    if own.phase is Phase.RUNNING:
        decision.do(Stop(round_.cause, True) if round_.cause is not None else Finish())
    elif own.phase is Phase.STOPPED and not own.paused:
        decision.do(Pause(round_))
    elif own.paused and own.failure is not None:
        following = replace(round_, restart=False)
        if own.failure.restart:
            following = replace(
                following.again(),
                attempts=round_.attempts + 1,
                restarts=0,
                spent=NOTHING_SPENT,
                cause=own.failure.cause,
                code=0,
                edit=own.failure.cause.edit or round_.edit,
            )
        decision.do(WriteRound(following, turn.view.round_revision))


def _stop_round(turn: Turn, failure: Failure, round_: Round) -> WriteRound:
    cause = replace(failure.cause, age=failure.cause.age + turn.now - failure.since)
    stopping = round_.stopping(cause, restart=failure.restart, after=failure.after)
    return WriteRound(stopping, turn.view.round_revision)


def _in_other_generation(turn: Turn, round_: Round) -> None:
    """Act on a round of another generation than this node's."""
    own, decision = turn.own, turn.decision
    if own.round is not None and turn.view.rewound and not round_.topology and own.phase is not Phase.READY:
        decision.do(Propose(own.round, own.members, turn.view.round_revision))
    elif own.active and not own.killed:
        decision.do(Stop(disconnected(own), True, at_once=True))
    elif own.phase is Phase.STOPPED and (cause := _own_failure(own, round_, turn.policy)) is not None:
        decision.do(End(cause.code or 1, cause))
    elif own.phase in (Phase.READY, Phase.STOPPED):
        decision.do(Leave())


def _own_failure(own: MemberState, round_: Round, policy: Policy) -> Cause | None:
    """With --on_node_loss wait, return the failure for which this node leaves the job."""
    cause = round_.cause
    if policy.on_loss is not NodeLoss.WAIT or cause is None or cause.rank != own.rank:
        return None
    if cause.why is not CauseKind.FAILED:
        return None
    return cause if round_.state in (State.OPEN, State.FORMING) else None


def disconnected(own: MemberState) -> Cause:
    """Return the cause for a node that the job left behind while it was disconnected."""
    return Cause(
        why=CauseKind.LOST,
        node=own.node.title,
        rank=own.rank,
        headline=f"{own.node.title} was disconnected from the job, which continued without it",
        code=LOST_CODE,
    )


# ---- The end of the job


def _end(turn: Turn, last: Round) -> None:
    own, decision = turn.own, turn.decision
    if turn.view.up and turn.view.registered:
        decision.do(Unregister())
    if last.code == 0 and own.phase is Phase.IDLE and _may_wait(own, turn.policy):
        decision.do(End(0, None))
    elif last.code == 0 and own.phase in (Phase.IDLE, Phase.READY):
        decision.do(Fail(NotNeededError("the job completed before this node could join")))
    elif not own.is_in(last):
        if own.active and not own.killed:
            decision.do(Stop(disconnected(own), False, at_once=True))
        alone = Fail(NotNeededError(disconnected(own).headline))
        decision.do(alone if last.code == 0 else End(last.code, last.cause))
    elif last.code == 0:
        if own.phase is Phase.RUNNING:
            decision.do(Finish())
        elif own.phase is not Phase.FINISHING:
            decision.do(End(0, None))
    else:
        if own.phase is Phase.RUNNING:
            assert last.cause is not None
            decision.do(Stop(last.cause, False))
        decision.do(End(last.code, last.cause))


# ---- Giving up when neither the store nor the leader answers


def give_up(turn: Turn) -> None:
    """End this node without the others, at the latest when their answer is overdue."""
    own, policy = turn.own, turn.policy
    if own.phase in (Phase.IDLE, Phase.READY):
        _give_up_meeting(turn)
    elif own.failure is not None and own.phase is Phase.RUNNING:
        _at(turn, own.failure.since + _time_alone(policy), lambda: _end_alone(own))
    elif own.down_since is not None and own.phase is Phase.STOPPED:
        restart = own.round is not None and own.round.restart
        limit = policy.rdzv_timeout if restart else _time_alone(policy)
        since = max(own.down_since, own.stopped_since)
        _at(turn, since + limit, lambda: _end_alone(own))
    elif own.down_since is not None and own.phase is Phase.RUNNING and own.completed:
        since = max(own.down_since, own.completed_since)
        limit = max(2 * policy.reform_timeout, policy.lease)
        _at(turn, since + limit, lambda: _end_unknown(own))


def _time_alone(policy: Policy) -> float:
    """Return the seconds that a node with something to report waits for a silent store."""
    return min(policy.lease, 5.0)


def _give_up_meeting(turn: Turn) -> None:
    view, own, policy = turn.view, turn.own, turn.policy
    if not own.was_up:
        _at(turn, own.joined + policy.rdzv_timeout, lambda: [Fail(_never_reached(own, policy))])
    elif own.down_since is not None:
        _at(turn, own.down_since + policy.rdzv_timeout, lambda: [Fail(_not_back(own, policy))])
    elif view.round is None or view.round.state in (State.OPEN, State.FORMING):
        limit = meeting_time(view.round, policy)
        deadline = view.unformed_since + limit
        checks = time_of_check(view.round, policy) if view.round is not None else 0.0
        error = RendezvousError(f"the nodes did not join within {limit:g} s")
        _at(turn, deadline + checks + 3 * policy.lease + SLACK, lambda: [Fail(error)])
        if (census := view.census_of_round) is not None:
            turn.decision.waiting = Waiting(
                present=census.present,
                fewest=policy.fewest,
                most=policy.most,
                missing=census.missing,
                left=max(0.0, deadline - turn.now),
            )


def _at(turn: Turn, when: float, acts: Callable[[], Sequence[Stop | End | Fail]]) -> None:
    """Decide on these acts when they are due. They are not made earlier."""
    if turn.now >= when:
        turn.decision.do(*acts())
    else:
        turn.decision.look_at(when)


def _never_reached(own: MemberState, policy: Policy) -> RendezvousError:
    where = f" {policy.endpoint}" if policy.endpoint else ""
    why = f": {own.why_down.removeprefix(policy.endpoint + ': ')}" if own.why_down else ""
    return RendezvousError(
        f"cannot reach the rendezvous store{where} within {policy.rdzv_timeout:g} s{why}",
        hint="Start the node that --master names, or check the address and the network.",
    )


def _not_back(own: MemberState, policy: Policy) -> RendezvousError:
    return RendezvousError(
        f"the rendezvous store did not come back within {policy.rdzv_timeout:g} s: {own.why_down}"
    )


def _end_alone(own: MemberState) -> Sequence[Stop | End]:
    cause = own.failure.cause if own.failure is not None else own.stop_cause
    reported = (CauseKind.FAILED, CauseKind.TIMEOUT)
    if cause is None or (cause.why not in reported and left_for_good(own) is None):
        cause = store_lost(f"the rendezvous store did not come back: {own.why_down}")
    end = End(cause.code or 1, cause)
    return (Stop(cause, False), end) if own.phase is Phase.RUNNING else (end,)


def _end_unknown(own: MemberState) -> Sequence[Stop | Fail]:
    text = f"the rendezvous store is lost ({own.why_down}), so the ends of the other nodes are unknown"
    return Stop(store_lost(text), False), Fail(LaunchError(text))


def left_for_good(own: MemberState) -> Cause | None:
    """Return the cause if this node learned that a node left whose leaving ends the job. The departed node
    may have hosted the store.
    """
    round_, cause = own.round, own.stop_cause
    if own.phase not in (Phase.STOPPING, Phase.STOPPED) or round_ is None or cause is None:
        return None
    ends = round_.state is State.STOPPING and not round_.restart
    return cause if ends and cause.why is CauseKind.LEFT else None


def store_lost(text: str) -> Cause:
    """Return the cause for a lost store. This node cannot attribute the loss to another node."""
    return Cause(why=CauseKind.LOST, node="", headline=text, code=LOST_CODE)
