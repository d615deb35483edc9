"""Random faults for simulated jobs, by a seed, and what must hold whatever happens."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable

from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.records import CauseKind
from fleetrun.elastic.rendezvous.view import Phase
from fleetrun.elastic.store import Ledger
from fleetrun.envs.contract import NodeLoss
from fleetrun.pod.policy import Budget
from tests.support.simulation import CountingStore, LossyStore, Player, Run, SimulatedJob

FAULTS_FOR = 60.0
LONGEST = 300.0
OPTIONS = {"--max_restart": "3"}


class JobLedger(Ledger):
    """Counts the jobs that have been there: a node that comes late may begin the next one."""

    jobs = 0

    def put(self, key, value, **options):
        before = self.get(key)
        entry = super().put(key, value, **options)
        if key == records.ROUND_KEY and entry is not None:
            new, old = (b'"topology":""' in each for each in (value, b"" if before is None else before.value))
            ended = before is not None and b'"ended"' in before.value
            put_back = old and not new and b'"forming"' not in value
            self.jobs += (new and not old) + (new and old and ended) - put_back
        return entry

    def empty(self) -> None:
        """It was restarted without its data."""
        for session in list(self._sessions.values()):
            self.revoke(session)
        for key in self.range(""):
            super().delete(key)
        self.revision = 0


class FaultyJob(SimulatedJob):
    """One job of 2 to 6 nodes and its faults."""

    def __init__(self, seed: int) -> None:
        self.random = dice = random.Random(seed)
        most = dice.randint(2, 6)
        super().__init__(
            ledger=JobLedger(),
            fewest=dice.choice([most, most, dice.randint(1, most)]),
            most=most,
            on_loss=dice.choice([NodeLoss.FAIL, *NodeLoss]),
            lease=dice.choice([2.0, 5.0, 10.0]),
            elastic_timeout=dice.choice([0.5, 5.0, 20.0]),
            rdzv_timeout=dice.choice([20.0, 60.0]),
            budget=Budget(dice.choice([0, 1, 3])),
            sort_ip=dice.random() < 0.3,
        )
        self.latest = dice.choice([0.0, 0.001, 0.05, 0.2])
        self.by_rank = dice.random() < 0.2
        self.generations: dict[tuple[int, int], tuple[str, ...]] = {}
        """By job and number."""
        self.completions: set[tuple[tuple[str, ...], int, str]] = set()
        self.seen: dict[str, int] = {}
        """In which job a node saw the end."""
        self.log: list[str] = []
        self.done = False
        for number in range(most):
            self.at(dice.uniform(0, 3), self._come, number)
        for _ in range(dice.randint(0, 6)):
            latest = FAULTS_FOR if dice.random() < 0.7 else 5
            self.at(dice.uniform(0, latest), dice.choice(self._faults()))

    def _faults(self) -> list[Callable[[], None]]:
        return [
            self._crash, self._crash_leader, self._cut, self._cut, self._cut_leader, self._outage,
            self._leave, self._come, self._duplicate, self._differ, self._fail, self._fail,
            self._fail_many, self._fail_late, self._renew, self._lose_data,
        ]  # fmt: skip

    def at(self, seconds: float, what: Callable[..., None], *values) -> None:
        self.loop.after(seconds, lambda: what(*values))

    def say(self, text: str) -> None:
        self.log.append(f"{self.loop.now - 1000:8.3f} {text}")

    def store_for(self, id: str, lease: float) -> CountingStore:
        dice = random.Random(f"{id}{self.random.random()}")
        delay = lambda: dice.random() ** 3 * self.latest  # noqa: E731
        return LossyStore(self.ledger, self.loop, id, lease=lease, delay=delay, dice=dice)

    # ---- what happens

    def _come(self, number: int | None = None) -> None:
        self._newcomer(number if self.by_rank and number is not None else -1, OPTIONS)

    def _duplicate(self) -> None:
        self._newcomer(self.random.randint(0, self.policy.most), OPTIONS)

    def _differ(self) -> None:
        if self.random.random() < 0.3:
            self._newcomer(-1, {"--max_restart": "4"})

    def _newcomer(self, rank: int, options: dict[str, str]) -> None:
        if not self.done:  # else it would be the next job
            player = self.add(rank=rank, options=options)
            player.stop_takes = self.random.choice([0.0, 0.1, 0.1, 3.0, 15.0])
            self.say(f"{player.node.id} comes, rank {rank}, {options}")

    def _any(self) -> Player | None:
        alive = [player for player in self.players if not player.over and not player.left]
        return self.random.choice(alive) if alive else None

    def _leader(self) -> Player | None:
        entry = self.ledger.get(records.LEADER_KEY)
        leader = entry.value.decode() if entry is not None else ""
        return next(
            (player for player in self.players if player.node.id == leader and not player.crashed), None
        )

    def _crash(self, player: Player | None = None) -> None:
        player = player or self._any()
        if player is not None:
            self.say(f"{player.node.id} crashes")
            player.crash()

    def _crash_leader(self) -> None:
        if (leader := self._leader()) is not None:
            self._crash(leader)

    def _cut(self, player: Player | None = None) -> None:
        player = player or self._any()
        if player is not None:
            seconds = self.policy.lease * self.random.choice([0.3, 0.9, 1.3, 4.0])
            self.say(f"{player.node.id} is cut off for {seconds:g} s")
            player.store.cut()
            self.at(seconds, self._heal, player)

    def _cut_leader(self) -> None:
        if (leader := self._leader()) is not None:
            self._cut(leader)

    def _heal(self, player: Player) -> None:
        if not player.crashed:
            self.say(f"{player.node.id} is back")
            player.store.heal()

    def _outage(self) -> None:
        seconds = self.policy.lease * self.random.choice([0.3, 1.3, 3.0])
        keep = self.random.random() < 0.5
        self.say(f"the store is away for {seconds:g} s, leases {'stay' if keep else 'run'}")
        for player in self.players:
            if not player.over:
                player.store.cut("outage")
                self.at(seconds + self.random.uniform(0, 0.5), self._heal, player)
        if keep:
            for session in self.ledger._sessions.values():
                session.until += seconds + 1

    def _leave(self) -> None:
        if (player := self._any()) is not None:
            self.say(f"{player.node.id} leaves")
            player.leave()

    def _fail(self, age: float = 0.0) -> None:
        running = [
            player
            for player in self.players
            if player.running is not None and not player.stopping and not player.over and not player.completed
        ]
        if running:
            player = self.random.choice(running)
            restart = player.running.restarts < self.policy.budget.limit
            self.say(f"a process of {player.node.id} fails, {age} s ago")
            player.fail(7, restart=restart, after=self.random.choice([0.0, 0.5]), age=age)

    def _fail_many(self) -> None:
        for _ in range(3):
            self._fail(self.random.choice([0.0, 0.1, 0.4]))

    def _fail_late(self) -> None:
        """A server, after the trainers of its node have completed."""
        completed = [player for player in self.players if player.completed and not player.stopping]
        completed = [player for player in completed if player.running is not None and not player.over]
        if completed:
            self.say(f"a server of {completed[0].node.id} fails")
            completed[0].fail(7)

    def _renew(self) -> None:
        if (player := self._any()) is not None and player.store._reachable:
            self.say(f"{player.node.id} gets another lease")
            player.store.renew()

    def _lose_data(self) -> None:
        """An outage, after which the store is empty."""
        alive = [player for player in self.players if not player.crashed and not player.membership.closed]
        entry = self.ledger.get(records.ROUND_KEY)
        if (
            self.seen
            or (entry and b'"ended"' in entry.value)
            or any(not player.store._reachable for player in alive)
        ):
            return
        self.say("the store loses its data")
        for player in alive:
            player.store.cut("outage", some_arrive=False)
        self.ledger.empty()
        for player in alive:
            self.at(self.random.uniform(0.5, 1), self._heal, player)

    # ---- what must hold

    def started(self, player: Player, run: Run) -> None:
        self.say(f"{player.node.id} starts {run.generation} as {run.rank} of {run.members}")
        assert len(set(run.members)) == len(run.members)
        assert self.policy.fewest <= len(run.members) <= self.policy.most
        before = self.generations.setdefault((self.ledger.jobs, run.generation), run.members)
        assert before == run.members, "two topologies of one generation"
        for other in self.players:
            if other is player or other.running is None or other.left or other.over:
                continue
            if other.running.generation != run.generation:
                assert self.ledger.get(records.node_key(other.node.id)) is None, "two generations at a time"
        assert run.restarts <= self.policy.budget.limit
        self._check_ranks_kept(run)
        self.at(self.random.uniform(1, 15), self._complete, player, run)

    def _check_ranks_kept(self, run: Run) -> None:
        before = self.generations.get((self.ledger.jobs, run.generation - 1))
        if before is None or any(player.node.rank >= 0 for player in self.players):
            return
        for rank, id in enumerate(before):
            if id in run.members and rank < len(run.members):
                assert run.members[rank] == id, f"{id} was {rank} in {before}"

    def _complete(self, player: Player, run: Run) -> None:
        failed = player.membership._own.failure is not None
        if player.running is run and not player.stopping and not player.over and not failed:
            self.say(f"{player.node.id} completes {run.generation}")
            self.completions.add((run.members, run.generation, player.node.id))
            player.complete()

    def finishing(self, player: Player) -> None:
        self.seen.setdefault(player.node.id, self.ledger.jobs)

    def ended(self, player: Player) -> None:
        self.finishing(player)
        self.done = self.done or player.membership._own.last is not None
        self.say(f"{player.node.id} ends: {player.end} {player.error}")

    def check(self) -> None:
        over = lambda: self.loop.now > 1000 + FAULTS_FOR + 45 and self.all_over()  # noqa: E731
        assert self.loop.run_until(over, within=LONGEST), "stuck"
        closed = lambda: all(player.membership.closed for player in self.players)  # noqa: E731
        assert self.loop.run_until(closed, within=60), "not closed"
        left = [player for player in self.players if not player.crashed]
        assert all(player.membership._own.phase is Phase.OVER for player in left)
        assert all(player.running is None or player.stopping for player in left), "processes are left"
        ends: dict[int, set[object]] = {}
        for player in left:
            last = player.membership._own.last
            assert player.end is None or player.end[1] is None or player.end[1].why is not CauseKind.JOINED
            if player.end is None:
                assert player.error.exit_code > 0
            elif last is not None and not player.left:
                ends.setdefault(self.seen[player.node.id], set()).add(self._end_of(player))
            if player.code == 0:
                job = self.seen[player.node.id]
                members = self.generations[job, last.generation]
                assert all((members, last.generation, id) in self.completions for id in members), (
                    "0 for nothing"
                )
        assert all(len(each) == 1 for each in ends.values()), f"they do not agree: {ends}"

    def _end_of(self, player: Player) -> object:
        code, cause = player.end
        generation = player.membership._own.last.generation
        return generation, code, cause and (cause.why, cause.node, cause.rank, cause.headline)


def run_with_faults(seed: int) -> FaultyJob:
    """To its end. Raises AssertionError with the story."""
    job = FaultyJob(seed)
    try:
        job.check()
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        head = f"seed {seed}: {error} ({where.name}, line {where.lineno})\n{job.policy}\n"
        raise AssertionError(head + "\n".join(job.log) + "\n" + job.story()) from None
    return job
