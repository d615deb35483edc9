"""Decide what the leader of a round does next: when nodes become a generation, why the generation stopped,
and whether another follows. Pure functions turn a view and the time into acts and the time of the next look.

`admission.py` admits nodes. `member.py` chooses the leader, and decides what every other node does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fleetrun.aliases import Strings
from fleetrun.elastic.rendezvous.actions import (
    FORGIVEN_AFTER,
    REFORM_QUIET,
    CheckNode,
    Decision,
    DeleteJob,
    DropNode,
    Policy,
    Propose,
    ReadTopology,
    Refuse,
    Waiting,
    WriteCensus,
    WriteRound,
)
from fleetrun.elastic.rendezvous.admission import (
    admit,
    choose,
    job_is_full,
    known_faults,
    least_blamed,
    leave_out,
)
from fleetrun.elastic.rendezvous.checking import (
    bad_spares,
    checked,
    next_check,
    noted,
    time_of_check,
    unanswered,
)
from fleetrun.elastic.rendezvous.checks import NO_CHECK
from fleetrun.elastic.rendezvous.records import (
    Cause,
    CauseKind,
    Census,
    MemberStatus,
    Node,
    Round,
    State,
)
from fleetrun.elastic.rendezvous.view import Candidate, Situation, View
from fleetrun.elastic.store import ABSENT, reconnect_grace
from fleetrun.envs.contract import NodeLoss
from fleetrun.frozen import frozen
from fleetrun.pod.events import servers_named_in
from fleetrun.pod.policy import NOTHING_SPENT, Fault, Restart, Spent
from fleetrun.pod.process import Exit
from fleetrun.record.faults import DIGITS, MachineFault, MachineFaults, counted, merged, unforgiven

# ---- After a generation: why it stopped, and whether another follows
#
# All nodes stop immediately for the first cause that reaches the round. The final report shows the oldest
# cause. Each node reports its own causes with their age, so clocks may differ.

LOST_CODE = 125
SOONEST = 0.3
LATEST = 5.0
"""Seconds that the leader waits for causes older than the first: `SOONEST` after all nodes have answered, and
`LATEST` at most.

