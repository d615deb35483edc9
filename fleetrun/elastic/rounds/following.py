"""What every node does next, the leader too: register, claim the lead, take part, stop, end. Pure: a view,
the node's own part and the time in, acts and the time of the next look out.
"""

from __future__ import annotations

from dataclasses import replace

from fleetrun.elastic.rounds.acts import (
    Claim,
    Close,
    Decision,
    End,
    Fail,
    Finish,
    Form,
    Learn,
    Move,
    Ready,
    Register,
    Rest,
    Start,
    Stop,
    Tell,
    Unregister,
)  # fmt: skip
from fleetrun.elastic.rounds.alone import REFUSED, give_up, gone
from fleetrun.elastic.rounds.part import Part, Phase
from fleetrun.elastic.rounds.policy import Policy
from fleetrun.elastic.rounds.records import Cause, Round, State, Verdict, Why
from fleetrun.elastic.rounds.view import View
from fleetrun.elastic.stores.store import ABSENT
from fleetrun.errors import LaunchError, RendezvousError, UsageError

TAKING_PART = (State.FORMING, State.RUNNING, State.STOPPING)
"""Where a node may find itself among the members; in the last two it was away while they began."""


def follow(view: View, part: Part, policy: Policy, now: float) -> Decision:
    decision = Decision()
    if part.phase is Phase.OVER:
        ended = view.round is not None and view.round.state is State.ENDED
        if not (view.up and view.leads and ended and part.last is not None):
            decision.do(Close())
        return decision
    if part.last is not None:
        _end(view, part, part.last, decision)
        return decision
    if view.verdict is not None and part.phase in (Phase.IDLE, Phase.READY):
        decision.do(Fail(error_of(view.verdict)))
    elif view.foreign:
        decision.do(Fail(LaunchError(_foreign(view))))
    else:
        _take_part(view, part, policy, now, decision)
        if view.up:
            _stand(view, part, policy, now, decision)
            _tell(view, part, now, decision)
    return decision


def error_of(verdict: Verdict) -> LaunchError:
    kind = {2: UsageError, 124: RendezvousError}.get(verdict.code, LaunchError)
    error = kind(verdict.message, hint=verdict.hint or None)
    error.exit_code = verdict.code
    return error


def _foreign(view: View) -> str:
    return f"another version of fleetrun, or another program, uses this job id: {view.foreign}"


# ---- to be there


def _stand(view: View, part: Part, policy: Policy, now: float, decision: Decision) -> None:
    """Be registered, and lead when nobody does."""
    if fenced(view, part):
        return
    if not view.registered or "node" in part.renew:
        decision.do(Register())
        if not view.registered:
            return
    if view.leads and "leader" in part.renew:
        decision.do(Claim(view.leader_revision))
    if view.leader is not None or view.leaderless_since is None:
        return
    at = view.leaderless_since if _may_lead_at_once(view, part) else view.leaderless_since + policy.lease
    if now >= at:
        decision.do(Claim(ABSENT))
    else:
        decision.look_at(at)


def _may_lead_at_once(view: View, part: Part) -> bool:
    """Members of a generation have the lead in it; a stranger takes it when none of them can be left."""
    round_ = view.round
    if round_ is None or round_.state in (State.OPEN, State.ENDED):
        return True
    return part.is_in(round_)


def fenced(view: View, part: Part) -> bool:
    """This node has processes of a generation that went on without it."""
    return part.active and view.round is not None and not part.is_in(view.round)


def _tell(view: View, part: Part, now: float, decision: Decision) -> None:
    if view.round is None or not part.is_in(view.round):
        return
    report = part.report(now)
    if report is not None and part.told != (part.generation, report.done, len(report.causes)):
        decision.do(Tell(part.generation, report))


# ---- to take part


def _take_part(view: View, part: Part, policy: Policy, now: float, decision: Decision) -> None:
    round_ = view.round
    if view.up and round_ is None:
        _nothing_there(view, part, decision)
    elif view.up and round_ is not None and part.phase is not Phase.IDLE:
        _go_on(view, part, round_, policy, now, decision)
    elif view.up and round_ is not None and round_.state in TAKING_PART:
        _look_for_me(view, part, round_, decision)
    give_up(view, part, policy, now, decision)


