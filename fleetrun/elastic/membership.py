"""Take part in a job as one node. At every change of the store's mirror, and at every deadline, call
`rendezvous.member.decide`, and carry out the acts that are not under way already.

`Membership` carries out the acts of this node and calls its `Events`. `StoreWriter` carries out the acts at
the store, with their keys, bytes and conditions. This file has no rule of the rendezvous.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from fleetrun.aliases import Callback, Strings
from fleetrun.decoding import BadRecordError
from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.actions import (
    Accept,
    Act,
    CheckAlone,
    CheckNode,
    ClaimLead,
    Close,
    DeleteJob,
    DropNode,
    End,
    Fail,
    Finish,
    Leave,
    Pause,
    Policy,
    Propose,
    ReadTopology,
    Refuse,
    Register,
    Start,
    Stop,
    Unregister,
    Waiting,
    WriteCensus,
    WriteReport,
    WriteRound,
)
from fleetrun.elastic.rendezvous.checks import Measured, better
from fleetrun.elastic.rendezvous.member import decide, left_for_good, store_lost
from fleetrun.elastic.rendezvous.records import (
    Cause,
    CauseKind,
    MemberStatus,
    Node,
    Nodes,
    Report,
    Round,
    State,
)
from fleetrun.elastic.rendezvous.view import Failure, MemberState, Phase, View
from fleetrun.elastic.store import ABSENT, Entries, Entry, Store, Written
from fleetrun.errors import LaunchError, StoreSilentError
from fleetrun.frozen import frozen
from fleetrun.pod.loop import Loop, Timer
from fleetrun.record.faults import MachineFaults


@frozen
class FaultsKnown:
    """The faults of the job's nodes that are known at the moment."""

    faults: MachineFaults


@frozen
class StoreDown:
    """The store is unreachable."""

    why: str


@frozen
class StoreUp:
    """The store answers again."""


class Events(Protocol):
    """The reports of a membership to the node's agent."""

    def publish(self, event: Waiting | FaultsKnown | StoreDown | StoreUp) -> None:
        """Publish an event. `Waiting` comes while nodes are missing: at every change, then at intervals."""

    def check(self, round: Round, members: Nodes, rank: int, then: Callable[[Measured], None]) -> None:
        """Take part in the check of this round. It replaces a check under way."""

    def start(self, round: Round, members: Nodes, rank: int) -> None:
        """Run this generation, as member `rank` of these nodes."""

    def stop(self, cause: Cause, restart: bool, *, at_once: bool = False) -> None:
        """Stop this node's processes, then call `stopped`. `at_once`: stop by SIGKILL, even during a stop."""

    def finish(self) -> None:
        """Let the servers exit, because the trainers of all nodes have completed. Then call `stopped`."""

    def pause(self, code: int, cause: Cause | None) -> None:
        """Handle the end of all processes of the job, which waits for a change. `failed` ends the wait."""

    def ended(self, code: int, cause: Cause | None) -> None:
        """Handle the end of the job. Without a cause, the job has completed. No call follows."""

    def failed(self, error: LaunchError) -> None:
        """Handle that this node cannot take part, or cannot continue. No call follows."""


REMIND_EVERY = 10.0
"""Seconds between reminders in the first minute of waiting."""
REMIND_LATER_EVERY = 60.0


class Reminder:
    """The schedule of reminders for a user who waits for nodes: at every change, every 10 s in the first
    minute, then once a minute.
    """

    def __init__(self) -> None:
        self._reported: tuple[int, Strings] | None = None
        self._since = 0.0
        self._next = 0.0

    def note(self, waiting: Waiting | None, now: float, report: Callable[[Waiting], None]) -> float:
        """Call `report` if a reminder is due. Return the time of the next reminder."""
        if waiting is None:
            self._reported = None
            return math.inf
        what = waiting.present, (*waiting.missing, *(["spare"] if waiting.spare else []))
        if self._reported is None:
            self._since = now
        if what != self._reported or now >= self._next:
            self._reported = what
            self._next = now + (REMIND_EVERY if now - self._since < 60.0 else REMIND_LATER_EVERY)
            report(waiting)
            if waiting.spare:  # a spare may wait for days
                self._next = math.inf
        return self._next


VISIBLE_WITHIN = 1.0
"""Seconds from the answer to a write until the mirror must show the write."""
RETRY_AFTER = 0.2
"""Seconds until a refused write is repeated, if nothing changes meanwhile."""

_MOST_REASONS = 5
"""Most reported reasons of one outage of the store."""


@dataclass(slots=True)
class _PendingWrite:
    revision: int
    until: float = math.inf


