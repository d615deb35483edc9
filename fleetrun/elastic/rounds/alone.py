"""Patience: where nobody answers, a node ends by itself. Pure."""

from __future__ import annotations

from fleetrun.elastic.rounds.acts import Decision, End, Fail, Stop
from fleetrun.elastic.rounds.leading import patience
from fleetrun.elastic.rounds.part import Part, Phase
from fleetrun.elastic.rounds.policy import Policy, Waiting
from fleetrun.elastic.rounds.records import Cause, State, Why
from fleetrun.elastic.rounds.view import View
from fleetrun.errors import LaunchError, RendezvousError

REFUSED = 125
SLACK = 10.0
"""How long after its deadline a leader may still speak before a node gives up by itself."""


def give_up(view: View, part: Part, policy: Policy, now: float, decision: Decision) -> None:
    """Where nobody answers, a node ends by itself."""
    if part.phase in (Phase.IDLE, Phase.READY):
        _give_up_meeting(view, part, policy, now, decision)
    elif part.failure is not None and part.phase is Phase.RUNNING:
        _at(part.failure.since + _blind(policy), now, decision, *_fail_alone(part))
    elif part.down_since is not None and part.phase is Phase.STOPPED:
        restart = part.round is not None and part.round.restart
        limit = policy.rdzv_timeout if restart else _blind(policy)
        since = max(part.down_since, part.stopped_since)
        _at(since + limit, now, decision, *_fail_alone(part))
    elif part.down_since is not None and part.phase is Phase.RUNNING and part.completed:
        text = f"the meeting point is gone ({part.why_down}): how the other nodes ended is not known"
        since = max(part.down_since, part.completed_since)
        stop = Stop(gone(text), False)
        _at(
            since + max(2 * policy.reform_timeout, policy.lease), now, decision, stop, Fail(LaunchError(text))
        )


def _blind(policy: Policy) -> float:
    return min(policy.lease, 5.0)


def left_for_good(part: Part) -> Cause | None:
    """Why a node left with which the job ends, if this one was told so. It may have been the store's."""
    round_, cause = part.round, part.stop_cause
    if part.phase not in (Phase.STOPPING, Phase.STOPPED) or round_ is None or cause is None:
        return None
    ends = round_.state is State.STOPPING and not round_.restart
    return cause if ends and cause.why is Why.LEFT else None


def _fail_alone(part: Part) -> tuple[Stop, End] | tuple[End]:
    cause = part.failure.cause if part.failure is not None else part.stop_cause
    if cause is None or (cause.why not in (Why.FAILED, Why.TIMEOUT) and left_for_good(part) is None):
        cause = gone(f"the meeting point did not come back: {part.why_down}")
    end = End(cause.code or 1, cause)
    return (Stop(cause, False), end) if part.phase is Phase.RUNNING else (end,)


def gone(text: str) -> Cause:
    """The store is: no node of the job's is to blame, as far as this one can tell."""
    return Cause(why=Why.LOST, node="", headline=text, code=REFUSED)


def _give_up_meeting(view: View, part: Part, policy: Policy, now: float, decision: Decision) -> None:
    if not part.was_up:
        where = f" {policy.endpoint}" if policy.endpoint else ""
        why = f": {part.why_down.removeprefix(policy.endpoint + ': ')}" if part.why_down else ""
        text = f"the meeting point{where} was not reached within {policy.rdzv_timeout:g} s{why}"
        hint = "Start the node that --master names, or check the address and the network."
        _at(part.joined + policy.rdzv_timeout, now, decision, Fail(RendezvousError(text, hint=hint)))
        return
    limit = patience(view.round, policy)
    if part.down_since is not None:
        text = f"the meeting point did not come back within {policy.rdzv_timeout:g} s: {part.why_down}"
        _at(part.down_since + policy.rdzv_timeout, now, decision, Fail(RendezvousError(text)))
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
