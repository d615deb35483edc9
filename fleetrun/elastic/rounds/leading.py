"""What the leader of a round does next. Pure: a view and the time in, acts and the time of the next look out.
Who leads, and what every other node does, is `following.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fleetrun.elastic.rounds.acts import Clean, Count, Decision, Drop, Form, Learn, Move, Refuse
from fleetrun.elastic.rounds.admission import admit, full
from fleetrun.elastic.rounds.ordering import choose
from fleetrun.elastic.rounds.policy import REFORM_QUIET, Policy, Waiting
from fleetrun.elastic.rounds.records import Cause, Census, Done, Node, Round, State, Why
from fleetrun.elastic.rounds.stopping import after_stop, gone_at, lost, may_go
from fleetrun.elastic.rounds.view import Came, View
from fleetrun.elastic.stores.store import ABSENT

TIMEOUT_CODE = 124
ROOM = 0.005
"""Seconds of patience for each member that has to read a topology of so many."""
CENSUS_EVERY = 2.0
LEAVE = 2.0
"""How long the leader waits at least for the others to see the end."""


def lead(view: View, policy: Policy, now: float, *, over: bool) -> Decision:
    """`over`: this node has seen the job's end, which is not one from before its time."""
    round_ = view.round
    if round_ is None:
        return _only(Move(Round(generation=1, state=State.OPEN), ABSENT)) if not over else Decision()
    if round_.state is State.ENDED:
        return _clean(view, policy, now) if over else _only(Move(_afresh(round_), view.round_revision))
    members = view.members
    if members is None:
        return _only(Learn(round_.topology))
    if round_.state is State.OPEN:
        return _open(view, round_, members, policy, now)
    if not any(node.id in view.nodes for node in members):
        return _abandoned(view, round_, members, policy, now)
    if round_.state is State.FORMING:
        return _forming(view, round_, members, policy, now)
    if round_.state is State.RUNNING:
        return _running(view, round_, members, policy, now)
    return after_stop(view, members, policy, now)


def _only(*acts: Move | Learn) -> Decision:
    return Decision(list(acts))


def _afresh(round_: Round) -> Round:
    """A new job where an old one has left its round."""
    return Round(generation=round_.generation + 1, state=State.OPEN)


def _again(round_: Round) -> Round:
    """What was proposed did not come about."""
    return replace(round_, generation=round_.generation + 1, state=State.OPEN, size=0, after=0.0)


def _abandoned(view: View, round_: Round, members: Sequence[Node], policy: Policy, now: float) -> Decision:
    """No member is left: what stands here is of an old job, or of one whose nodes are all cut off."""
    gone = max((view.lost_at(node.id, policy.lease) or now for node in members), default=now)
    if now < gone:
        return Decision(until=gone)
    return _only(Move(_afresh(round_), view.round_revision))


# ---- open


def _open(view: View, round_: Round, members: Sequence[Node], policy: Policy, now: float) -> Decision:
    admission = admit(view, policy, now)
    decision = Decision(list(admission.refused), admission.until)
    if admission.conflict is not None:
        decision.do(_ended(view, round_, admission.conflict))
        return decision
    nodes = [came for came in admission.eligible if came.node.id != _not_again(round_, members, policy)]
    deadline = view.unformed_since + patience(round_, policy)
    form_at = _form_at(view, round_, members, nodes, deadline, policy)
    if form_at <= now < deadline + 2 * policy.lease:  # past that, what is proposed never comes about
        decision.do(_form(view, round_, members, nodes, policy))
    elif now >= deadline:
        decision.do(_ended(view, round_, _timeout(round_, members, nodes, policy)))
    else:
        decision.look_at(min(form_at, deadline))
        missing = who_is_missing(members, nodes, policy)
        decision.waiting = Waiting(
            present=len(nodes),
            fewest=policy.fewest,
            most=policy.most,
            missing=missing,
            left=min(form_at, deadline) - now,
        )
        _count(view, decision, Census(present=len(nodes), missing=missing), now)
    return decision