class PendingWrites:
    """Requests to the store that the mirror does not show yet. They keep each look from sending the same
    request.
    """

    def __init__(self) -> None:
        self._open: dict[str, _PendingWrite] = {}

    def begin(self, key: str, revision: int) -> bool:
        """Return True if a request for this key must be sent now. A request under way, or without a visible
        effect in the mirror, keeps others back. `revision` is the revision of the key in the mirror.
        """
        write = self._open.get(key)
        if write is not None and write.revision == revision:
            return False
        self._open[key] = _PendingWrite(revision)
        return True

    def answered(self, key: str, done: bool, now: float) -> None:
        if key in self._open:
            self._open[key].until = now + (VISIBLE_WITHIN if done else RETRY_AFTER)

    def forget_late(self, now: float) -> float:
        """Drop requests without a visible effect in time. Return the time of the next drop."""
        for key in [key for key, write in self._open.items() if write.until <= now]:
            del self._open[key]
        return min((write.until for write in self._open.values()), default=math.inf)

    def clear(self) -> None:
        self._open.clear()


class StoreWriter:
    """The writer of acts to the store. `look` is called after the answer to a request."""

    def __init__(self, store: Store, loop: Loop, view: View, own: MemberState, look: Callback) -> None:
        self.pending = PendingWrites()
        self._store = store
        self._loop = loop
        self._view = view
        self._own = own
        self._look = look
        self._actions: dict[type[Act], Callable[[Any], None]] = {
            Register: self._register,
            Unregister: lambda act: self._delete_node(self._own.node.id),
            ClaimLead: self._claim_lead,
            ReadTopology: self._read_topology,
            WriteReport: self._write_report,
            WriteRound: self._write_round,
            Propose: self._propose,
            Refuse: self._refuse,
            DropNode: lambda act: self._delete_node(act.id, expect=act.revision),
            CheckNode: self._check_node,
            WriteCensus: lambda act: self._put(records.CENSUS_KEY, records.pack(act.census)),
        }

    def take(self, act: Act) -> None:
        """Carry out an act, unless the same act is under way."""
        self._actions[type(act)](act)

    def _register(self, act: Register) -> None:
        me = self._own.node
        self._put(records.node_key(me.id), records.pack(me), leased=True, then=self._renewed("node"))

    def _claim_lead(self, act: ClaimLead) -> None:
        me = self._own.node.id.encode()
        self._put(records.LEADER_KEY, me, expect=act.expect, leased=True, then=self._renewed("leader"))

    def _renewed(self, name: str) -> Written:
        return lambda done: self._own.renew.discard(name) if done else None

    def _read_topology(self, act: ReadTopology) -> None:
        key = records.topology_key(act.name)

        def read(entry: Entry | None) -> None:
            self.pending.answered(key, True, self._loop.clock())
            try:
                members = records.read_topology(entry.value) if entry is not None else ()
            except BadRecordError:
                members = ()
            self._view.learned(act.name, members)
            self._look()

        if self._begin(key):
            self._store.read(key, read)

    def _write_report(self, act: WriteReport) -> None:
        """Write a report. Members do not watch their own reports, so they remember the last one until the
        connection is lost.
        """
        report = act.report
        self._own.reported = act.generation, report.done, len(report.causes)
        self._store.put(records.report_key(act.generation, self._own.node.id), records.pack(report))

    def _write_round(self, act: WriteRound) -> None:
        """Write a round. A new round also deletes the reports and topologies of generations
        before the last.
        """

        def moved(done: bool) -> None:
            if done and act.round.state is State.OPEN:
                self._store.delete_prefix(records.reports_prefix(act.round.generation - 2))
                self._store.delete_prefix(records.topology_key(f"{act.round.generation - 2}/"))

        self._put(records.ROUND_KEY, records.pack(act.round), expect=act.expect, then=moved)

    def _propose(self, act: Propose) -> None:
        if not self._begin(records.ROUND_KEY):
            return
        name, members = act.round.topology, act.members

        def written(done: bool) -> None:
            if not done:
                self._answered(records.ROUND_KEY, False)
                return
            self._view.learned(name, members)
            self._store.put(
                records.ROUND_KEY,
                records.pack(act.round),
                expect=act.expect,
                then=partial(self._answered, records.ROUND_KEY),
            )

        self._store.put(records.topology_key(name), records.pack_topology(members), then=written)

    def _refuse(self, act: Refuse) -> None:
        self._put(records.verdict_key(act.id), records.pack(act.verdict))

    def _delete_node(self, id_: str, expect: int | None = None) -> None:
        key = records.node_key(id_)
        if self._begin(key):
            self._store.delete(key, expect=expect, then=partial(self._answered, key))

    def _check_node(self, act: CheckNode) -> None:
        key = records.node_key(act.id)

        def read(entry: Entry | None) -> None:
            if entry is None:
                self._view.left(act.id, self._loop.clock())
            self._answered(key, True)

        if self._begin(key):
            self._store.read(key, read)

    # ---- requests

    def _begin(self, key: str) -> bool:
        entry = self._store.mirror.get(key)
        return self.pending.begin(key, entry.revision if entry else ABSENT)

    def _answered(self, key: str, done: bool) -> None:
        self.pending.answered(key, done, self._loop.clock())
        self._look()

    def _put(
        self,
        key: str,
        value: bytes,
        *,
        expect: int | None = None,
        leased: bool = False,
        then: Written = lambda done: None,
    ) -> None:
        def answered(done: bool) -> None:
            then(done)
            self._answered(key, done)

        if self._begin(key):
            self._store.put(key, value, expect=expect, leased=leased, then=answered)


