"""Why a generation stopped, and what comes after it. Pure; the leader asks.

Everybody stops at once for the first cause that reached the round. What is told in the end is the oldest of
all: each node reports its own, with their age, so clocks need not agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fleetrun.elastic.rounds.acts import Check, Decision, Move
from fleetrun.elastic.rounds.policy import Policy
from fleetrun.elastic.rounds.records import Cause, Done, Node, Round, State, Why
from fleetrun.elastic.rounds.view import View
from fleetrun.elastic.stores.store import forgiven
from fleetrun.pod.restarts import HOPELESS

LOST_CODE = 125
SOONEST = 0.3
LATEST = 5.0
"""How long the leader waits for older causes than the first, when all have answered and at most: a machine
that writes a core dump may stand still for seconds before it tells what failed there, and a launcher that was
killed is given up after all that `forgiven` says.
"""


def follows(lease: float) -> float:
    """For so many seconds before a node is seen to go the failures of others are its consequence: their
    connections to it broke as the store's did, which was forgiven for a while.
    """
    return max(1.0, forgiven(lease)) + 0.5


def lost(node: Node, rank: int, lease: float, age: float) -> Cause:
    return Cause(
        why=Why.LOST,
        node=node.title,
        rank=rank,
        headline=f"{node.title} is gone: its launcher has ended, or was not heard of for {lease:g} s",
        code=LOST_CODE,
        age=max(0.0, age),
    )


def after_stop(view: View, members: tuple[Node, ...], policy: Policy, now: float) -> Decision:
    """What the leader does with a round that stops."""
    decision = Decision()
    round_ = view.round
    assert round_ is not None
    since = max(view.round_since, view.led_since)
    here = [node for node in members if gone_at(view, node, policy, now, decision) is None]
    done = [view.done(node.id) for node in here]
    heard = all(each in (Done.STOPPING, Done.STOPPED) for each in done)
    decided = since + (SOONEST if heard else LATEST)
    if now < decided:
        decision.look_at(decided)
        return decision
    cause = final_cause(view, members, policy, now)
    restart = may_restart(round_, cause, here, policy)
    if not restart and cause.why is Why.JOINED:
        cause = final_cause(view, members, policy, now, but=Why.JOINED)
    if not restart:
        ended = replace(round_, state=State.ENDED, cause=cause, code=cause.code or 1, restart=False)
        decision.do(Move(ended, view.round_revision))
    elif all(each is Done.STOPPED for each in done):
        restarts = round_.restarts + cause.counts
        opened = Round(
            generation=round_.generation + 1,
            state=State.OPEN,
            restarts=restarts,
            cause=cause,
            after=round_.after,
            topology=round_.topology,
        )
        decision.do(Move(opened, view.round_revision))
    return decision


def gone_at(view: View, node: Node, policy: Policy, now: float, decision: Decision) -> float | None:
    """When a member went. None: it is there, or may come yet; then there is another look when that is over.
    A leader that went is asked for: its successor has not seen how its entry went.
    """
    gone = view.lost_at(node.id, policy.lease)
    if gone is None or now >= gone:
        return gone
    decision.look_at(gone)
    if node.id == view.fled:
        decision.do(Check(node.id))
    return None


def may_go(view: View, node: Node) -> bool:
    """Whether a member is not missed: its trainers have ended well, and those of others do not need it."""
    return view.done(node.id) is Done.COMPLETED and not node.offer.serves


@dataclass(frozen=True, slots=True)
class _Told:
    at: float
    cause: Cause


def final_cause(
    view: View, members: Sequence[Node], policy: Policy, now: float, but: Why | None = None
) -> Cause:
    """The oldest; of causes but these if there are others."""
    round_ = view.round
    assert round_ is not None
    assert round_.cause is not None
    told = [_Told(view.round_since - round_.cause.age, round_.cause)]
    for heard in view.reports.values():
        told += [_Told(at, cause) for at, cause in heard.causes]
    for rank, node in enumerate(members):
        gone = view.lost_at(node.id, policy.lease)
        explained = may_go(view, node) or any(each.cause.rank == rank for each in told)
        if gone is not None and now >= gone and not explained:
            told.append(_Told(gone, lost(node, rank, policy.lease, now - gone)))
    first = min(told, key=lambda each: (each.cause.why is but, each.at))
    if first.cause.why is Why.FAILED:
        late = first.at + follows(policy.lease)
        vanished = [each for each in told if each.cause.why is Why.LOST and each.at <= late]
        first = min(vanished, key=lambda each: each.at, default=first)
    return replace(first.cause, age=max(0.0, now - first.at))


def may_restart(round_: Round, cause: Cause, here: Sequence[Node], policy: Policy) -> bool:
    """Whether there is another generation. The round says what the node with the first cause wants; the last
    word counts for the cause that it turned out to be.
    """
    if cause.why in (Why.TIMEOUT, Why.REFUSED):
        return False
    if cause.why is Why.FAILED and not _may_try_again(round_, cause, policy):
        return False
    if cause.why is Why.LEFT and _is_the_first(cause, round_) and not round_.restart:
        return False
    if policy.level >= 0:
        return True
    if cause.why in (Why.LOST, Why.LEFT) and not policy.elastic:
        return False
    return len(here) >= policy.fewest


def _is_the_first(cause: Cause, round_: Round) -> bool:
    """Whether it is the one that the round was stopped for."""
    first = round_.cause
    return first is not None and (cause.rank, cause.headline) == (first.rank, first.headline)


def _may_try_again(round_: Round, cause: Cause, policy: Policy) -> bool:
    if _is_the_first(cause, round_):
        return round_.restart
    return cause.code not in HOPELESS and round_.restarts < policy.max_restart