def patience(round_: Round | None, policy: Policy) -> float:
    """How long nodes may take to meet: for the first generation, or for one after it."""
    if round_ is None or round_.cause is None:
        return policy.rdzv_timeout
    return policy.reform_timeout + round_.after


def _not_again(round_: Round, members: Sequence[Node], policy: Policy) -> str:
    """With --elastic_level 0 a node whose process failed makes room for another one."""
    cause = round_.cause
    if policy.level != 0 or cause is None or cause.why is not Why.FAILED or cause.rank >= len(members):
        return ""
    return members[cause.rank].id if cause.rank >= 0 else ""


def _form_at(
    view: View,
    round_: Round,
    members: Sequence[Node],
    nodes: Sequence[Came],
    deadline: float,
    policy: Policy,
) -> float:
    """When these nodes become a generation if nothing changes."""
    count = len(nodes)
    if count < policy.fewest:
        return float("inf")
    earliest = view.round_since + round_.after
    if count >= policy.most:
        return earliest
    quiet = policy.elastic_timeout
    if round_.cause is not None:
        quiet = 0.0 if _all_back(round_, members, nodes) else min(quiet, REFORM_QUIET)
    calm = max(view.nodes_since, view.led_since, view.whole_since) + quiet
    return max(earliest, min(calm, deadline))


def _all_back(round_: Round, members: Sequence[Node], nodes: Sequence[Came]) -> bool:
    """After a failure nobody else is waited for."""
    assert round_.cause is not None
    return round_.cause.counts and {node.id for node in members} <= {came.node.id for came in nodes}


def _form(view: View, round_: Round, members: Sequence[Node], nodes: Sequence[Came], policy: Policy) -> Form:
    chosen = choose(nodes, members, policy.most, sort_ip=policy.sort_ip)
    known = {node.id for node in members}
    old_job = bool(known) and not any(node.id in known for node in chosen)
    forming = replace(
        round_,
        state=State.FORMING,
        size=len(chosen),
        restarts=0 if old_job else round_.restarts,
        topology=f"{round_.generation}/{view.me}.{view.lessons}",
    )
    return Form(forming, chosen, view.round_revision)


def _ended(view: View, round_: Round, cause: Cause) -> Move:
    ended = replace(round_, state=State.ENDED, cause=cause, code=cause.code or 1)
    return Move(ended, view.round_revision)


def _timeout(round_: Round, members: Sequence[Node], nodes: Sequence[Came], policy: Policy) -> Cause:
    again = " again" if round_.cause is not None else ""
    where = f" at {policy.endpoint}" if policy.endpoint else ""
    limit = patience(round_, policy)
    headline = f"{len(nodes)} of {policy.fewest} nodes met{again}{where} within {limit:g} s"
    missing = who_is_missing(members, nodes, policy)
    if missing:
        headline += f"; missing {_listed(missing)}"
    lines = [f"before that: {round_.cause.headline}"] if round_.cause is not None else []
    lines.append(_what_to_do(policy))
    return Cause(why=Why.TIMEOUT, node="", headline=headline, code=TIMEOUT_CODE, lines=tuple(lines))


def _what_to_do(policy: Policy) -> str:
    if policy.fixed_ranks or not policy.endpoint:
        return "Start the same command on every machine."
    return f"Start the same command on the other machines, with --master={policy.endpoint}."


def who_is_missing(members: Sequence[Node], nodes: Sequence[Came], policy: Policy) -> tuple[str, ...]:
    """At most eight, as far as anything tells who else there should be: members before, --ips, --rank."""
    if len(nodes) >= policy.fewest:
        return ()
    there = {came.node.id for came in nodes}
    ranks = {came.node.rank for came in nodes if came.node.rank >= 0}
    if members:
        names = [f"{node.title} (rank {rank})" for rank, node in enumerate(members) if node.id not in there]
    elif policy.fixed_ranks:
        names = [host for rank, host in enumerate(policy.fixed_ranks) if rank not in ranks]
    elif ranks:
        names = [f"rank {rank}" for rank in range(policy.fewest) if rank not in ranks]
    else:
        names = []
    return tuple(names[:8]) + (("...",) if len(names) > 8 else ())