LOOK_PAUSE_PER_KEY = 10e-6
"""Seconds between two looks, for each key in the mirror. One look thus handles the simultaneous writes of
many nodes.
"""
FEW_KEYS = 100
"""With at most this many keys, every change causes a look."""


_DEPARTING = (Unregister, End, DeleteJob, Close)


class Membership:
    """The membership of a node, and the Listener of its store.

    After `ended` or `failed` of its events, the membership closes the store by itself, on the leader last.
    Then `closed` is true, and `when_closed` is called.
    """

    def __init__(self, store: Store, loop: Loop, node: Node, policy: Policy, events: Events) -> None:
        self.store = store
        self._loop = loop
        self._policy = policy
        self._events = events
        self._view = View(node.id, loop.clock())
        self._view.epoch = time.time() - loop.clock()
        self._own = MemberState(node, loop.clock())
        self._writer = StoreWriter(store, loop, self._view, self._own, self._look)
        self._reminder = Reminder()
        self._watched = {records.STATE_PREFIX, records.node_key(node.id), records.verdict_key(node.id)}
        self._timer = Timer()
        self._looking = False
        self._look_again = False
        self._whole = False
        self._had_others = False
        self._faults_known: MachineFaults = ()
        self._looked_at = 0.0
        self._left: End | None = None
        self._ended = False
        self.closed = False
        self.when_closed: Callback = lambda: None
        self.when_looked: list[Callable[[Entries], None]] = []
        """Called at every look with the entries that are not records of the rendezvous, as long as any exist,
        and once more when none exist.
        """
        self.lingers: Callable[[], bool] = lambda: False
        """Returns True if this node must stay although the job has ended. Called at every look. Each call of
        `changed` causes a look.
        """
        self._do: dict[type[Act], Callable[[Any], None]] = {
            Accept: self._accept,
            CheckAlone: self._check_alone,
            Start: self._start,
            Stop: self._stop,
            Leave: self._leave_generation,
            Finish: self._finish,
            Pause: self._pause,
            End: self._end,
            Fail: self._fail,
            DeleteJob: self._delete_job,
            Close: lambda act: self.close(),
        }

    @property
    def reached(self) -> bool:
        """True if the store has ever answered."""
        return self._own.was_up

    @property
    def connected(self) -> bool:
        """True if the store answers, as far as this node can see."""
        return self._view.up

    @property
    def members(self) -> Nodes:
        """The members of this node's generation in rank order. Empty while the node is in no generation."""
        return self._own.members

    # ---- called by the agent

    def join(self) -> None:
        """Take part until `ended` or `failed`."""
        now = self._loop.clock()
        self._own.joined = self._view.unformed_since = now
        for prefix in sorted(self._watched):
            self.store.watch(prefix)
        self.store.open(self)
        self._look()

    def failed(self, cause: Cause, restart: bool, after: float) -> None:
        """Report that a process of this node failed in the running generation. `restart` and `after` are the
        decision of this node's restart policy. During a pause, report that the pause ends.
        """
        own = self._own
        if (own.phase is Phase.RUNNING or own.paused) and own.failure is None:
            own.failure = Failure(own.own(cause), restart, after, self._loop.clock())
        self.note(cause)

    def note(self, cause: Cause) -> None:
        """Report another failure of this node. The oldest failure of all nodes becomes the job's cause."""
        if self._own.round is not None:
            self._own.causes.append((self._loop.clock() - cause.age, self._own.own(cause)))
        self._look()

    def completed(self) -> None:
        """Report that this node's trainers have all exited with 0. Its servers may still run."""
        self._own.completed, self._own.completed_since = True, self._loop.clock()
        self._look()

    def confirm(self, then: Callback) -> None:
        """Call `then` if the store confirms that this node's generation still runs."""

        def read(entry: Entry | None) -> None:
            with contextlib.suppress(BadRecordError):
                round_ = None if entry is None else records.read_round(entry.value)
                if round_ is not None and round_.state is State.RUNNING and self._own.is_in(round_):
                    then()

        if not self.closed:
            self.store.read(records.ROUND_KEY, read)

    def stopped(self, step: int | None = None) -> None:
        """Report that all of this node's processes have ended, after `stop` or `finish`. `step` is their last
        step.
        """
        self._own.step = step
        if self._own.phase in (Phase.STOPPING, Phase.FINISHING):
            self._own.phase = Phase.STOPPED
        if self._left is not None and not self._ended:
            self._end(self._left)
        self._look()

    def leave(self, cause: Cause, *, last: bool = False) -> None:
        """Report why this node must end, and leave the store immediately. `ended` follows after its processes
        have `stopped`. `last`: the job cannot continue without this node, even if it is elastic.
        """
        own, round_ = self._own, self._view.round
        if self.closed or own.phase is Phase.OVER:
            return
        if self._view.up and own.last is None and round_ is not None and own.is_in(round_):
            posted = own.own(cause)
            if own.phase is Phase.RUNNING and round_.state is State.RUNNING:
                restart = self._policy.replaces and not last
                stopping = round_.stopping(posted, restart=restart)
                self.store.put(records.ROUND_KEY, records.pack(stopping), expect=self._view.round_revision)
            report = Report(done=MemberStatus.STOPPING, causes=(*own.aged(self._loop.clock()), posted))
            self.store.put(records.report_key(own.generation, own.node.id), records.pack(report))
        self._left = End(cause.code or 1, cause)
        waits = own.active
        self.close()
        if not waits:
            self._end(self._left)

    def close(self) -> None:
        """Leave the store. You may call it twice."""
        if self.closed:
            return
        self.closed = True
        self._own.phase = Phase.OVER
        self._timer.cancel()
        if self._view.verdict is not None:
            self.store.delete(records.verdict_key(self._own.node.id))
        self.store.close()
        self.when_closed()

    def _delete_job(self, act: DeleteJob) -> None:
        self.store.delete_prefix(records.EVERYTHING)
        self.close()

    # ---- called by the store (store.Listener)

    def changed(self) -> None:
        known = len(self.store.mirror)
        pause = self._looked_at + known * LOOK_PAUSE_PER_KEY - self._loop.clock()
        if known > FEW_KEYS and pause > 0:
            self._look_in(pause)
        else:
            self._look()

    def up(self, *, fresh: bool) -> None:
        own = self._own
        if fresh and own.was_up:
            own.renew = {"node", "leader"}
        away = 0.0
        if own.down_since is not None:
            away, own.down_since = self._loop.clock() - own.down_since, None
            own.reported_outages.clear()
            self._events.publish(StoreUp())
        own.was_up = self._view.up = True
        # No lease ends in a shorter outage, so a node that is missing now has left for another reason.
        self._whole |= fresh or away >= self._policy.lease / 8
        own.reported = None
        self._writer.pending.clear()
        self._look()

    def down(self, why: str) -> None:
        own = self._own
        own.why_down = why
        self._view.up = False
        if own.phase is not Phase.OVER:
            if own.down_since is None:
                own.down_since = self._loop.clock()
            if why not in own.reported_outages and len(own.reported_outages) < _MOST_REASONS:
                own.reported_outages.add(why)
                self._events.publish(StoreDown(why))
        self._look()

    def lost(self, error: LaunchError) -> None:
        own = self._own
        self._view.up = False
        if (cause := left_for_good(own)) is not None:
            self._end(End(cause.code or 1, cause))
        elif own.last is None and own.phase is not Phase.OVER:
            if own.phase is Phase.RUNNING:
                # If others may run without this node, its processes take no further step.
                apart = isinstance(error, StoreSilentError) and self._policy.replaces
                self._stop(Stop(store_lost(error.message), False, at_once=apart))
            self._fail(Fail(error))
        self._look()

    # ---- deciding

    def _look(self) -> None:
        """Decide and act until no act is due. A call from within an act adds another pass."""
        self._look_again = True
        if self._looking:
            return
        self._looking = True
        try:
            while self._look_again and not self.closed:
                self._look_again = False
                self._step()
        finally:
            self._looking = False

    def _step(self) -> None:
        now = self._looked_at = self._loop.clock()
        view, own = self._view, self._own
        if view.up:
            view.refresh(self.store.mirror, now, whole=self._whole, closed=self.store.closed)
            self._whole = False
            self._note_round()
            self._watch()
            if view.others or self._had_others:
                self._had_others = bool(view.others)
                for look in self.when_looked:
                    look(view.others)
        due = self._writer.pending.forget_late(now)
        decision = decide(view, own, self._policy, now)
        for act in decision.acts:
            if own.last is not None and isinstance(act, _DEPARTING) and self.lingers():
                continue
            self._do.get(type(act), self._writer.take)(act)
        decision.look_at(due)
        decision.look_at(self._reminder.note(decision.waiting, now, self._events.publish))
        if not self.closed and decision.until < float("inf"):
            self._look_in(max(0.0, decision.until - now))

    def _look_in(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.after(seconds, self._look)

    def _note_round(self) -> None:
        round_, own = self._view.round, self._own
        if round_ is None or round_.state is not State.ENDED or round_.restart:
            own.seen_alive = True
        elif own.seen_alive and own.last is None and own.phase is not Phase.OVER:
            of_another_job = self._view.rewound and not round_.topology
            own.last = None if of_another_job and own.members else round_
        if round_ is not None and own.is_in(round_):
            own.round = round_
        if round_ is not None and round_.faults != self._faults_known:
            self._faults_known = round_.faults
            self._events.publish(FaultsKnown(round_.faults))

    def _watch(self) -> None:
        """Watch all nodes, and the reports of the generation, if this node leads."""
        if not self._view.leads or self._view.round is None:
            return
        wanted = {records.NODES_PREFIX, records.reports_prefix(self._view.round.generation)}
        for prefix in wanted - self._watched:
            self.store.watch(prefix)
        for prefix in self._watched - wanted:
            if prefix.startswith(records.REPORTS_PREFIX):
                self.store.unwatch(prefix)
                self._watched.discard(prefix)
        self._watched |= wanted

    # ---- acts of this node

    def _accept(self, act: Accept) -> None:
        own, round_ = self._own, act.round
        own.take(round_, self._view.members or (), act.rank)
        self._look_again = True

        def checked(measured: Measured) -> None:
            if own.is_in(round_):
                own.measured = measured
                self._look()

        if round_.check.turn:
            self._events.check(round_, own.members, own.rank, checked)

    def _check_alone(self, act: CheckAlone) -> None:
        """Check this node twice, as members do after a bad result, because a node may be busy for
        a moment.
        """
        own, generation = self._own, act.round.generation
        own.checked, own.measured = generation, None

        def check(then: Callable[[Measured], None]) -> None:
            if own.phase is Phase.IDLE and own.checked == generation:
                self._events.check(act.round, (own.node,), 0, then)

        def checked(measured: Measured) -> None:
            if own.phase is Phase.IDLE and own.checked == generation:
                own.measured = measured
                self._look()

        check(lambda first: check(lambda second: checked(better(first, second))))

    def _start(self, act: Start) -> None:
        own = self._own
        own.phase, own.round = Phase.RUNNING, act.round
        self._look_again = True
        self._events.start(act.round, own.members, own.rank)

    def _stop(self, act: Stop) -> None:
        own = self._own
        started = own.active
        if own.phase is not Phase.STOPPING:
            own.stop_cause, own.stopped_since = act.cause, self._loop.clock()
        own.phase = Phase.STOPPING if started else Phase.STOPPED
        own.killed = act.at_once
        self._look_again = True
        if started:
            self._events.stop(act.cause, act.restart, at_once=act.at_once)

    def _leave_generation(self, act: Leave) -> None:
        round_ = self._view.round
        if self._own.paused and round_ is not None and round_.cause is not None:
            self._events.stop(round_.cause, True)
        self._own.rest()
        self._look_again = True

    def _finish(self, act: Finish) -> None:
        self._own.phase = Phase.FINISHING
        self._look_again = True
        self._events.finish()

    def _pause(self, act: Pause) -> None:
        own = self._own
        own.paused = True
        if own.failure is not None and own.failure.cause.why is not CauseKind.ASKED:
            own.failure = None  # a change that came too late for the running round ends the pause immediately
        self._events.pause(act.round.code, act.round.cause)

    def _end(self, act: End) -> None:
        self._own.phase, self._ended = Phase.OVER, True
        self._look_again = True
        self._events.ended(act.code, act.cause)

    def _fail(self, act: Fail) -> None:
        self._own.phase, self._ended = Phase.OVER, True
        self._look_again = True
        self._events.failed(act.error)
