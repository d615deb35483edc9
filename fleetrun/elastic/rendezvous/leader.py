"""What the leader of a round does next: which nodes it admits, in which order of ranks, when they become a
generation, why that one stopped, and whether another follows. Pure: a view and the time in, acts and the time
of the next look out.

Which node leads, and what every other node does, is in `member.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address

from fleetrun.elastic.rendezvous.actions import (
    REFORM_QUIET,
    Check,
    Clean,
    Count,
    Decision,
    Drop,
    Form,
    Learn,
    Move,
    Policy,
    Refuse,
    Waiting,
)
from fleetrun.elastic.rendezvous.records import Cause, Census, Done, Node, Round, State, Verdict, Why
from fleetrun.elastic.rendezvous.view import Came, View
from fleetrun.elastic.store import ABSENT, forgiven
from fleetrun.pod.policy import HOPELESS

# ---- Which of the present nodes may take part, and what the others are told

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


def job_is_full(view: View, members: tuple[Node, ...], policy: Policy) -> Verdict:
    names = ", ".join(node.title for node in members[:4])
    more = ", ..." if len(members) > 4 else ""
    etcd = policy.endpoint.startswith("etcd://")
    return Verdict(
        code=REFUSED,
        message=f"the job is full: {len(members)} of {policy.most} nodes are running ({names}{more})",
        hint=f"Another job needs another {'--job_id' if etcd else 'port in --master'}.",
    )


# ---- From the present nodes to the members of a generation, in rank order


def choose(
    nodes: Iterable[Came], previous: Sequence[Node], most: int, *, sort_ip: bool = False
) -> tuple[Node, ...]:
    """At most `most` of these: members of the previous generation first, then those that ask for a rank, then
    by arrival. No two of them may ask for the same rank.

    Who asks for a rank gets it. The others of the previous generation keep theirs; where one is missing, its
    host may have come back, else the last ranks move into the holes, and newcomers follow: by address with
    `sort_ip`, else by arrival.
    """
    ranks = {node.id: rank for rank, node in enumerate(previous)}
    there = sorted(nodes, key=lambda came: (came.node.id not in ranks, came.node.rank < 0, came.created))[
        :most
    ]
    seats = _Seats(len(there))
    for came in there:
        seats.take(came.node.rank, came.node)
    for came in there:
        seats.take(ranks.get(came.node.id, -1), came.node)
    empty = _empty_places({came.node.id for came in there}, previous)
    for came in there:
        if came.node.id not in ranks:
            seats.take(empty.get((came.node.host, came.node.name), -1), came.node)
    movers = [came.node for came in there if came.node.id in ranks]
    newcomers = [came for came in there if came.node.id not in ranks]
    newcomers.sort(key=lambda came: (_address(came.node.host) if sort_ip else (), came.created))
    seats.fill(sorted(movers, key=lambda node: ranks[node.id]))
    seats.fill(came.node for came in newcomers)
    return seats.all()


class _Seats:
    def __init__(self, size: int) -> None:
        self._seats: list[Node | None] = [None] * size
        self._seated: set[str] = set()

    def take(self, rank: int, node: Node) -> None:
        """If it is free, and the node has none."""
        if 0 <= rank < len(self._seats) and self._seats[rank] is None and node.id not in self._seated:
            self._seats[rank] = node
            self._seated.add(node.id)

    def fill(self, nodes: Iterable[Node]) -> None:
        free = (rank for rank, node in enumerate(self._seats) if node is None)
        for node in nodes:
            if node.id not in self._seated:
                self.take(next(free), node)

    def all(self) -> tuple[Node, ...]:
        return tuple(node for node in self._seats if node is not None)


def _empty_places(there: set[str], previous: Sequence[Node]) -> dict[tuple[str, str], int]:
    """Ranks of the previous generation whose nodes are missing, by machine."""
    empty: dict[tuple[str, str], int] = {}
    for rank, node in enumerate(previous):
        if node.id not in there:
            empty.setdefault((node.host, node.name), rank)
    return empty


def _address(host: str) -> tuple[int, int, str]:
    """Numbers in numeric order, then names."""
    try:
        address = ip_address(host)
    except ValueError:
        return (9, 0, host)
    return (address.version, int(address), "")


# ---- Why a generation stopped, and what follows. Every node stops for the first cause that reached the
# round. The final cause is the oldest: each node reports its own with their age, so clocks need not agree

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
    if node.id == view.departed_leader:
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


# ---- The next step of the leader

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
        topology=f"{round_.generation}/{view.me}.{view.topologies_seen}",
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
    verdict = job_is_full(view, tuple(members), policy)
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