def _listed(missing: Sequence[str]) -> str:
    """`rank 1`, `ranks 1, 3`, `10.0.0.7, 10.0.0.8`."""
    ranks = [name.removeprefix("rank ") for name in missing]
    several = len(missing) > 1 and missing[0].startswith("rank ")
    return f"ranks {', '.join(ranks)}" if several else ", ".join(missing)


def _count(view: View, decision: Decision, census: Census, now: float) -> None:
    """Not for each that comes: everybody reads it."""
    if census == view.census:
        return
    due = view.census_since + CENSUS_EVERY
    if now >= due:
        decision.do(Count(census))
    else:
        decision.look_at(due)


# ---- forming and running


def _forming(view: View, round_: Round, members: Sequence[Node], policy: Policy, now: float) -> Decision:
    done = [view.done(node.id) for node in members]
    if all(each is Done.READY for each in done):
        return _only(Move(replace(round_, state=State.RUNNING, cause=None, after=0.0), view.round_revision))
    vanished = any(node.id in view.gone for node in members)
    patient_until = max(view.round_since, view.led_since, view.whole_since) + max(
        1.0, policy.lease / 2, len(members) * ROOM
    )
    if not vanished and now < patient_until:
        return Decision(until=patient_until)
    decision = Decision()
    if now >= patient_until:
        for node, state in zip(members, done, strict=True):
            if state is None and node.id in view.nodes and node.id != view.me:
                decision.do(Drop(node.id, view.nodes[node.id].revision))
    decision.do(Move(_again(round_), view.round_revision))
    return decision


def _running(view: View, round_: Round, members: Sequence[Node], policy: Policy, now: float) -> Decision:
    if all(view.done(node.id) is Done.COMPLETED for node in members):
        return _only(Move(replace(round_, state=State.ENDED, cause=None, code=0), view.round_revision))
    decision = Decision()
    cause = _first_lost(view, members, policy, now, decision)
    if cause is None and len(view.nodes) > sum(node.id in view.nodes for node in members):
        cause = _newcomers(view, round_, members, policy, now, decision)
    if cause is not None:
        restart = cause.why is Why.JOINED or policy.elastic
        decision.do(Move(round_.stopping(cause, restart=restart), view.round_revision))
    return decision


def _first_lost(
    view: View, members: Sequence[Node], policy: Policy, now: float, decision: Decision
) -> Cause | None:
    found: tuple[float, Cause] | None = None
    for rank, node in enumerate(members):
        if may_go(view, node):
            continue
        gone = gone_at(view, node, policy, now, decision)
        if gone is not None and (found is None or gone < found[0]):
            found = gone, lost(node, rank, policy.lease, now - gone)
    return None if found is None else found[1]


def _newcomers(
    view: View, round_: Round, members: Sequence[Node], policy: Policy, now: float, decision: Decision
) -> Cause | None:
    """Who may join makes the job form anew; the others are told that it is full."""
    admission = admit(view, policy, now)
    known = {node.id for node in members}
    decision.do(*(refuse for refuse in admission.refused if refuse.id not in known))
    decision.look_at(admission.until)
    joining = [came for came in admission.eligible if came.node.id not in known]
    if not joining:
        return None
    if round_.size < policy.most:
        names = ", ".join(came.node.title for came in joining[:4])
        return Cause(why=Why.JOINED, node=joining[0].node.title, headline=f"{names} joins", code=0)
    verdict = full(view, tuple(members), policy)
    for came in joining:
        sure = came.since + policy.ghost if policy.elastic else now  # it may replace one that is lost
        if now >= sure:
            decision.do(Refuse(came.node.id, verdict))
        else:
            decision.look_at(sure)
    return None


# ---- ended


def _clean(view: View, policy: Policy, now: float) -> Decision:
    """Once all who were there have seen the end. One that does not answer is waited for as long as its lease
    may last: it could come back to an empty store and believe that the store had lost its data.
    """
    latest = view.round_since + max(LEAVE, policy.lease)
    waits = any(
        came.created < view.round_revision and came.node.id != view.me for came in view.nodes.values()
    )
    return Decision(until=latest) if waits and now < latest else Decision([Clean()])
