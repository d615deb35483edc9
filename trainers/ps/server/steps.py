"""Decide when a push is applied, and as of which step values are read. Pushes of all trainers are applied
together (sync) or on arrival (async). `service` handles messages, and `store` does the arithmetic.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from fleetrun.aliases import Clock
from trainers.ps.server.members import Member, Refusal
from trainers.ps.server.pushes import Gradient, StepPushes
from trainers.ps.server.store import Overlay, Store
from trainers.ps.wire import Code, Part

_LAST_PUSHES = 1024
_MOST_PULLED = 256
"""The number of steps of a trainer whose pulls are remembered."""
_RATE_TOLERANCE, _TINY_RATE = 1e-6, 1e-12
"""The tolerance for learning rates. Schedules use cosines and powers, and their last digits differ between
the CPUs of a job.
"""


class Steps(Protocol):
    """The interface of both modes. The defaults are for pushes that are applied on arrival.

    `step` counts the updates of the tables so far.
    """

    step: int

    @property
    def progress(self) -> int:
        """A number that grows when a push may have unblocked other trainers."""

    def counts(self, member: Member, number: int, new: bool | None = None) -> bool:
        """Return True if a push of step `number` would be new.

        `new` is True if its stream records are new, or None without records. Raises Refusal if the push is
        too early, or if its step precedes these records.
        """

    def may_push(self, member: Member, number: int) -> bool:
        """Return True if it is the turn of step `number`, or if that turn will never come."""
        return True

    def next_of(self, member: Member) -> int:
        """Return the first step in which this member may push records that are not counted yet."""
        return 0

    def skip(self, member: Member, number: int) -> None:
        """Set the member's next push to step `number`, or to a later step if that step is complete."""
        return

    def check_rates(self, member: Member, number: int, gradients: Sequence[Gradient]) -> None:
        """Raise Refusal if a push has a different learning rate than the pushes it is averaged with."""
        return

    def make_room(
        self, member: Member, active: Collection[Member], gradients: Sequence[Gradient] = ()
    ) -> None:
        """Ensure that there is memory for the rows that this push of a member, or its end, will apply.

        Call it before the push is recorded. Raises Refusal if memory is missing.
        """

    def push(self, member: Member, number: int, gradients: Sequence[Gradient] | None) -> None:
        """Accept a push for which `counts` is true. None means that its gradients were not finite."""

    def close(self, active: Collection[Member]) -> None:
        """Apply pushes that waited only for members that are no longer active."""
        return

    def may_pull(self, member: Member, number: int, active: Collection[Member]) -> bool:
        """Return True if values as of step `number` are available now."""

    def pull(self, member: Member, number: int, parts: Sequence[Part]) -> tuple[Part, ...]:
        """Return the values that the parts request."""

    def awaited(self, active: Collection[Member], number: int) -> list[Member]:
        """Return the members whose pushes are missing for values as of step `number`."""

    def waits(self, number: int, behind: int) -> bool:
        """Return True if values as of step `number` may need a push of a trainer that is at step `behind`."""
        return False

    def done(self, member: Member) -> int:
        """Return the number of steps of this trainer that are in the tables."""

    def pending(self) -> Collection[int]:
        """Return the ranks whose last push waits for pushes of others."""
        return ()

    def restart_at(self, step: int) -> None:
        """Continue with other trainers, whose next step is `step`. Drop the pushes that wait for the former
        trainers.
        """
        return

    def lose_pushes(self, ranks: Collection[int]) -> None:
        """Record that this server may have lost pushes of these trainers, because it recovered a snapshot."""
        return


