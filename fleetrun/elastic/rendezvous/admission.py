"""Choose the present nodes that take part, exclude nodes for their faults, and assign ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from fleetrun.elastic.rendezvous.actions import Policy, Refuse
from fleetrun.elastic.rendezvous.records import Cause, CauseKind, Node, Nodes, Verdict
from fleetrun.elastic.rendezvous.view import Candidate, Situation, View
from fleetrun.errors import NotNeededError
from fleetrun.record.faults import MachineFault, MachineFaults, counted, describe_faults, excluded, merged

# ---- Admission

USAGE = 2
NOT_NEEDED = NotNeededError.exit_code


@dataclass(slots=True)
class Admission:
    """The result of admission."""

    eligible: list[Candidate] = field(default_factory=list)  # in order of arrival
    refused: list[Refuse] = field(default_factory=list)
    conflict: Cause | None = None
    """The job cannot run, because its nodes were started differently."""
    until: float = float("inf")
    left_out: list[Candidate] = field(default_factory=list)  # excluded for their faults, in order of arrival


def admit(job: Situation) -> Admission:
    """Admit nodes with the options of the round's members, or of the leader in a round without members.

    If two nodes request the same rank, the older node gets it. The younger node may be its replacement, until
    the lease of a dead node would have ended. If the older node is still present then, the younger node is
    refused.
    """
    view, policy = job.view, job.policy
    result = Admission()
    bad = excluded(known_faults(view), policy.exclude_after)
    reference = _reference(job)
    holders: dict[int, Candidate] = {}
    for candidate in sorted(view.nodes.values(), key=lambda candidate: candidate.created):
        if candidate.node.rank >= policy.most + policy.spares:
            result.refused.append(Refuse(candidate.node.id, _rank_too_high(candidate.node, policy)))
        elif reference is not None and candidate.fits != reference.fits:
            _differs(result, candidate, reference, job, settled=bool(job.members))
        elif candidate.node.rank >= 0 and candidate.node.rank in holders:
            _same_rank(result, candidate, holders[candidate.node.rank], job)
        elif candidate.node.known_as in bad:
            result.left_out.append(candidate)
        else:
            result.eligible.append(candidate)
            if candidate.node.rank >= 0:
                holders[candidate.node.rank] = candidate
    return result


def _reference(job: Situation) -> Candidate | None:
    nodes = job.view.nodes
    return next((nodes[node.id] for node in job.members if node.id in nodes), nodes.get(job.view.me))


def known_faults(view: View) -> MachineFaults:
    """Return the faults of the job: those in its round, and those that nodes have brought along."""
    known = view.round.faults if view.round is not None else ()
    return merged(known, view.faults) if view.faults else known


def leave_out(admission: Admission, job: Situation) -> list[Refuse]:
    """Refuse the excluded nodes, if there are enough others. The node with the store stays and waits, because
    the others would end without it.
    """
    faults = excluded(known_faults(job.view), job.policy.exclude_after)
    return [
        Refuse(candidate.node.id, _is_excluded(candidate.node, faults[candidate.node.known_as]))
        for candidate in admission.left_out
        if not candidate.node.has_store
    ]


def least_blamed(admission: Admission, view: View) -> list[Candidate]:
    """Return the excluded nodes by number of faults, fewest first. In a tie, the node with the older last
    fault comes first.
    """
    faults = counted(known_faults(view))

    def blame(candidate: Candidate) -> tuple[int, float]:
        own = faults[candidate.node.known_as]
        return len(own), own[-1].time

    return sorted(admission.left_out, key=blame)


def _is_excluded(node: Node, faults: Sequence[MachineFault]) -> Verdict:
    reasons = "; ".join(fault.what for fault in faults[-2:])
    return Verdict(
        code=NOT_NEEDED,
        message=f"{node.known_as} is excluded from this job after {describe_faults(faults)}: {reasons}",
        hint="`fleetrun nodes --reset` removes the faults. --exclude_after sets the limit.",
    )


def _rank_too_high(node: Node, policy: Policy) -> Verdict:
    return Verdict(
        code=USAGE,
        message=f"--rank {node.rank} is out of range: this job has at most {policy.most} nodes"
        f"{f' and {_count(policy.spares)}' if policy.spares else ''}, 0 to {policy.most + policy.spares - 1}",
        hint="Use a different --rank for every node, or none.",
    )


def _count(spares: int) -> str:
    return "1 spare" if spares == 1 else f"{spares} spares"


def _differs(
    result: Admission,
    candidate: Candidate,
    reference: Candidate,
    job: Situation,
    *,
    settled: bool,
) -> None:
    """Refuse a node with other options, or end the job.

    A node that arrived under this leader is alive. An older entry may be left from an earlier start.
    """
    what = difference(reference.node, candidate.node)
    hint = "Start all nodes with the same command."
    alive = candidate.created > job.view.leader_created
    if settled:
        result.refused.append(Refuse(candidate.node.id, Verdict(code=USAGE, message=what, hint=hint)))
    elif alive or job.now >= candidate.since + job.policy.ghost:
        result.conflict = Cause(
            why=CauseKind.REFUSED, node=candidate.node.title, headline=what, code=USAGE, lines=(hint,)
        )
    else:
        result.until = min(result.until, candidate.since + job.policy.ghost)


def _same_rank(result: Admission, candidate: Candidate, holder: Candidate, job: Situation) -> None:
    policy = job.policy
    sure = job.now if holder.node.id == job.view.me else candidate.since + policy.ghost
    if job.now < sure:
        result.until = min(result.until, sure)
        return
    message = f"--rank {candidate.node.rank} is taken by {holder.node.title}"
    hint = "Use a different --rank for every node, or none."
    if candidate.node.rank < len(policy.fixed_ranks):
        message = (
            f"{policy.fixed_ranks[candidate.node.rank]} of the list has joined already: {holder.node.title}"
        )
        hint = "Check that --host or POD_IP differs between the nodes."
    result.refused.append(Refuse(candidate.node.id, Verdict(code=NOT_NEEDED, message=message, hint=hint)))


def difference(one: Node, other: Node) -> str:
    """Describe the differences: `--max_restart is 3 on h1 (10.0.0.1) and 5 on h2 (10.0.0.2)`. At most three
    are listed.
    """
    pairs = []
    if one.version != other.version:
        pairs.append(("fleetrun", one.version or "unknown", other.version or "unknown"))
    for name in sorted(one.options.keys() | other.options.keys()):
        here, there = (each.options.get(name, "not given") for each in (one, other))
        if here != there:
            pairs.append((name, here, there))
    differences = [f"{name} is {a} on {one.title} and {b} on {other.title}" for name, a, b in pairs[:3]]
    if len(pairs) > len(differences):
        differences.append(f"{len(pairs) - len(differences)} more")
    return "; ".join(differences)


def job_is_full(job: Situation) -> Verdict:
    """Return the refusal of a node for which there is no rank."""
    members, policy = job.members, job.policy
    names = ", ".join(node.title for node in members[:4])
    more = ", ..." if len(members) > 4 else ""
    etcd = policy.endpoint.startswith("etcd://")
    return Verdict(
        code=NOT_NEEDED,
        message=f"the job is full: {len(members)} of {policy.most} nodes are running ({names}{more})"
        + (f", and {_count(policy.spares)} wait{'s' * (policy.spares == 1)}" if policy.spares else ""),
        hint=f"To start another job, use another {'--job_id' if etcd else 'port in --master'}.",
    )


# ---- Ranks: from the admitted nodes to the members of a generation


def choose(
    nodes: Iterable[Candidate],
    previous: Sequence[Node],
    most: int,
    *,
    sort_ip: bool = False,
    keep: bool = False,
) -> Nodes:
    """Return at most `most` of the nodes in rank order.

    Members of the previous generation are preferred, then nodes that request a rank, then earlier arrivals.
    Each rank may be requested only once.

    A node that requests a rank gets it. The other members of the previous generation keep their ranks. A
    missing member's rank goes to a new launcher on the same host. The last ranks move into the remaining
    gaps. New nodes follow, by address with `sort_ip`, else by arrival. A requested rank of `most` or above is
    a spare's and means any rank.

    With `keep`, members keep their ranks, even if a late node requests the rank that a spare has taken.
    """
    ranks = {node.id: rank for rank, node in enumerate(previous)}
    there = sorted(
        nodes,
        key=lambda candidate: (
            candidate.node.id not in ranks,
            not 0 <= candidate.node.rank < most,
            candidate.created,
        ),
    )[:most]
    former = [(ranks.get(candidate.node.id, -1), candidate.node) for candidate in there]
    requested = [(candidate.node.rank, candidate.node) for candidate in there]
    slots = _RankSlots(len(there))
    for rank, node in (*(former if keep else ()), *requested, *former):
        slots.take(rank, node)
    present = {candidate.node.id for candidate in there}
    missing = [(rank, node) for rank, node in enumerate(previous) if node.id not in present]
    empty = {(node.host, node.name): rank for rank, node in reversed(missing)}  # the first one of each
    newcomers = [candidate for candidate in there if candidate.node.id not in ranks]
    for candidate in newcomers:
        slots.take(empty.get((candidate.node.host, candidate.node.name), -1), candidate.node)
    newcomers.sort(
        key=lambda candidate: (_address(candidate.node.host) if sort_ip else (), candidate.created)
    )
    slots.fill(node for rank, node in sorted(former, key=lambda each: each[0]) if rank >= 0)
    slots.fill(candidate.node for candidate in newcomers)
    return slots.nodes()


class _RankSlots:
    def __init__(self, size: int) -> None:
        self._slots: list[Node | None] = [None] * size
        self._placed: set[str] = set()

    def take(self, rank: int, node: Node) -> None:
        """Assign a free rank to a node without a rank."""
        if 0 <= rank < len(self._slots) and self._slots[rank] is None and node.id not in self._placed:
            self._slots[rank] = node
            self._placed.add(node.id)

    def fill(self, nodes: Iterable[Node]) -> None:
        free = (rank for rank, node in enumerate(self._slots) if node is None)
        for node in nodes:
            if node.id not in self._placed:
                self.take(next(free), node)

    def nodes(self) -> Nodes:
        return tuple(node for node in self._slots if node is not None)


def _address(host: str) -> tuple[int, int, str]:
    """Return a sort key that puts addresses in numeric order, then names."""
    try:
        address = ip_address(host)
    except ValueError:
        return (9, 0, host)
    return (address.version, int(address), "")
