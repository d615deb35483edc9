"""A loop without a kernel, whose clock jumps from deadline to deadline; and jobs of many nodes in it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from fleetrun.elastic.membership import FaultsKnown, Membership, StoreDown, StoreUp
from fleetrun.elastic.memory_store import Expiry, MemoryStore
from fleetrun.elastic.rendezvous.actions import Policy, Waiting
from fleetrun.elastic.rendezvous.checks import Measured
from fleetrun.elastic.rendezvous.records import Cause, CauseKind, Node, Round
from fleetrun.elastic.store import Ledger
from fleetrun.errors import LaunchError
from fleetrun.plan.topology import Offer
from fleetrun.pod.loop import Timer
from fleetrun.record.faults import MachineFaults


class SimulatedLoop:
    """The part of a Loop that needs no descriptor."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._sequence = itertools.count()

    def clock(self) -> float:
        return self.now

    def after(self, seconds: float, handler: Callable[[], None]) -> Timer:
        timer = Timer(handler)
        heapq.heappush(self._timers, (self.now + seconds, next(self._sequence), timer))
        return timer

    def run_until(self, met: Callable[[], bool], *, within: float, most: int = 2_000_000) -> bool:
        """Whether it was met within so many seconds of the simulated clock."""
        limit = self.now + within
        turns = 0
        while not met():
            if not self._timers or self._timers[0][0] > limit:
                self.now = limit
                return met()
            when, _, timer = heapq.heappop(self._timers)
            if timer.pending:
                turns += 1
                assert turns < most, "it turns without end"
                self.now = max(self.now, when)
                timer.fire()
        return True

    def run_for(self, seconds: float) -> None:
        self.run_until(lambda: False, within=seconds)


class BreakableStore(MemoryStore):
    """Its network can fail and come back. An Expiry of the same ledger must end the leases of clients that
    are cut off.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._reachable = True
        self._why = ""

    def cut(self, why: str = "cut off") -> None:
        """From now on nothing arrives in either direction, and the lease is not renewed."""
        self._reachable, self._why = False, why
        self._wake()

    def heal(self) -> None:
        self._reachable = True
        if self._session is not None:
            self._ledger.unwatch_all(self._session)
        self._why = "again"
        self._wake()

    def lose(self, error: LaunchError) -> None:
        """The store is gone for good."""
        listener = self._listener
        self._stop()
        if listener is not None:
            self._loop.after(0.0, lambda: listener.lost(error))

    def close(self) -> None:
        if not self._reachable:
            self._session = None
        super().close()

    def _take_turn(self) -> None:
        if self._reachable:
            super()._take_turn()
        elif self._listener is not None and self._why:
            self._listener.down(self._why)
            self._why = ""

    def _connect(self):
        again, self._why = self._why, ""
        before = self._session
        session = super()._connect()
        if again and session is before:
            self._up(session, fresh=False)
        return session

    def _keep_alive(self) -> None:
        if self._reachable:
            super()._keep_alive()
        else:
            self._beat = self._loop.after(self._lease / 4, self._keep_alive)


class CountingStore(BreakableStore):
    """Counts what is asked for, and what arrives."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.asked: Counter[str] = Counter()

    def put(self, key, value, **options):
        self.asked["put"] += 1
        super().put(key, value, **options)

    def delete(self, key, **options):
        self.asked["delete"] += 1
        super().delete(key, **options)

    def read(self, key, then):
        self.asked["read"] += 1
        super().read(key, then)

    def _look(self, session):
        self.asked["told"] += len(session.outbox)
        super()._look(session)