class SyncSteps(Steps):
    """Apply a step when every active trainer has pushed or skipped it.

    The values before the last step are kept. A trainer that died after pushing to only some servers computes
    that step again, and must read the same values.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.step = 0
        self.pushes = StepPushes()
        self.before = Overlay()

    @property
    def progress(self) -> int:
        return self.step

    def counts(self, member: Member, number: int, new: bool | None = None) -> bool:
        if number < member.step:
            if new:
                raise Refusal(
                    Code.MISMATCH,
                    f"trainer {member.rank} pushed records as step {number}, but this server has not "
                    f"counted these records and is at step {member.step} of that trainer. Either servers "
                    "lost different parts of their write-ahead logs, or the trainer used other batches than "
                    "before the restart",
                )
            return False
        if number != self.step or member.finished:
            raise Refusal(
                Code.BAD_STEP,
                f"trainer {member.rank} pushed step {number}, but this server is at step {self.step}",
            )
        return True

    def may_push(self, member: Member, number: int) -> bool:
        return member.finished or not self.step < number == member.step

    def next_of(self, member: Member) -> int:
        return max(member.step, self.step)

    def skip(self, member: Member, number: int) -> None:
        member.step = max(member.step, self.step, number)

    def check_rates(self, member: Member, number: int, gradients: Sequence[Gradient]) -> None:
        if not self.step == number == member.step:
            return
        for rank, push in self.pushes.by_rank.items():
            if [(each.table, each.lr) for each in push] == [(each.table, each.lr) for each in gradients]:
                continue
            mine = {table: each.lr for each in gradients if not each.written for table in each.tables()}
            theirs = ((table, each.lr) for each in push if not each.written for table in each.tables())
            for table, lr in theirs:
                if not math.isclose(mine.get(table, lr), lr, rel_tol=_RATE_TOLERANCE, abs_tol=_TINY_RATE):
                    name = self._store.tables[table].spec.name
                    raise Refusal(
                        Code.MISMATCH,
                        f"trainer {member.rank} pushed step {number} of {name!r} with learning rate "
                        f"{mine[table]!r}, but trainer {rank} pushed it with {lr!r}. In sync training, all "
                        "trainers must use the same rate in a step. Change the rate after the same steps on "
                        "all trainers. After a restart, use fleet.resume_step() to find the rate",
                    )

    def make_room(
        self, member: Member, active: Collection[Member], gradients: Sequence[Gradient] = ()
    ) -> None:
        if all(other.step > self.step or other is member for other in active):
            waiting = [each for push in self.pushes.by_rank.values() for each in push]
            self._store.make_room([*waiting, *gradients])

    def push(self, member: Member, number: int, gradients: Sequence[Gradient] | None) -> None:
        member.step = number + 1
        self.pushes.add(member.rank, gradients)

    def close(self, active: Collection[Member]) -> None:
        """Apply complete steps. A trainer that has finished no longer counts, as in Paddle."""
        while (active or self.pushes.ranks()) and all(member.step > self.step for member in active):
            if not self.pushes.ranks():  # all trainers have skipped this step
                self.step, self.before = min(member.step for member in active), Overlay()
                return
            average = self.pushes.average()
            self.before = self._store.before(average)
            self._store.apply(average)
            self.pushes = StepPushes()
            self.step += 1

    def may_pull(self, member: Member, number: int, active: Collection[Member]) -> bool:
        return number <= self.step

    def pull(self, member: Member, number: int, parts: Sequence[Part]) -> tuple[Part, ...]:
        again = number == self.step - 1 and number < member.step
        return self._store.pull(parts, self.before if again else None)

    def awaited(self, active: Collection[Member], number: int) -> list[Member]:
        return [member for member in active if member.step <= self.step]

    def done(self, member: Member) -> int:
        return member.step - (member.rank in self.pushes.ranks())

    def pending(self) -> Collection[int]:
        return self.pushes.ranks()

    def restart_at(self, step: int) -> None:
        self.step, self.pushes, self.before = step, StepPushes(), Overlay()


class AsyncSteps(Steps):
    """Apply each push on arrival.

    With `max_staleness`, a trainer must not read while another trainer is more than so many steps behind
    (stale synchronous parallel, Ho et al. 2013). None means without limit. `staleness` describes the last
    pushes. For each, it counts the other pushes that were applied, and the seconds that passed, since the
    server answered the pull for that push.
    """

    def __init__(
        self,
        store: Store,
        max_staleness: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._store = store
        self._max_staleness = max_staleness
        self._clock = clock
        self._pulled: dict[int, dict[int, tuple[int, float]]] = {}
        """The server's step and the time, by rank and step of a trainer."""
        self.staleness: deque[tuple[int, float]] = deque(maxlen=_LAST_PUSHES)
        self._lost: set[int] = set()
        """The ranks whose last pushes may be lost. Nobody waits for them until their next request shows their
        step: they may wait for others on another server, and would never send it.
        """
        self.step = 0

    @property
    def progress(self) -> int:
        return 0 if self._max_staleness is None else self.step

    def counts(self, member: Member, number: int, new: bool | None = None) -> bool:
        return number >= member.resumed if new is None else True

    def make_room(
        self, member: Member, active: Collection[Member], gradients: Sequence[Gradient] = ()
    ) -> None:
        self._store.make_room(gradients)

    def push(self, member: Member, number: int, gradients: Sequence[Gradient] | None) -> None:
        self._store.apply(gradients or ())
        self._measure(member.rank, number)
        member.step = max(member.step, number + 1)  # because a retry may be late
        self._lost.discard(member.rank)
        self.step += 1

    def may_pull(self, member: Member, number: int, active: Collection[Member]) -> bool:
        if member.rank in self._lost:
            self._lost.remove(member.rank)
            member.step = max(member.step, number)
        return not self.awaited(active, number)

    def lose_pushes(self, ranks: Collection[int]) -> None:
        self._lost = set() if self._max_staleness is None else set(ranks)

    def pull(self, member: Member, number: int, parts: Sequence[Part]) -> tuple[Part, ...]:
        pulled = self._pulled.setdefault(member.rank, {})
        if number not in pulled:
            if len(pulled) >= _MOST_PULLED:  # drop pulls of steps that were never pushed
                pulled.clear()
            pulled[number] = self.step, self._clock()
        return self._store.pull(parts)

    def _measure(self, rank: int, number: int) -> None:
        """Measure staleness. A push may be for several steps, and the oldest values count."""
        pulled = self._pulled.get(rank)
        if not pulled or number not in pulled:
            return
        done = [each for each in pulled if each <= number]
        step, then = min(pulled.pop(each) for each in done)
        self.staleness.append((self.step - step, self._clock() - then))

    def awaited(self, active: Collection[Member], number: int) -> list[Member]:
        if self._max_staleness is None:
            return []
        behind = [member for member in active if self.waits(number, member.step)]
        return [member for member in behind if member.rank not in self._lost]

    def waits(self, number: int, behind: int) -> bool:
        return self._max_staleness is not None and number - behind > self._max_staleness

    def done(self, member: Member) -> int:
        return member.step
