"""Who of the nodes that are there may take part, and what to tell the others. Pure; the leader asks."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetrun.elastic.rounds.acts import Refuse
from fleetrun.elastic.rounds.policy import Policy
from fleetrun.elastic.rounds.records import Cause, Node, Verdict, Why
from fleetrun.elastic.rounds.view import Came, View

USAGE = 2
REFUSED = 125


@dataclass(slots=True)
class Admission:
    """`eligible` by arrival. `conflict`: this job cannot be, since its nodes were started differently."""

    eligible: list[Came] = field(default_factory=list)
    refused: list[Refuse] = field(default_factory=list)
    conflict: Cause | None = None
    until: float = float("inf")


def admit(view: View, policy: Policy, now: float) -> Admission:
    """Nodes of a round that has members are measured by these; else by the leader.

    Of two that ask for one rank the older one has it. The younger one is refused when the older one still is
    there after the time in which a dead one would have gone: until then the older one may be what is left of
    a node that the younger one replaces.
    """
    result = Admission()
    members = view.members or ()
    reference = _reference(view, members)
    holders: dict[int, Came] = {}
    for came in sorted(view.nodes.values(), key=lambda came: came.created):
        if came.node.rank >= policy.most:
            result.refused.append(Refuse(came.node.id, _rank_too_high(came.node, policy)))
        elif reference is not None and came.fits != reference.fits:
            _differs(result, came, reference, view, policy, now, settled=bool(members))
        elif came.node.rank >= 0 and came.node.rank in holders:
            _same_rank(result, came, holders[came.node.rank], view, policy, now)
        else:
            result.eligible.append(came)
            if came.node.rank >= 0:
                holders[came.node.rank] = came
    return result


def _reference(view: View, members: tuple[Node, ...]) -> Came | None:
    for node in members:
        if node.id in view.nodes:
            return view.nodes[node.id]
    return view.nodes.get(view.me)


def _rank_too_high(node: Node, policy: Policy) -> Verdict:
    return Verdict(
        code=USAGE,
        message=f"--rank {node.rank} is out of range: this job has at most {policy.most} nodes, "
        f"0 to {policy.most - 1}",
        hint="Give every node another --rank, or none.",
    )


def _differs(
    result: Admission, came: Came, reference: Came, view: View, policy: Policy, now: float, *, settled: bool
) -> None:
    """A node that came under this leader's eyes is alive; another may be left over from an earlier start."""
    what = difference(reference.node, came.node)
    hint = "Start all nodes with the same command."
    alive = came.created > view.leader_created
    if settled:
        result.refused.append(Refuse(came.node.id, Verdict(code=USAGE, message=what, hint=hint)))
    elif alive or now >= came.since + policy.ghost:
        result.conflict = Cause(
            why=Why.REFUSED, node=came.node.title, headline=what, code=USAGE, lines=(hint,)
        )
    else:
        result.until = min(result.until, came.since + policy.ghost)


def _same_rank(result: Admission, came: Came, holder: Came, view: View, policy: Policy, now: float) -> None:
    sure = now if holder.node.id == view.me else came.since + policy.ghost
    if now < sure:
        result.until = min(result.until, sure)
        return
    message = f"--rank {came.node.rank} is taken by {holder.node.title}"
    hint = "Give every node its own --rank, or none."
    if came.node.rank < len(policy.fixed_ranks):
        message = f"{policy.fixed_ranks[came.node.rank]} of the list is here already: {holder.node.title}"
        hint = "Is --host or POD_IP the same on two machines?"
    result.refused.append(Refuse(came.node.id, Verdict(code=REFUSED, message=message, hint=hint)))


def difference(one: Node, other: Node) -> str:
    """`--max_restart is 3 on h1 (10.0.0.1) and 5 on h2 (10.0.0.2)`; at most three of them."""
    pairs = []
    if one.version != other.version:
        pairs.append(("fleetrun", one.version or "unknown", other.version or "unknown"))
    for name in sorted(one.options.keys() | other.options.keys()):
        here, there = (each.options.get(name, "not given") for each in (one, other))
        if here != there:
            pairs.append((name, here, there))
    told = [f"{name} is {a} on {one.title} and {b} on {other.title}" for name, a, b in pairs[:3]]
    if len(pairs) > len(told):
        told.append(f"{len(pairs) - len(told)} more")
    return "; ".join(told)


def full(view: View, members: tuple[Node, ...], policy: Policy) -> Verdict:
    names = ", ".join(node.title for node in members[:4])
    more = ", ..." if len(members) > 4 else ""
    etcd = policy.endpoint.startswith("etcd://")
    return Verdict(
        code=REFUSED,
        message=f"the job is full: {len(members)} of {policy.most} nodes are running ({names}{more})",
        hint=f"Another job needs another {'--job_id' if etcd else 'port in --master'}.",
    )
