"""The rendezvous: what a node does next, from what it knows. Pure; `membership.py` carries it out.

The life of a round. Each step is one compare-and-set of `state/round`; the leader's steps are marked L.

                 enough nodes (L)          all have read it (L)
        +------+ ---------------> +-------+ -------------------> +-------+
   ---> | OPEN |                  |FORMING|                      |RUNNING|
        +------+ <--------------- +-------+                      +-------+
         |    ^   a member is gone, or                            |     |
         |    |   silent: generation + 1 (L)                      |     | all completed (L)
         |    |                                                   |     |
         |    |   all have stopped: generation + 1 (L)  +--------+ |     |
         |    +-----------------------------------------|STOPPING|<+     |
         |                                              +--------+  a failure, a signal: any member;
         | not enough in time, or nodes                     |       a node lost or come: L
         | that differ (L)                                  |            |
         |                      no restart: the oldest      v            v
         |                      cause is the job's (L)   +------------------+
         +---------------------------------------------> |      ENDED       |
                                                         +------------------+
                              everybody unregisters; the leader deletes what is left of the job

Of a member, in one generation (`own.py`):

   IDLE --> READY --> RUNNING --> STOPPING --> STOPPED --> IDLE (the next one)
                         |                        ^
                         +---> FINISHING ---------+--> OVER

A leader that goes is replaced: by a member at once (in OPEN by anybody), by a stranger when nobody else has
come forward for as long as a lease lasts. All that a new leader needs stands in the store.
"""

from __future__ import annotations

from dataclasses import replace

from fleetrun.elastic.rendezvous.actions import (
    Claim,
    Close,
    Decision,
    End,
    Fail,
    Finish,
    Form,
    Learn,
    Move,
    Policy,
    Ready,
    Register,
    Rest,
    Start,
    Stop,
    Tell,
    Unregister,
    Waiting,
)
from fleetrun.elastic.rendezvous.leader import lead, patience
from fleetrun.elastic.rendezvous.records import Cause, Round, State, Verdict, Why
from fleetrun.elastic.rendezvous.view import MemberState, Phase, View
from fleetrun.elastic.store import ABSENT
from fleetrun.errors import LaunchError, RendezvousError, UsageError

# ---- A node ends by itself when nothing answers

REFUSED = 125
SLACK = 10.0
"""How long after its deadline a leader may still speak before a node gives up by itself."""


def give_up(view: View, own: MemberState, policy: Policy, now: float, decision: Decision) -> None:
    """Where nobody answers, a node ends by itself."""
    if own.phase in (Phase.IDLE, Phase.READY):
        _give_up_meeting(view, own, policy, now, decision)
    elif own.failure is not None and own.phase is Phase.RUNNING:
        _at(own.failure.since + _blind(policy), now, decision, *_fail_alone(own))
    elif own.down_since is not None and own.phase is Phase.STOPPED:
        restart = own.round is not None and own.round.restart
        limit = policy.rdzv_timeout if restart else _blind(policy)
        since = max(own.down_since, own.stopped_since)
        _at(since + limit, now, decision, *_fail_alone(own))
    elif own.down_since is not None and own.phase is Phase.RUNNING and own.completed:
        text = f"the meeting point is gone ({own.why_down}): how the other nodes ended is not known"
        since = max(own.down_since, own.completed_since)
        stop = Stop(gone(text), False)
        _at(
            since + max(2 * policy.reform_timeout, policy.lease), now, decision, stop, Fail(LaunchError(text))
        )


def _blind(policy: Policy) -> float:
    return min(policy.lease, 5.0)


def left_for_good(own: MemberState) -> Cause | None:
    """Why a node left with which the job ends, if this one was told so. It may have been the store's."""
    round_, cause = own.round, own.stop_cause
    if own.phase not in (Phase.STOPPING, Phase.STOPPED) or round_ is None or cause is None:
        return None
    ends = round_.state is State.STOPPING and not round_.restart
    return cause if ends and cause.why is Why.LEFT else None


def _fail_alone(own: MemberState) -> tuple[Stop, End] | tuple[End]:
    cause = own.failure.cause if own.failure is not None else own.stop_cause
    if cause is None or (cause.why not in (Why.FAILED, Why.TIMEOUT) and left_for_good(own) is None):
        cause = gone(f"the meeting point did not come back: {own.why_down}")
    end = End(cause.code or 1, cause)
    return (Stop(cause, False), end) if own.phase is Phase.RUNNING else (end,)


