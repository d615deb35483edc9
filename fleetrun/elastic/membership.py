"""One node's part in its job, over a store: looks at the mirror on every change and deadline, asks
`rendezvous.decide`, and does what is not already under way. Knows no rule, no transport and no process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fleetrun.elastic.rounds import keys, records
from fleetrun.elastic.rounds.acts import Act, Clean, Close, End, Fail, Finish, Ready, Rest, Start, Stop
from fleetrun.elastic.rounds.alone import gone, left_for_good
from fleetrun.elastic.rounds.desk import Desk
from fleetrun.elastic.rounds.events import Events
from fleetrun.elastic.rounds.part import Failure, Part, Phase
from fleetrun.elastic.rounds.policy import Policy
from fleetrun.elastic.rounds.records import Cause, Done, Node, Report, State
from fleetrun.elastic.rounds.reminder import Reminder
from fleetrun.elastic.rounds.rendezvous import decide
from fleetrun.elastic.rounds.view import View
from fleetrun.elastic.stores.store import Entry, Store
from fleetrun.errors import LaunchError
from fleetrun.pod.loop import Loop, Timer

PACE = 10e-6
"""Seconds between two looks for each key that is known: what many nodes do at once is seen at once."""
FEW = 100


class Membership:
    """A store's Listener. After `ended` or `failed` of its events it leaves the store by itself, the leader
    last; `closed` tells when, and `when_closed` is called then.
    """

    def __init__(self, store: Store, loop: Loop, node: Node, policy: Policy, events: Events) -> None:
        self._store = store
        self._loop = loop
        self._policy = policy
        self._events = events
        self._view = View(node.id, loop.clock())
        self._part = Part(node, loop.clock())
        self._desk = Desk(store, loop, self._view, self._part, self._look)
        self._reminder = Reminder()
        self._watched = {keys.STATE, keys.node(node.id), keys.verdict(node.id)}
        self._timer: Timer | None = None
        self._looking = False
        self._again = False
        self._whole = False
        self._looked_at = 0.0
        self._left: End | None = None
        self._over = False
        self.closed = False
        self.when_closed: Callable[[], None] = lambda: None
        self.when_looked: Callable[[Mapping[str, Entry]], None] = lambda others: None
        """Is told of the entries that are no records of rounds."""
        self._do: dict[type[Act], Callable[[Any], None]] = {
            Ready: self._ready, Start: self._start, Stop: self._stop, Rest: self._rest,
            Finish: self._finish, End: self._end, Fail: self._fail,
            Clean: self._clean, Close: lambda act: self.close(),
        }  # fmt: skip

    @property
    def reached(self) -> bool:
        """Whether the store has ever answered."""
        return self._part.was_up

    @property
    def connected(self) -> bool:
        """Whether the store answers now, as far as one knows."""
        return self._view.up

    @property
    def members(self) -> tuple[Node, ...]:
        """Of the generation that this node is in, in the order of their ranks; empty while it is in none."""
        return self._part.members

    # ---- what the node says

    def join(self) -> None:
        """Take part until `ended` or `failed`."""
        now = self._loop.clock()
        self._part.joined = self._view.unformed_since = now
        for prefix in sorted(self._watched):
            self._store.watch(prefix)
        self._store.open(self)
        self._look()

    def failed(self, cause: Cause, restart: bool, after: float) -> None:
        """A process of this node failed in the running generation; `restart`, `after`: what this node's
        policy says to that.
        """
        part = self._part
        if part.phase is Phase.RUNNING and part.failure is None:
            part.failure = Failure(part.own(cause), restart, after, self._loop.clock())
        self.note(cause)

    def note(self, cause: Cause) -> None:
        """One more failure of this node in this generation. The oldest of all nodes is the job's cause."""
        if self._part.round is not None:
            self._part.causes.append((self._loop.clock() - cause.age, self._part.own(cause)))
        self._look()

    def completed(self) -> None:
        """This node's trainers have all ended well; its servers may still run."""
        self._part.completed, self._part.completed_since = True, self._loop.clock()
        self._look()

    def stopped(self) -> None:
        """None of this node's processes is left, after `stop` or `finish`."""
        if self._part.phase in (Phase.STOPPING, Phase.FINISHING):
            self._part.phase = Phase.STOPPED
        if self._left is not None and not self._over:
            self._end(self._left)
        self._look()

    def leave(self, cause: Cause, *, last: bool = False) -> None:
        """This node was told to end: the others hear why, and that it is gone, at once. `ended` follows when
        its processes have `stopped`. `last`: the job cannot go on without it, even if it is elastic.
        """
        part, round_ = self._part, self._view.round
        if self.closed or part.phase is Phase.OVER:
            return
        if self._view.up and part.last is None and round_ is not None and part.is_in(round_):
            own = part.own(cause)
            if part.phase is Phase.RUNNING and round_.state is State.RUNNING:
                restart = self._policy.elastic and not last
                stopping = round_.stopping(own, restart=restart)
                self._store.put(keys.ROUND, records.pack(stopping), expect=self._view.round_revision)
            report = Report(done=Done.STOPPING, causes=(*part.aged(self._loop.clock()), own))
            self._store.put(keys.report(part.generation, part.node.id), records.pack(report))
        self._left = End(cause.code or 1, cause)
        waits = part.active
        self.close()
        if not waits:
            self._end(self._left)

    def close(self) -> None:
        """Leave the store. Done twice is fine."""
        if self.closed:
            return
        self.closed = True
        self._part.phase = Phase.OVER
        if self._timer is not None:
            self._timer.cancel()
        if self._view.verdict is not None:
            self._store.delete(keys.verdict(self._part.node.id))
        self._store.close()
        self.when_closed()

    def _clean(self, act: Clean) -> None:
        self._store.delete_prefix(keys.EVERYTHING)
        self.close()

    # ---- what the store says

    def changed(self) -> None:
        known = len(self._store.mirror)
        pause = self._looked_at + known * PACE - self._loop.clock()
        if known > FEW and pause > 0:
            self._look_in(pause)
        else:
            self._look()

    def up(self, *, fresh: bool) -> None:
        part = self._part
        if fresh and part.was_up:
            part.renew = {"node", "leader"}
        away = 0.0
        if part.down_since is not None:
            away, part.down_since = self._loop.clock() - part.down_since, None
            self._events.store_up()
        part.was_up = self._view.up = True
        # In less than that no lease ends because of it: whoever is not there now has gone for another reason.
        self._whole |= fresh or away >= self._policy.lease / 8
        part.told = None
        self._desk.errands.clear()
        self._look()

    def down(self, why: str) -> None:
        part = self._part
        first, part.why_down = part.down_since is None, why
        self._view.up = False
        if first and part.phase is not Phase.OVER:
            part.down_since = self._loop.clock()
            self._events.store_down(why)
        self._look()

    def lost(self, error: LaunchError) -> None:
        part = self._part
        self._view.up = False
        if (cause := left_for_good(part)) is not None:
            self._end(End(cause.code or 1, cause))
        elif part.last is None and part.phase is not Phase.OVER:
            if part.phase is Phase.RUNNING:
                self._stop(Stop(gone(error.message), False))
            self._fail(Fail(error))
        self._look()

    # ---- the look

    def _look(self) -> None:
        """Until nothing is left that can be done now. Calls from within are one more round."""
        self._again = True
        if self._looking:
            return
        self._looking = True
        try:
            while self._again and not self.closed:
                self._again = False
                self._step()
        finally:
            self._looking = False

    def _step(self) -> None:
        now = self._looked_at = self._loop.clock()
        view, part = self._view, self._part
        if view.up:
            view.refresh(self._store.mirror, now, whole=self._whole)
            self._whole = False
            self._note_round()
            self._watch()
            self.when_looked(view.others)
        due = self._desk.errands.forget_late(now)
        decision = decide(view, part, self._policy, now)
        for act in decision.acts:
            self._do.get(type(act), self._desk.take)(act)
        decision.look_at(due)
        decision.look_at(self._reminder.note(decision.waiting, now, self._events.waiting))
        if not self.closed and decision.until < float("inf"):
            self._look_in(max(0.0, decision.until - now))

    def _look_in(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.after(seconds, self._look)

    def _note_round(self) -> None:
        round_, part = self._view.round, self._part
        if round_ is None or round_.state is not State.ENDED:
            part.seen_alive = True
        elif part.seen_alive and part.last is None and part.phase is not Phase.OVER:
            of_strangers = self._view.rewound and not round_.topology
            part.last = None if of_strangers and part.members else round_
        if round_ is not None and part.is_in(round_):
            part.round = round_

    def _watch(self) -> None:
        """The leader looks at all nodes and at the reports of the generation."""
        if not self._view.leads or self._view.round is None:
            return
        wanted = {keys.NODES, keys.reports(self._view.round.generation)}
        for prefix in wanted - self._watched:
            self._store.watch(prefix)
        for prefix in self._watched - wanted:
            if prefix.startswith(keys.REPORTS):
                self._store.unwatch(prefix)
                self._watched.discard(prefix)
        self._watched |= wanted

    # ---- steps of this node

    def _ready(self, act: Ready) -> None:
        self._part.take(act.round, self._view.members or (), act.rank)
        self._again = True

    def _start(self, act: Start) -> None:
        part = self._part
        part.phase, part.round = Phase.RUNNING, act.round
        self._again = True
        self._events.start(act.round, part.members, part.rank)

    def _stop(self, act: Stop) -> None:
        part = self._part
        started = part.phase is Phase.RUNNING
        part.phase = Phase.STOPPING if started else Phase.STOPPED
        part.stop_cause, part.stopped_since = act.cause, self._loop.clock()
        self._again = True
        if started:
            self._events.stop(act.cause, act.restart)

    def _rest(self, act: Rest) -> None:
        self._part.rest()
        self._again = True

    def _finish(self, act: Finish) -> None:
        self._part.phase = Phase.FINISHING
        self._again = True
        self._events.finish()

    def _end(self, act: End) -> None:
        self._part.phase, self._over = Phase.OVER, True
        self._again = True
        self._events.ended(act.code, act.cause)

    def _fail(self, act: Fail) -> None:
        self._part.phase, self._over = Phase.OVER, True
        self._again = True
        self._events.failed(act.error)