class SlowStore(CountingStore):
    """What is asked and what arrives takes a while, as over a network."""

    def __init__(self, *args, delay: Callable[[], float], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._delay = delay

    def _wake(self) -> None:
        if self._listener is not None and (self._turn is None or not self._turn.pending):
            self._turn = self._loop.after(self._delay(), self._take_turn)


class LossyStore(SlowStore):
    """What is on its way when the network fails may arrive or not, and its sender cannot know."""

    def __init__(self, *args, dice: random.Random, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._dice = dice
        self._on_the_way: list[_Sent] = []

    def put(self, key, value, *, then=None, **options):
        super().put(key, value, then=self._sent(then), **options)
        self._note_sent()

    def delete(self, key, *, then=None, **options):
        super().delete(key, then=self._sent(then), **options)
        self._note_sent()

    def _sent(self, then) -> _Sent:
        self._last = _Sent(self, then)
        return self._last

    def _note_sent(self) -> None:
        if self._asked:
            self._last.asked = self._asked[-1]
            self._on_the_way.append(self._last)

    def cut(self, why: str = "cut off", *, some_arrive: bool = True) -> None:
        on_the_way, self._on_the_way = self._on_the_way, []
        for sent in on_the_way:
            if self._reachable and sent.asked in self._asked:
                self._asked.remove(sent.asked)
                sent.lost = True
                arrives = some_arrive and self._dice.random() < 0.5
                if arrives and self._session is not None and self._session.open:
                    sent.asked(self._session)
                if sent.then is not None:
                    self._loop.after(0.0, lambda sent=sent: sent.then(False) if self._listener else None)
        super().cut(why)

    def renew(self) -> None:
        """A new lease though the old one has not ended: what was written stays until it does."""
        self._session, self._name = None, f"{self._name}+"
        self.heal()


@dataclass(eq=False)
class _Sent:
    store: LossyStore
    then: Callable[[bool], None] | None
    asked: Callable[..., None] | None = None
    lost: bool = False

    def __call__(self, done: bool) -> None:
        if self in self.store._on_the_way:
            self.store._on_the_way.remove(self)
        if self.then is not None and not self.lost:
            self.then(done)


def offer(host: str) -> Offer:
    return Offer(trainers=(f"{host}:6170",), service=f"{host}:6171")


@dataclass
class Run:
    """What a node's launcher was told in one generation."""

    generation: int
    members: tuple[str, ...]
    rank: int
    restarts: int


@dataclass
class Player:
    """One node: its launcher, without processes."""

    job: SimulatedJob
    node: Node
    policy: Policy
    stop_takes: float = 0.2
    runs: list[Run] = field(default_factory=list)
    running: Run | None = None
    """The generation of which it has processes."""
    stopping: bool = False
    notes: list[Waiting] = field(default_factory=list)
    stops: list[tuple[Cause, bool]] = field(default_factory=list)
    finishes: int = 0
    kills: int = 0
    gone: Timer | None = None
    end: tuple[int, Cause | None] | None = None
    error: LaunchError | None = None
    crashed: bool = False
    completed: bool = False
    left: bool = False
    downs: list[str] = field(default_factory=list)
    ups: int = 0
    step: int | None = None
    """The last step of its trainers."""
    faults: MachineFaults = ()
    checks: list[tuple[int, int]] = field(default_factory=list)
    """Generation and turn of each."""
    checking: Timer | None = None
    check_takes: Callable[[Round, tuple[Node, ...], int], float] = lambda round, members, rank: 0.4
    measure: Callable[[Round, tuple[Node, ...], int], Measured] = lambda round, members, rank: Measured()

    def __post_init__(self) -> None:
        loop = self.job.loop
        self.store = self.job.store_for(self.node.id, self.policy.lease)
        self.membership = Membership(self.store, loop, self.node, self.policy, self)

    @property
    def over(self) -> bool:
        return self.crashed or self.end is not None or self.error is not None

    @property
    def code(self) -> int | None:
        if self.error is not None:
            return self.error.exit_code
        return self.end[0] if self.end is not None else None

    # ---- Events

    def publish(self, event: Waiting | FaultsKnown | StoreDown | StoreUp) -> None:
        match event:
            case Waiting():
                self.notes.append(event)
            case FaultsKnown():
                self.faults = event.faults
            case StoreDown():
                self.downs.append(event.why)
            case StoreUp():
                self.ups += 1

    def check(
        self, round: Round, members: tuple[Node, ...], rank: int, then: Callable[[Measured], None]
    ) -> None:
        if not self.crashed:
            self.checks.append((round.generation, round.check.turn))
            if self.checking is not None:
                self.checking.cancel()
            seconds = self.check_takes(round, members, rank)
            self.checking = self.job.loop.after(seconds, lambda: then(self.measure(round, members, rank)))

    def start(self, round: Round, members: tuple[Node, ...], rank: int) -> None:
        if self.crashed:
            return
        assert not self.over, "started after the end"
        assert self.running is None, "started while processes run"
        assert members[rank].id == self.node.id
        run = Run(round.generation, tuple(node.id for node in members), rank, round.restarts)
        self.runs.append(run)
        self.running, self.completed = run, False
        self.job.started(self, run)

    def stop(self, cause: Cause, restart: bool, *, at_once: bool = False) -> None:
        if self.crashed:
            return
        assert self.running is not None
        assert at_once or not self.stopping
        self.stops.append((cause, restart))
        self.stopping, self.kills = True, self.kills + at_once
        if self.gone is not None:
            self.gone.cancel()
        self.gone = self.job.loop.after(0.0 if at_once else self.stop_takes, self._stopped)

    def finish(self) -> None:
        if self.crashed:
            return
        assert self.running is not None
        self.finishes += 1
        self.job.finishing(self)
        self.stopping = True
        self.job.loop.after(self.stop_takes, self._stopped)

    def _stopped(self) -> None:
        if not self.crashed:
            self.running, self.stopping = None, False
            self.membership.stopped(self.step)

    def ended(self, code: int, cause: Cause | None) -> None:
        if not self.crashed:
            assert not self.over, "ended twice"
            self.end = code, cause
            self.job.ended(self)

    def failed(self, error: LaunchError) -> None:
        if not self.crashed:
            assert not self.over, "ended twice"
            self.error = error
            self.job.ended(self)

    # ---- what happens to it

    def complete(self) -> None:
        """Its trainers end well."""
        if self.running is not None and not self.stopping and not self.over:
            self.completed = True
            self.membership.completed()

    def fail(
        self,
        code: int = 7,
        *,
        restart: bool = False,
        after: float = 0.0,
        age: float = 0.0,
        machine: str = "",
        suspicion: str = "",
    ) -> None:
        """A process fails, and the launcher stops the others of this node."""
        assert self.running is not None
        cause = Cause(
            why=CauseKind.FAILED,
            node="",
            headline=f"trainer {self.running.rank} exited with code {code}",
            code=code,
            age=age,
            machine=machine,
            suspicion=suspicion,
            step=self.step,
        )
        self.membership.failed(cause, restart, after)

    def leave(self, code: int = 143) -> None:
        """A signal: the launcher stops its processes, and says so."""
        self.left = True
        self.membership.leave(Cause(why=CauseKind.LEFT, node="", headline="got SIGTERM", code=code))
        if self.running is not None and not self.stopping:
            self.stopping = True
            self.job.loop.after(self.stop_takes, self._stopped)

    def crash(self) -> None:
        """The machine is gone."""
        self.crashed = True
        self.running = None
        self.store.cut("crashed")
        self.membership.closed = True
        self.store._stop()


class SimulatedJob:
    def __init__(self, *, lease: float = 10.0, ledger: Ledger | None = None, **policy) -> None:
        self.loop = SimulatedLoop()
        self.ledger = Ledger() if ledger is None else ledger
        self.expiry = Expiry(self.ledger, self.loop, lease)
        self.policy = Policy(lease=lease, **policy)
        self.players: list[Player] = []
        self.on_start: Callable[[Player, Run], None] = lambda player, run: None
        self._numbers = itertools.count(1)

    def add(self, *, join: bool = True, policy: Policy | None = None, id: str = "", **node) -> Player:
        number = next(self._numbers)
        host = node.pop("host", f"10.0.0.{number}")
        made = Node(
            id=id or f"n{number}",
            host=host,
            name=node.pop("name", f"h{number}"),
            offer=node.pop("offer", offer(host)),
            **node,
        )
        player = Player(self, made, policy or self.policy)
        self.players.append(player)
        if join:
            player.membership.join()
        return player

    def store_for(self, id: str, lease: float) -> CountingStore:
        return CountingStore(self.ledger, self.loop, id, lease=lease)

    def started(self, player: Player, run: Run) -> None:
        self.on_start(player, run)

    def finishing(self, player: Player) -> None:
        """For those who want to know."""

    def ended(self, player: Player) -> None:
        """For those who want to know."""

    def until(self, met: Callable[[], bool], within: float = 120.0) -> None:
        assert self.loop.run_until(met, within=within), self.story()

    def all_run(self, *players: Player) -> Callable[[], bool]:
        chosen = players or tuple(self.players)
        return lambda: all(player.running is not None and not player.stopping for player in chosen)

    def all_run_again(self, *players: Player) -> Callable[[], bool]:
        """In a later generation than now."""
        before = {player.node.id: len(player.runs) for player in players}
        running = self.all_run(*players)
        return lambda: running() and all(len(player.runs) > before[player.node.id] for player in players)

    def all_over(self) -> bool:
        return all(player.over for player in self.players)

    def story(self) -> str:
        lines = [f"{self.loop.now - 1000:.2f} s"]
        lines += [f"{key} = {entry.value[:150]!r}" for key, entry in self.ledger.range("").items()]
        lines += [
            f"{player.node.id}: {player.membership._own.phase} runs={player.runs[-1:]} end={player.end} "
            f"error={player.error} crashed={player.crashed} closed={player.membership.closed}"
            for player in self.players
        ]
        return "\n".join(lines)