def gone(text: str) -> Cause:
    """The store is: no node of the job's is to blame, as far as this one can tell."""
    return Cause(why=Why.LOST, node="", headline=text, code=REFUSED)


def _give_up_meeting(view: View, own: MemberState, policy: Policy, now: float, decision: Decision) -> None:
    if not own.was_up:
        where = f" {policy.endpoint}" if policy.endpoint else ""
        why = f": {own.why_down.removeprefix(policy.endpoint + ': ')}" if own.why_down else ""
        text = f"the meeting point{where} was not reached within {policy.rdzv_timeout:g} s{why}"
        hint = "Start the node that --master names, or check the address and the network."
        _at(own.joined + policy.rdzv_timeout, now, decision, Fail(RendezvousError(text, hint=hint)))
        return
    limit = patience(view.round, policy)
    if own.down_since is not None:
        text = f"the meeting point did not come back within {policy.rdzv_timeout:g} s: {own.why_down}"
        _at(own.down_since + policy.rdzv_timeout, now, decision, Fail(RendezvousError(text)))
    elif view.round is None or view.round.state in (State.OPEN, State.FORMING):
        deadline = view.unformed_since + limit
        patient = deadline + 3 * policy.lease + SLACK
        _at(patient, now, decision, Fail(RendezvousError(f"the nodes did not meet within {limit:g} s")))
        if view.census is not None:
            decision.waiting = Waiting(
                present=view.census.present,
                fewest=policy.fewest,
                most=policy.most,
                missing=view.census.missing,
                left=max(0.0, deadline - now),
            )


def _at(when: float, now: float, decision: Decision, *acts: Stop | End | Fail) -> None:
    if now >= when:
        decision.do(*acts)
    else:
        decision.look_at(when)


# ---- The next step of every node, the leader too: register, claim the lead, take part, stop, end

TAKING_PART = (State.FORMING, State.RUNNING, State.STOPPING)
"""Where a node may find itself among the members; in the last two it was away while they began."""


def follow(view: View, own: MemberState, policy: Policy, now: float) -> Decision:
    decision = Decision()
    if own.phase is Phase.OVER:
        ended = view.round is not None and view.round.state is State.ENDED
        if not (view.up and view.leads and ended and own.last is not None):
            decision.do(Close())
        return decision
    if own.last is not None:
        _end(view, own, own.last, decision)
        return decision
    if view.verdict is not None and own.phase in (Phase.IDLE, Phase.READY):
        decision.do(Fail(error_of(view.verdict)))
    elif view.foreign:
        decision.do(Fail(LaunchError(_foreign(view))))
    else:
        _take_part(view, own, policy, now, decision)
        if view.up:
            _stand(view, own, policy, now, decision)
            _tell(view, own, now, decision)
    return decision


def error_of(verdict: Verdict) -> LaunchError:
    kind = {2: UsageError, 124: RendezvousError}.get(verdict.code, LaunchError)
    error = kind(verdict.message, hint=verdict.hint or None)
    error.exit_code = verdict.code
    return error


def _foreign(view: View) -> str:
    return f"another version of fleetrun, or another program, uses this job id: {view.foreign}"


# ---- register


def _stand(view: View, own: MemberState, policy: Policy, now: float, decision: Decision) -> None:
    """Be registered, and lead when nobody does."""
    if fenced(view, own):
        return
    if not view.registered or "node" in own.renew:
        decision.do(Register())
        if not view.registered:
            return
    if view.leads and "leader" in own.renew:
        decision.do(Claim(view.leader_revision))
    if view.leader is not None or view.leaderless_since is None:
        return
    at = view.leaderless_since if _may_lead_at_once(view, own) else view.leaderless_since + policy.lease
    if now >= at:
        decision.do(Claim(ABSENT))
    else:
        decision.look_at(at)


def _may_lead_at_once(view: View, own: MemberState) -> bool:
    """Members of a generation have the lead in it; a stranger takes it when none of them can be left."""
    round_ = view.round
    if round_ is None or round_.state in (State.OPEN, State.ENDED):
        return True
    return own.is_in(round_)


def fenced(view: View, own: MemberState) -> bool:
    """This node has processes of a generation that went on without it."""
    return own.active and view.round is not None and not own.is_in(view.round)


def _tell(view: View, own: MemberState, now: float, decision: Decision) -> None:
    if view.round is None or not own.is_in(view.round):
        return
    report = own.report(now)
    if report is not None and own.told != (own.generation, report.done, len(report.causes)):
        decision.do(Tell(own.generation, report))


# ---- to take part