def _nothing_there(view: View, part: Part, decision: Decision) -> None:
    """No round: this is the beginning, or the job has ended without this node, or the store has lost its
    data under a running job.
    """
    if view.cleared:
        text = f"the job ended while {part.node.title} was cut off; how is not known here"
        if part.phase is Phase.RUNNING:
            decision.do(Stop(gone(text), False))
        decision.do(Fail(LaunchError(text)))
    elif part.phase is Phase.READY:
        decision.do(Rest())
    elif part.phase is not Phase.IDLE and part.round is not None and view.registered:
        decision.do(Form(part.round, part.members, ABSENT))


def _look_for_me(view: View, part: Part, round_: Round, decision: Decision) -> None:
    members = view.members
    if members is None:
        decision.do(Learn(round_.topology))
        return
    for rank, node in enumerate(members):
        if node.id == part.node.id:
            decision.do(Ready(round_, rank))


def _go_on(view: View, part: Part, round_: Round, policy: Policy, now: float, decision: Decision) -> None:
    if not part.is_in(round_):
        _left_behind(view, part, round_, policy, decision)
    elif round_.state is State.RUNNING:
        if part.phase is Phase.READY:
            decision.do(Start(round_))
        elif part.phase is Phase.RUNNING and part.failure is not None:
            decision.do(_stop_all(view, part, round_, now))
    elif round_.state is State.STOPPING and part.phase in (Phase.READY, Phase.RUNNING):
        assert round_.cause is not None
        decision.do(Stop(round_.cause, round_.restart))


def _stop_all(view: View, part: Part, round_: Round, now: float) -> Move:
    failure = part.failure
    assert failure is not None
    cause = replace(failure.cause, age=failure.cause.age + now - failure.since)
    stopping = round_.stopping(cause, restart=failure.restart, after=failure.after)
    return Move(stopping, view.round_revision)


def _left_behind(view: View, part: Part, round_: Round, policy: Policy, decision: Decision) -> None:
    """The round is in another generation than this node."""
    if part.round is not None and view.rewound and not round_.topology and part.phase is not Phase.READY:
        decision.do(Form(part.round, part.members, view.round_revision))
    elif part.phase is Phase.RUNNING:
        decision.do(Stop(cut_off(part), True))
    elif part.phase is Phase.STOPPED and (cause := _my_failure(part, round_, policy)) is not None:
        decision.do(End(cause.code or 1, cause))
    elif part.phase in (Phase.READY, Phase.STOPPED):
        decision.do(Rest())


def _my_failure(part: Part, round_: Round, policy: Policy) -> Cause | None:
    """With --elastic_level 0: what this node leaves for."""
    cause = round_.cause
    if policy.level != 0 or cause is None or cause.why is not Why.FAILED or cause.rank != part.rank:
        return None
    return cause if round_.state in (State.OPEN, State.FORMING) else None


def cut_off(part: Part) -> Cause:
    return Cause(
        why=Why.LOST,
        node=part.node.title,
        rank=part.rank,
        headline=f"{part.node.title} was cut off from the job, which went on without it",
        code=REFUSED,
    )


# ---- the end


def _end(view: View, part: Part, last: Round, decision: Decision) -> None:
    if view.up and view.registered:
        decision.do(Unregister())
    if last.code == 0 and part.phase in (Phase.IDLE, Phase.READY):
        decision.do(Fail(LaunchError("the job completed before this node could take part in it")))
    elif last.code == 0 and not part.is_in(last):
        if part.phase is Phase.RUNNING:
            decision.do(Stop(cut_off(part), False))
        decision.do(Fail(LaunchError(cut_off(part).headline)))
    elif last.code == 0:
        if part.phase is Phase.RUNNING:
            decision.do(Finish())
        elif part.phase is not Phase.FINISHING:
            decision.do(End(0, None))
    else:
        if part.phase is Phase.RUNNING:
            assert last.cause is not None
            decision.do(Stop(last.cause, False))
        decision.do(End(last.code, last.cause))