It does not wait if all processes have ended, because each node has then reported all its causes. A node that
writes a core dump may take seconds to report a failure. A launcher that was killed counts as lost only after
`reconnect_grace`.
"""


def follows(lease: float) -> float:
    """Return the seconds before the detected loss of a node in which other failures count as its consequence.

    The connections of other nodes broke together with the store's connection, and the store waited for
    `reconnect_grace`.
    """
    return max(1.0, reconnect_grace(lease)) + 0.5


def lost(job: Situation, node: Node, rank: int, age: float) -> Cause:
    """Return the cause for a lost member. `age` is in seconds."""
    if node.id in job.view.closed:
        why, suspicion = "its launcher has ended (its connection was closed)", "launcher"
    else:
        why, suspicion = f"it sent no heartbeat for {job.policy.lease:g} s", ""
    return Cause(
        why=CauseKind.LOST,
        node=node.title,
        rank=rank,
        headline=f"{node.title} is lost: {why}",
        code=LOST_CODE,
        age=max(0.0, age),
        machine=node.known_as,
        suspicion=suspicion,
    )


def after_stop(job: Situation) -> Decision:
    """Decide what the leader does with a round that stops."""
    view, policy = job.view, job.policy
    decision = Decision()
    round_ = job.round
    since = max(view.round_since, view.led_since)
    here = [node for node in job.members if lost_since(job, node, decision) is None]
    done = [view.done(node.id) for node in here]
    all_stopping = all(each in (MemberStatus.STOPPING, MemberStatus.STOPPED) for each in done)
    ended = all(each is MemberStatus.STOPPED for each in done)
    decided = since + (0.0 if ended else SOONEST if all_stopping else LATEST)
    if job.now < decided:
        decision.look_at(decided)
        return decision
    cause = final_cause(job)
    restart = may_restart(round_, cause, len(here) + len(spares(job)), policy)
    if not restart and cause.why is CauseKind.JOINED:
        cause = final_cause(job, but=CauseKind.JOINED)
    waits = policy.watch and not restart and cause.why is CauseKind.FAILED
    if (restart or waits) and not ended:
        return decision
    forgiven, worked = _work(job, view.round_since - view.ran_since, _further(job))
    worked.pop(cause.machine, None)
    noted = merged(known_faults(view), forgiven, _faults(job, cause))
    spent, losses = round_.spent, round_.losses
    if restart and cause.counts:
        spent = policy.budget.after(_fault(cause), spent)
    elif restart and cause.why in (CauseKind.LOST, CauseKind.LEFT):
        loss = Fault(exit=Exit(LOST_CODE), time=view.epoch + job.now, step=_last_step(view))
        over = _too_many_lost(loss, losses, policy)
        losses = policy.losses.after(loss, losses)
        if over:
            restart, cause = False, replace(cause, lines=(*cause.lines, over))
    if restart:
        following = Round(
            generation=round_.generation + 1,
            state=State.OPEN,
            attempts=round_.attempts + 1,
            restarts=0 if cause.edit else round_.restarts + cause.counts,
            spent=NOTHING_SPENT if cause.edit else spent,
            losses=losses,
            faults=noted,
            worked=worked,
            cause=cause,
            after=round_.after,
            topology=round_.topology,
            edit=cause.edit or round_.edit,
        )
    else:
        code = cause.code or 1
        following = replace(round_, state=State.ENDED, cause=cause, code=code, restart=waits, faults=noted)
    decision.do(WriteRound(following, view.round_revision))
    return decision


def _faults(job: Situation, cause: Cause) -> MachineFaults:
    if not cause.machine:
        return ()
    time = round(job.view.epoch + job.now - cause.age, DIGITS)
    return (MachineFault(time, cause.machine, cause.headline, cause.suspicion),)


def _work(job: Situation, seconds: float, useful: bool) -> tuple[MachineFaults, dict[str, float]]:
    """Return acquittals of nodes that have worked long enough since their last fault, and `Round.worked` of
    the others.

    The last `seconds` of the members count if they were `useful`.
    """
    view = job.view
    here = {node.known_as for node in job.members} if useful else set()
    forgiven, worked = [], {}
    window = job.policy.budget.window
    enough = FORGIVEN_AFTER if window is None else window  # seconds of work after which faults expire
    for machine, own in unforgiven(known_faults(view)).items():
        total = job.round.worked.get(machine, 0.0) + (seconds if machine in here else 0.0)
        if total >= enough:
            # Directly after the fault, not now. The generation may have ended with the next fault, which
            # counts.
            forgiven.append(MachineFault(round(max(own).time + 10**-DIGITS, DIGITS), machine))
        elif total > 0:
            worked[machine] = total
    return merged(forgiven), worked


def _further(job: Situation) -> bool:
    """Return True if this generation made a later step than all earlier ones, or if steps are unknown."""
    last = _last_step(job.view)
    before = [step for step in (job.round.spent.step, job.round.losses.step) if step is not None]
    return last is None or last > max(before, default=-1)


def _last_step(view: View) -> int | None:
    """Return the last step of all nodes in this generation, or None if no node reported a step."""
    steps = [entry.report.step for entry in view.reports.values()]
    return max((step for step in steps if step is not None), default=None)


def _too_many_lost(loss: Fault, before: Spent, policy: Policy) -> str:
    """Return the reason to end the job after a loss, or an empty text if a generation may follow. If steps
    are unavailable, losses do not count.
    """
    if loss.step is None and before.step is None:
        return ""
    if isinstance(policy.losses.decide(loss, before), Restart):
        return ""
    lost = f"{policy.losses.limit} nodes were lost before"
    return f"No restart: {lost}, and the job made no step after {before.step}"


def lost_since(job: Situation, node: Node, decision: Decision) -> float | None:
    """Return when a member was lost. Return None while it is present or may still return, and decide again
    later.

    The entry of a departed leader is read from the store, because its successor did not watch the entries
    when it disappeared.
    """
    lost_at = job.view.lost_at(node.id, job.policy.lease)
    if lost_at is None or job.now >= lost_at:
        return lost_at
    decision.look_at(lost_at)
    if node.id == job.view.departed_leader:
        decision.do(CheckNode(node.id))
    return None


def may_go(view: View, node: Node) -> bool:
    """Return True if a member may leave early. Its trainers have completed, and trainers of other nodes do
    not need it.
    """
    return view.done(node.id) is MemberStatus.COMPLETED and not node.offer.serves


@frozen
class _DatedCause:
    at: float
    cause: Cause


def final_cause(job: Situation, but: CauseKind | None = None) -> Cause:
    """Return the oldest cause, preceded in its lines by the server end that led to it.

    A cause of kind `but` is returned only if all causes are of this kind. A symptom is returned only if all
    failures are symptoms.
    """
    view, now = job.view, job.now
    stopped_for = job.round.cause
    assert stopped_for is not None
    causes = [_DatedCause(view.round_since - stopped_for.age, stopped_for)]
    for entry in view.reports.values():
        causes += [_DatedCause(at, cause) for at, cause in entry.causes]
    restarted = [each for each in causes if each.cause.why is CauseKind.RESTARTED]
    causes = [each for each in causes if each.cause.why is not CauseKind.RESTARTED]
    for rank, node in enumerate(job.members):
        lost_at = view.lost_at(node.id, job.policy.lease)
        explained = may_go(view, node) or any(each.cause.rank == rank for each in causes)
        if lost_at is not None and now >= lost_at and not explained:
            causes.append(_DatedCause(lost_at, lost(job, node, rank, now - lost_at)))
    first = min(causes, key=lambda each: (each.cause.why is but, each.at))
    if first.cause.why is CauseKind.FAILED:
        failures = [each for each in causes if each.cause.why is CauseKind.FAILED]
        first = min(failures, key=lambda each: (each.cause.symptom, each.at))
        vanished = [each for each in causes if each.cause.why is CauseKind.LOST and _led_to(job, each, first)]
        first = min(vanished, key=lambda each: each.at, default=first)
    lines = (*_began_with(first, restarted), *first.cause.lines)
    return replace(first.cause, age=max(0.0, now - first.at), lines=lines)


def _led_to(job: Situation, lost: _DatedCause, failure: _DatedCause) -> bool:
    """Return True if the loss of a node led to a failure.

    If the node was silent for a lease, others may have waited for it for as long.
    """
    closed = any(node.id in job.view.closed for node in job.members[lost.cause.rank : lost.cause.rank + 1])
    silent = job.policy.lease if failure.cause.symptom and not closed else 0.0
    return lost.at <= failure.at + max(silent, follows(job.policy.lease))


def _began_with(first: _DatedCause, restarted: Sequence[_DatedCause]) -> Iterator[str]:
    """Yield the last end of a server that this failure of another process names."""
    if first.cause.why is not CauseKind.FAILED or first.cause.headline.startswith("server "):
        return
    named = servers_named_in(" ".join(first.cause.lines))
    ends = [
        each for each in restarted if each.at <= first.at and servers_named_in(each.cause.headline) & named
    ]
    if ends:
        last = max(ends, key=lambda each: each.at)
        ended = f"{last.cause.headline} on node {last.cause.rank}, {last.cause.node}"
        yield f"Began with: {ended}, {first.at - last.at:.1f} s before"


def spares(job: Situation) -> list[Candidate]:
    """Return nodes that wait for the loss of another, in order of arrival. An excluded node that has the
    store comes last.
    """
    if not job.policy.spares:
        return []
    known = {node.id for node in job.members}
    admission = admit(job)
    there = [*admission.eligible, *(each for each in admission.left_out if each.node.has_store)]
    return [each for each in there if each.node.id not in known][: job.policy.spares]


def may_restart(round_: Round, cause: Cause, there: int, policy: Policy) -> bool:
    """Return True if another generation follows, of `there` present nodes.

    The round has the decision of the node with the first cause. This decision does not count if the final
    cause is another one.
    """
    if cause.why in (CauseKind.TIMEOUT, CauseKind.REFUSED):
        return False
    if cause.why is CauseKind.FAILED and not _may_try_again(round_, cause, policy):
        return False
    leaves = cause.why in (CauseKind.LEFT, CauseKind.LOST)
    if leaves and _is_the_first(cause, round_) and not round_.restart:
        return False
    if policy.on_loss is not NodeLoss.FAIL:
        return True
    if cause.why in (CauseKind.LOST, CauseKind.LEFT) and not policy.replaces:
        return False
    return there >= policy.fewest


def _is_the_first(cause: Cause, round_: Round) -> bool:
    """Return True if the round was stopped for this cause."""
    first = round_.cause
    return first is not None and (cause.rank, cause.headline) == (first.rank, first.headline)


def _may_try_again(round_: Round, cause: Cause, policy: Policy) -> bool:
    if _is_the_first(cause, round_):
        return round_.restart
    return isinstance(policy.budget.decide(_fault(cause), round_.spent), Restart)


def _fault(cause: Cause) -> Fault:
    return Fault(exit=Exit(cause.code), time=cause.time, error=cause.error, step=cause.step)


# ---- The leader's decisions, by the state of the round

TIMEOUT_CODE = 124
ROOM = 0.005
"""Seconds granted per member for reading the topology."""
CENSUS_EVERY = 2.0
LEAVE = 2.0
"""Shortest time that the leader waits for the others to see the end, in seconds."""


def lead(view: View, policy: Policy, now: float, *, over: bool) -> Decision:
    """Return the leader's decision. With `over`, this node has seen the end of its own job. Without it, an
    ended round belongs to a job that ended before this node came.
    """
    round_ = view.round
    if round_ is None:
        return _only(WriteRound(Round(generation=1, state=State.OPEN), ABSENT)) if not over else Decision()
    if round_.state is State.ENDED and (over or not round_.restart):
        return _clean(view, policy, now) if over else _only(WriteRound(_afresh(round_), view.round_revision))
    members = view.members
    if members is None:
        return _only(ReadTopology(round_.topology))
    job = Situation(view, round_, members, policy, now)
    if round_.state is State.OPEN:
        return _open(job)
    if not any(node.id in view.nodes for node in members):
        return _abandoned(job)
    if round_.state is State.FORMING:
        return _forming(job)
    if round_.state is State.RUNNING:
        return _running(job)
    if round_.state is State.ENDED:
        return _waiting(job)
    return after_stop(job)


def _only(*acts: WriteRound | ReadTopology) -> Decision:
    return Decision(list(acts))


def _afresh(round_: Round) -> Round:
    """Return the round of a new job, after an old job left its round behind."""
    return Round(generation=round_.generation + 1, state=State.OPEN)


def _abandoned(job: Situation) -> Decision:
    """Replace a round without members. It belongs to an old job, or to a job whose nodes are all
    disconnected.
    """
    now = job.now
    lost_at = max((job.view.lost_at(node.id, job.policy.lease) or now for node in job.members), default=now)
    if now < lost_at:
        return Decision(until=lost_at)
    return _only(WriteRound(_afresh(job.round), job.view.round_revision))


# ---- Open


def _open(job: Situation) -> Decision:
    policy, now = job.policy, job.now
    admission = admit(job)
    decision = Decision(list(admission.refused), admission.until)
    if admission.conflict is not None:
        decision.do(_ended(job, admission.conflict))
        return decision
    deadline = job.view.unformed_since + meeting_time(job.round, policy)
    not_again = _not_again(job)
    nodes = [candidate for candidate in admission.eligible if candidate.node.id != not_again]
    if len(nodes) >= policy.fewest:
        decision.do(*leave_out(admission, job))
    elif admission.left_out:  # better than none
        rest = [each for each in least_blamed(admission, job.view) if each.node.id != not_again]
        rest = rest[: policy.fewest - len(nodes)]
        until = _others_until(job, rest, deadline)
        if now >= until:
            nodes += rest
        else:
            decision.look_at(until)
    form_at = _form_at(job, nodes, deadline)
    if form_at <= now < deadline + 2 * policy.lease:  # by then, every proposal has failed
        decision.do(_form(job, nodes))
    elif now >= deadline:
        decision.do(_ended(job, _timeout(job, nodes)))
    else:
        decision.look_at(min(form_at, deadline))
        missing = missing_nodes(job, nodes)
        decision.waiting = Waiting(
            present=len(nodes),
            fewest=policy.fewest,
            most=policy.most,
            missing=missing,
            left=min(form_at, deadline) - now,
        )
        _count(job, decision, Census(present=len(nodes), missing=missing))
    return decision


def _others_until(job: Situation, rest: Sequence[Candidate], deadline: float) -> float:
    """Return until when the job waits for other nodes before it takes the `rest`, which is excluded for
    faults.

    It does not wait if all possible nodes are present. It also does not wait if the last generation already
    had to take these nodes and stopped for another reason.
    """
    view, policy = job.view, job.policy
    if not policy.spares or len(view.nodes) >= policy.most + policy.spares:
        return float("-inf")
    known, faults = {node.id for node in job.members}, counted(known_faults(view))
    # Rounded like the times of faults, so that a fault right after the start does not seem older.
    began = round(view.epoch + view.ran_since, DIGITS) if job.round.cause is not None else float("-inf")
    if rest and all(each.node.id in known and faults[each.node.known_as][-1].time < began for each in rest):
        return float("-inf")
    since = max(view.unformed_since, view.nodes_since, view.led_since, view.whole_since)
    return min(since + policy.elastic_timeout, deadline)


def meeting_time(round_: Round | None, policy: Policy) -> float:
    """Return the seconds that nodes may take to join, for the first generation or a later one."""
    if round_ is None or round_.cause is None:
        return policy.rdzv_timeout
    return policy.reform_timeout + round_.after


def _not_again(job: Situation) -> str:
    """With --on_node_loss wait, return the node whose process failed. It makes room for another."""
    cause = job.round.cause
    if job.policy.on_loss is not NodeLoss.WAIT or cause is None or cause.why is not CauseKind.FAILED:
        return ""
    return job.members[cause.rank].id if 0 <= cause.rank < len(job.members) else ""


def _form_at(job: Situation, nodes: Sequence[Candidate], deadline: float) -> float:
    """Return when these nodes become a generation, if nothing changes."""
    view, policy = job.view, job.policy
    count = len(nodes)
    if count < policy.fewest:
        return float("inf")
    earliest = view.round_since + job.round.after
    if count >= policy.most:
        return earliest
    quiet = policy.elastic_timeout
    if job.round.cause is not None:
        quiet = 0.0 if _all_back(job, nodes) else min(quiet, REFORM_QUIET)
    calm = max(view.nodes_since, view.led_since, view.whole_since) + quiet
    return max(earliest, min(calm, deadline))


def _all_back(job: Situation, nodes: Sequence[Candidate]) -> bool:
    """Return True if all members are back after a failure. The generation then restarts without waiting for
    more nodes.
    """
    there = {candidate.node.id for candidate in nodes}
    assert job.round.cause is not None
    return job.round.cause.counts and all(node.id in there for node in job.members)


def _form(job: Situation, nodes: Sequence[Candidate]) -> Propose:
    view, round_, policy = job.view, job.round, job.policy
    chosen = choose(nodes, job.members, policy.most, sort_ip=policy.sort_ip, keep=policy.spares > 0)
    known = {node.id for node in job.members}
    old_job = bool(known) and not any(node.id in known for node in chosen)
    forming = replace(
        round_,
        check=next_check(round_.check, chosen, policy),
        state=State.FORMING,
        size=len(chosen),
        attempts=0 if old_job else round_.attempts,
        restarts=0 if old_job else round_.restarts,
        worked={} if old_job else round_.worked,
        spent=NOTHING_SPENT if old_job else round_.spent,
        losses=NOTHING_SPENT if old_job else round_.losses,
        faults=known_faults(view),
        topology=f"{round_.generation}/{view.me}.{view.topologies_seen}",
    )
    return Propose(forming, chosen, view.round_revision)


def _ended(job: Situation, cause: Cause) -> WriteRound:
    ended = replace(job.round, state=State.ENDED, cause=cause, code=cause.code or 1)
    return WriteRound(ended, job.view.round_revision)


def _timeout(job: Situation, nodes: Sequence[Candidate]) -> Cause:
    round_, policy = job.round, job.policy
    again = " again" if round_.cause is not None else ""
    where = f" at {policy.endpoint}" if policy.endpoint else ""
    limit = meeting_time(round_, policy)
    headline = f"{len(nodes)} of {policy.fewest} nodes joined{again}{where} within {limit:g} s"
    missing = missing_nodes(job, nodes)
    if missing:
        headline += f"; missing {_listed(missing)}"
    lines = [f"before that: {round_.cause.headline}"] if round_.cause is not None else []
    lines.append(_what_to_do(policy))
    return Cause(why=CauseKind.TIMEOUT, node="", headline=headline, code=TIMEOUT_CODE, lines=tuple(lines))


def _what_to_do(policy: Policy) -> str:
    if policy.fixed_ranks or not policy.endpoint:
        return "Start the same command on every node."
    return f"Start the same command on the other nodes, with --master={policy.endpoint}."


def missing_nodes(job: Situation, nodes: Sequence[Candidate]) -> Strings:
    """Return the names of missing nodes, at most eight, if earlier members, --ips or --rank identify them."""
    policy, members = job.policy, job.members
    if len(nodes) >= policy.fewest:
        return ()
    there = {candidate.node.id for candidate in nodes}
    ranks = {candidate.node.rank for candidate in nodes if candidate.node.rank >= 0}
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
    """Write names as `rank 1`, `ranks 1, 3` or `10.0.0.7, 10.0.0.8`."""
    ranks = [name.removeprefix("rank ") for name in missing]
    several = len(missing) > 1 and missing[0].startswith("rank ")
    return f"ranks {', '.join(ranks)}" if several else ", ".join(missing)


def _count(job: Situation, decision: Decision, census: Census) -> None:
    """Write the census, at most every CENSUS_EVERY seconds, because all nodes read it."""
    if census == job.view.census_of_round:
        return
    due = job.view.census_since + CENSUS_EVERY
    if job.now >= due:
        decision.do(WriteCensus(census))
    else:
        decision.look_at(due)


# ---- Forming and running


def _forming(job: Situation) -> Decision:
    view, round_, members = job.view, job.round, job.members
    done = [view.done(node.id) for node in members]
    if all(each is MemberStatus.READY for each in done):
        running = replace(round_, state=State.RUNNING, cause=None, after=0.0, check=NO_CHECK)
        again = checked(job) if round_.check.turn else None
        return _only(WriteRound(again or running, view.round_revision))
    decision = Decision()
    if round_.check.turn and (again := unanswered(job, decision)) is not None:
        return _only(WriteRound(again, view.round_revision))
    vanished = any(node.id in view.departed for node in members)
    patient_until = max(view.round_since, view.led_since, view.whole_since) + max(
        1.0, job.policy.lease / 2, len(members) * ROOM
    )
    patient_until += time_of_check(round_, job.policy)
    if not vanished and job.now < patient_until:
        decision.look_at(patient_until)
        return decision
    if job.now >= patient_until:
        for node, state in zip(members, done, strict=True):
            if state is None and node.id in view.nodes and node.id != view.me:
                decision.do(DropNode(node.id, view.nodes[node.id].revision))
    decision.do(WriteRound(round_.again(), view.round_revision))
    return decision


def _running(job: Situation) -> Decision:
    view, round_, members, policy = job.view, job.round, job.members, job.policy
    if all(view.done(node.id) is MemberStatus.COMPLETED for node in members):
        forgiven, _ = _work(job, job.now - view.ran_since, True)
        faults = merged(known_faults(view), forgiven)
        ended = replace(round_, state=State.ENDED, cause=None, code=0, restart=policy.watch, faults=faults)
        return _only(WriteRound(ended, view.round_revision))
    decision = Decision()
    cause = _first_lost(job, decision)
    if cause is None and len(view.nodes) > sum(node.id in view.nodes for node in members):
        cause = _newcomers(job, decision)
        if cause is None and (bad := bad_spares(job)):
            decision.do(WriteRound(noted(round_, bad, view.epoch + job.now, policy), view.round_revision))
    if cause is not None:
        restart = cause.why is CauseKind.JOINED or _survives(job)
        decision.do(WriteRound(round_.stopping(cause, restart=restart), view.round_revision))
    return decision


def _waiting(job: Situation) -> Decision:
    """End the wait for a change (--watch) if the job has lost a node that it needs, and refuse newcomers."""
    decision = Decision()
    cause = _first_lost(job, decision)
    if cause is not None and not _survives(job):
        ended = replace(job.round, cause=cause, code=cause.code, restart=False)
        decision.do(WriteRound(ended, job.view.round_revision))
    else:
        _newcomers(job, decision)
    return decision


def _survives(job: Situation) -> bool:
    """Return True if the job can continue without one of its members."""
    left = len(job.members) - 1 + len(spares(job))
    return job.policy.elastic or left >= job.policy.fewest


def _first_lost(job: Situation, decision: Decision) -> Cause | None:
    found: tuple[float, Cause] | None = None
    for rank, node in enumerate(job.members):
        if job.round.state is State.RUNNING and may_go(job.view, node):
            continue
        lost_at = lost_since(job, node, decision)
        if lost_at is not None and (found is None or lost_at < found[0]):
            found = lost_at, lost(job, node, rank, job.now - lost_at)
    return None if found is None else found[1]


def _newcomers(job: Situation, decision: Decision) -> Cause | None:
    """Return the cause to start a new generation with joining nodes, or refuse them because the job is full.

    A node with the store, or a member of it, waits, because it serves the others.
    """
    policy = job.policy
    admission = admit(job)
    known = {node.id for node in job.members}
    left_out = leave_out(admission, job) if admission.left_out else []
    decision.do(*(refuse for refuse in (*admission.refused, *left_out) if refuse.id not in known))
    decision.look_at(admission.until)
    joining = [candidate for candidate in admission.eligible if candidate.node.id not in known]
    if not joining:
        return None
    if job.round.size < policy.most:
        names = ", ".join(candidate.node.title for candidate in joining[:4])
        return Cause(why=CauseKind.JOINED, node=joining[0].node.title, headline=f"{names} joins", code=0)
    verdict = job_is_full(job)
    for candidate in joining[policy.spares :]:
        if candidate.node.has_store:
            continue
        # The candidate may replace a node that is lost.
        sure = candidate.since + policy.ghost if policy.replaces else job.now
        if job.now >= sure:
            decision.do(Refuse(candidate.node.id, verdict))
        else:
            decision.look_at(sure)
    return None


# ---- Ended


def _clean(view: View, policy: Policy, now: float) -> Decision:
    """Delete the job's keys after all nodes have seen the end.

    A silent node is awaited until its lease has ended. If it came back to an empty store, it would conclude
    that the store had lost its data.
    """
    latest = view.round_since + max(LEAVE, policy.lease)
    waits = any(
        candidate.created < view.round_revision and candidate.node.id != view.me
        for candidate in view.nodes.values()
    )
    return Decision(until=latest) if waits and now < latest else Decision([DeleteJob()])