def _take_part(view: View, own: MemberState, policy: Policy, now: float, decision: Decision) -> None:
    round_ = view.round
    if view.up and round_ is None:
        _nothing_there(view, own, decision)
    elif view.up and round_ is not None and own.phase is not Phase.IDLE:
        _go_on(view, own, round_, policy, now, decision)
    elif view.up and round_ is not None and round_.state in TAKING_PART:
        _look_for_me(view, own, round_, decision)
    give_up(view, own, policy, now, decision)


def _nothing_there(view: View, own: MemberState, decision: Decision) -> None:
    """No round: this is the beginning, or the job has ended without this node, or the store has lost its
    data under a running job.
    """
    if view.cleared:
        text = f"the job ended while {own.node.title} was cut off; how is not known here"
        if own.phase is Phase.RUNNING:
            decision.do(Stop(gone(text), False))
        decision.do(Fail(LaunchError(text)))
    elif own.phase is Phase.READY:
        decision.do(Rest())
    elif own.phase is not Phase.IDLE and own.round is not None and view.registered:
        decision.do(Form(own.round, own.members, ABSENT))


def _look_for_me(view: View, own: MemberState, round_: Round, decision: Decision) -> None:
    members = view.members
    if members is None:
        decision.do(Learn(round_.topology))
        return
    for rank, node in enumerate(members):
        if node.id == own.node.id:
            decision.do(Ready(round_, rank))


def _go_on(
    view: View, own: MemberState, round_: Round, policy: Policy, now: float, decision: Decision
) -> None:
    if not own.is_in(round_):
        _left_behind(view, own, round_, policy, decision)
    elif round_.state is State.RUNNING:
        if own.phase is Phase.READY:
            decision.do(Start(round_))
        elif own.phase is Phase.RUNNING and own.failure is not None:
            decision.do(_stop_all(view, own, round_, now))
    elif round_.state is State.STOPPING and own.phase in (Phase.READY, Phase.RUNNING):
        assert round_.cause is not None
        decision.do(Stop(round_.cause, round_.restart))


def _stop_all(view: View, own: MemberState, round_: Round, now: float) -> Move:
    failure = own.failure
    assert failure is not None
    cause = replace(failure.cause, age=failure.cause.age + now - failure.since)
    stopping = round_.stopping(cause, restart=failure.restart, after=failure.after)
    return Move(stopping, view.round_revision)


def _left_behind(view: View, own: MemberState, round_: Round, policy: Policy, decision: Decision) -> None:
    """The round is in another generation than this node."""
    if own.round is not None and view.rewound and not round_.topology and own.phase is not Phase.READY:
        decision.do(Form(own.round, own.members, view.round_revision))
    elif own.phase is Phase.RUNNING:
        decision.do(Stop(cut_off(own), True))
    elif own.phase is Phase.STOPPED and (cause := _my_failure(own, round_, policy)) is not None:
        decision.do(End(cause.code or 1, cause))
    elif own.phase in (Phase.READY, Phase.STOPPED):
        decision.do(Rest())


def _my_failure(own: MemberState, round_: Round, policy: Policy) -> Cause | None:
    """With --elastic_level 0: what this node leaves for."""
    cause = round_.cause
    if policy.level != 0 or cause is None or cause.why is not Why.FAILED or cause.rank != own.rank:
        return None
    return cause if round_.state in (State.OPEN, State.FORMING) else None


def cut_off(own: MemberState) -> Cause:
    return Cause(
        why=Why.LOST,
        node=own.node.title,
        rank=own.rank,
        headline=f"{own.node.title} was cut off from the job, which went on without it",
        code=REFUSED,
    )


# ---- the end


def _end(view: View, own: MemberState, last: Round, decision: Decision) -> None:
    if view.up and view.registered:
        decision.do(Unregister())
    if last.code == 0 and own.phase in (Phase.IDLE, Phase.READY):
        decision.do(Fail(LaunchError("the job completed before this node could take part in it")))
    elif last.code == 0 and not own.is_in(last):
        if own.phase is Phase.RUNNING:
            decision.do(Stop(cut_off(own), False))
        decision.do(Fail(LaunchError(cut_off(own).headline)))
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


def decide(view: View, own: MemberState, policy: Policy, now: float) -> Decision:
    """What is due now. Asking again before it is done gives the same."""
    decision = follow(view, own, policy, now)
    over = own.phase is Phase.OVER
    if view.up and view.leads and not fenced(view, own) and over == (own.last is not None):
        more = lead(view, policy, now, over=over)
        decision.do(*more.acts)
        decision.look_at(more.until)
        decision.waiting = more.waiting or decision.waiting
    return decision
