"""Evaluate a check on the leader. Decide whether another turn follows, and which nodes both turns exclude.
Pure; `checks.py` evaluates one turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fleetrun.aliases import Texts
from fleetrun.elastic.rendezvous.actions import Decision, Policy
from fleetrun.elastic.rendezvous.admission import known_faults
from fleetrun.elastic.rendezvous.checks import (
    MARGIN,
    NO_CHECK,
    SECONDS,
    Check,
    Measured,
    alone,
    digest,
    left_over,
    overdue,
    suspects,
    time_allowed,
    usual_speed,
)
from fleetrun.elastic.rendezvous.records import Node, Round
from fleetrun.elastic.rendezvous.view import Situation, View
from fleetrun.record.faults import MachineFault, merged


def time_of_check(round_: Round, policy: Policy) -> float:
    """Return the seconds that a turn may take before this round's nodes are ready."""
    return SECONDS[policy.check] + MARGIN if round_.check.turn and policy.check in SECONDS else 0.0


def next_check(check: Check, members: Sequence[Node], policy: Policy) -> Check:
    """Return the check that these nodes must pass before they are ready."""
    ids = [node.id for node in members]
    if policy.check == "off" or check.done == digest(ids):
        return replace(NO_CHECK, done=check.done)
    suspected = set(check.suspects).intersection(ids)
    if suspected and suspected != set(ids):
        return replace(check, turn=2)
    return Check(turn=1, done=check.done)


def _found(view: View, members: Sequence[Node]) -> dict[int, Measured]:
    """Return the results of the members by rank."""
    reports = ((rank, view.reports.get(node.id)) for rank, node in enumerate(members))
    measurements = ((rank, each.report.measured) for rank, each in reports if each is not None)
    return {rank: measured for rank, measured in measurements if measured is not None}


def unanswered(job: Situation, decision: Decision) -> Round | None:
    """Return the next round if some members take much longer to answer than the others. Otherwise return
    None.
    """
    view = job.view
    ids = [node.id for node in job.members]
    missing, seconds = overdue(ids, _found(view, job.members), job.round.check, job.policy.check)
    if not missing:
        return None
    late = max(view.round_since, view.led_since, view.whole_since) + seconds
    if job.now < late:
        decision.look_at(late)
        return None
    why = f"the node did not answer the check within {seconds:.1f} s"
    return checked(job, dict.fromkeys(missing, why))


def checked(job: Situation, missing: Mapping[int, str] | None = None) -> Round | None:
    """Return the round that follows a turn with a problem. Return None without a problem, or if its node is
    unknown.

    `missing` holds the reasons for overdue nodes.
    """
    round_, members = job.round, job.members
    ids, check = [node.id for node in members], round_.check
    found = _found(job.view, members)
    wrong = suspects(ids, found, check, missing)
    if len(wrong) == len(ids):  # two nodes, and the link between them
        wrong = alone(found)
    rest = left_over(ids, check.suspects)
    if not wrong and rest:
        return replace(round_.again(), check=replace(check, turn=0, suspects=rest))
    if not wrong or len(wrong) == len(ids):
        return None
    if check.turn == 1:
        suspected, within = tuple(ids[rank] for rank in wrong), time_allowed(found, job.policy.check)
        next_turn = Check(suspects=suspected, usual=usual_speed(found), within=within, done=check.done)
        return replace(round_.again(), check=next_turn)
    bad = {members[rank].known_as: why for rank, why in wrong.items()}
    return replace(
        noted(round_.again(), bad, job.view.epoch + job.now, job.policy), check=Check(done=digest(ids))
    )


def noted(round_: Round, bad: Texts, time: float, policy: Policy) -> Round:
    """Return the round with faults for the results of both turns of a check, by node."""
    # Enough faults to exclude each node that both turns have found.
    turns = enumerate([1] * (max(2, policy.exclude_after) - 1) + [2], 1)
    faults = [
        MachineFault(round(time + number / 10, 1), machine, f"check {turn} of 2: {why}")
        for number, turn in turns
        for machine, why in bad.items()
    ]
    worked = {machine: seconds for machine, seconds in round_.worked.items() if machine not in bad}
    return replace(round_, faults=merged(round_.faults, faults), worked=worked)


def bad_spares(job: Situation) -> dict[str, str]:
    """Return the problems that the checks of waiting nodes have found and the round does not have yet, by
    node.
    """
    view, members = job.view, job.members
    known = {node.id for node in members}
    waiting = [candidate for id_, candidate in view.nodes.items() if id_ not in known and id_ in view.reports]
    found = _found(view, [*members, *(candidate.node for candidate in waiting)])
    wrong = alone(found)
    faults = known_faults(view)
    return {
        candidate.node.known_as: wrong[rank]
        for rank, candidate in enumerate(waiting, len(members))
        if rank in wrong
        and not any(
            each.node == candidate.node.known_as and each.time > view.epoch + candidate.since
            for each in faults
        )
    }
