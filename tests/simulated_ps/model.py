"""The model of a simulated job: what was pushed and acknowledged, and what its tables must therefore be.

Each trainer pushes, in each step, a row of its own with the value 1 after one update, and shared rows with
whole gradients. So each row shows exactly which pushes were applied, and how often. The second table gets the
same pushes. In sync training, its rows are compared with a table of the model, bit by bit.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.simulated_ps.plan import Plan
from tests.support.owners import owners
from trainers.ps.kernels.rows import drawn
from trainers.ps.tables.rules import SGD, Adam, RowWiseAdam, SparseAdam
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import (
    Entry,
    EntryKind,
    EvictionPolicy,
    RowOptions,
    TableKind,
    TableSpec,
    holders,
)

SPEC = TableSpec(kind=TableKind.SPARSE, name="e", size=2, rule=SGD(), rows=RowOptions())
SHARED = 8
"""The number of rows that all trainers update. Their keys are the lowest."""
_WIDE = 30
"""The number of rows that nobody reads, in a push of a wide job."""
WIDEST = 600
"""The limit of the bytes of a part in wide jobs: more than a read or a push has, and less than the pushes of
all trainers together.
"""
_SOME = 3
"""The number of shared rows that a push updates."""


class Violation(AssertionError):
    """A promise that the job broke."""


class Push(NamedTuple):
    """A push of a trainer, in the trainers of a start of the job."""

    start: int
    rank: int
    step: int


@dataclass
class Model:
    """What was pushed and acknowledged. `starts` has the number of trainers of each start of the job."""

    plan: Plan
    starts: list[int]
    acknowledged: set[tuple[int, Push]] = field(default_factory=set)
    """The server and the push."""
    saved: list[tuple[int, set[tuple[int, Push]]]] = field(default_factory=list)
    """The step of each save that was begun, and what was acknowledged before."""
    lost: set[tuple[int, Push]] = field(default_factory=set)
    """Pushes that async training may lose: under way when their trainer died, or after the last snapshot."""
    first_steps: dict[tuple[int, int], int] = field(default_factory=dict)
    """The first step of each rank in each start."""
    former: dict[int, list[tuple[int, range]]] = field(default_factory=dict)
    """For each server, former starts with the steps that it has applied. For sync training."""
    first_counted: dict[int, int] = field(default_factory=dict)
    """For each server, the first step of this start that it does not ignore. For sync training."""
    sent: dict[tuple[int, Push], float] = field(default_factory=dict)
    """When a push was sent first."""
    known: dict[tuple[int, Push], float] = field(default_factory=dict)
    """When a push was acknowledged first."""
    days: dict[tuple[int, int], int] = field(default_factory=dict)
    """How often the tables were shrunk before a step of a start."""
    shrunk: list[tuple[float, float]] = field(default_factory=list)
    """When each shrink began and ended."""
    vague: bool = False
    """True if nobody knows what was counted or shrunk, because a trainer was killed meanwhile."""

    @property
    def start(self) -> int:
        return len(self.starts) - 1

    @property
    def trainers(self) -> int:
        return self.starts[-1]

    # ---- Pushes

    def pushes(self, start: int | None = None) -> list[Push]:
        """Return all pushes that a start can have."""
        number = self.start if start is None else start
        ranks, steps = range(self.starts[number]), range(self.plan.steps)
        return [Push(number, rank, step) for rank in ranks for step in steps]

    def all_pushes(self) -> list[Push]:
        return [push for start in range(len(self.starts)) for push in self.pushes(start)]

    def own_key(self, server: int, push: Push) -> int:
        number = SHARED + 40 * push.start + 10 * push.rank + push.step
        return _keys_of(self.plan.servers)[server][number]

    def shared(self, server: int) -> list[int]:
        return _keys_of(self.plan.servers)[server][:SHARED]

    def keys(self, server: int, push: Push) -> list[int]:
        """Return the own key and the shared keys of a push."""
        found = _shared_numbers(self.plan.seed, server, push)
        return [self.own_key(server, push), *(self.shared(server)[number] for number in found)]

    def gradients(self, push: Push) -> tuple[float, float]:
        """Return the gradients of its own row and of shared rows: whole, also after an average."""
        trainers = self.starts[push.start]
        return -float(trainers), -float(trainers * (1 + (7 * push.rank + 3 * push.step) % 5))

    def rows(self, server: int, push: Push) -> tuple[Tensor, Tensor]:
        """Return the keys and gradients of a push."""
        keys, (own, others) = self.keys(server, push), self.gradients(push)
        if "wide" in self.plan.on:
            first = 1_000_000 + 100 * push.rank
            keys = [*keys, *range(first, first + _WIDE)]
        rows = torch.full((len(keys), 2), others)
        rows[0] = own
        return torch.tensor(keys), rows

    def stats(self, server: int, push: Push) -> Tensor:
        """Return the shows and clicks of a push."""
        return torch.tensor(
            [[1.0 + (key + push.step) % 3, float(key % 2)] for key in self.keys(server, push)]
        )

    def lr(self, step: int) -> float:
        """Return the learning rate of the second table."""
        return 0.0 if "warm" in self.plan.on and step < 2 else 1.0

    @property
    def averaged(self) -> bool:
        """True if a push counts divided by the number of trainers."""
        return self.plan.sync or "geo" in self.plan.on

    def rate(self, push: Push) -> float:
        """Return the learning rate of the first table."""
        return 0.5 ** (push.step % 3) if "merge" in self.plan.on else 1.0

    def value(self, push: Push, gradient: float) -> float:
        return -gradient * self.rate(push) / (self.starts[push.start] if self.averaged else 1)

    def one(self, push: Push) -> float:
        """Return the value of the own row of a push."""
        return self.value(push, self.gradients(push)[0])

    # ---- What tables must be

    def acknowledge(self, push: Push, now: float) -> None:
        for server in range(self.plan.servers):
            self.acknowledged.add((server, push))
            self.known.setdefault((server, push), now)

    def complete(self, server: int, step: int) -> set[Push]:
        """Return the pushes that a server has applied as of a step. For sync training."""
        found = {
            Push(start, rank, each)
            for start, steps in self.former.get(server, [])
            for rank in range(self.starts[start])
            for each in steps
        }
        first = self.first_counted.get(server, 0)
        return found | {
            Push(self.start, rank, each) for rank in range(self.trainers) for each in range(first, step)
        }

    def applied(self, server: int, found: dict[int, float]) -> set[Push]:
        """Return the pushes that these values show. Raises Violation for a push that counts twice."""
        applied = set()
        for push in self.all_pushes():
            value, one = found[self.own_key(server, push)], self.one(push)
            if value not in (0.0, one):
                raise Violation(f"{push} counts {value / one} times on server {server}")
            if value:
                applied.add(push)
        sums = dict.fromkeys(self.shared(server), 0.0)
        for push in applied:
            added = self.value(push, self.gradients(push)[1])
            for key in self.keys(server, push)[1:]:
                sums[key] += added
        wrong = {key: (found[key], value) for key, value in sums.items() if found[key] != value}
        if wrong:
            raise Violation(f"shared rows of server {server} are not the sum of what was applied: {wrong}")
        return applied

    def check(
        self, server: int, found: dict[int, float], known: set[tuple[int, Push]], step: int, who: str
    ) -> None:
        """Check the values of the first table that somebody reads as of a step, by a request that was sent
        when `known` was acknowledged.
        """
        applied = self.applied(server, found)
        if self.plan.sync:
            if wrong := applied ^ self.complete(server, step):
                raise Violation(f"{who} reads step {step} of server {server} with {sorted(wrong)} wrong")
        elif missing := self.lacking(server, applied, known):
            raise Violation(f"{who} lacks acknowledged pushes of server {server}: {sorted(missing)}")

    def lacking(self, server: int, applied: set[Push], known: set[tuple[int, Push]]) -> set[Push]:
        """Return the acknowledged pushes that are missing. For async training."""
        return {push for where, push in known - self.lost if where == server and push not in applied}

    def check_end(self, server: int, found: dict[int, float], who: str) -> None:
        """Check the first table after the last push of all trainers."""
        if self.plan.sync:
            return
        wanted = {
            push
            for push in self.pushes()
            if push.step >= self.first_steps.get((self.start, push.rank), 0)
            and (server, push) not in self.lost
        }
        if missing := wanted - self.applied(server, found):
            raise Violation(f"{who} ends, and server {server} lacks {sorted(missing)}")


@cache
def _keys_of(servers: int) -> list[list[int]]:
    """Return some keys of each server."""
    found: list[list[int]] = [[] for _ in range(servers)]
    keys = torch.arange(servers * 300)
    for key, place in zip(keys.tolist(), owners(keys, servers).tolist(), strict=True):
        found[holders(SPEC, servers)[place]].append(key)
    return found


@cache
def _shared_numbers(seed: int, server: int, push: Push) -> list[int]:
    return sorted(random.Random(f"{seed} {server} {push}").sample(range(SHARED), _SOME))


_BY_STEP = (Adam, RowWiseAdam, SparseAdam)
"""Rules whose updates depend on the number of updates of the table."""
_LATE_S = 1.5
"""Seconds after which a server that serves has noticed that time has passed."""


class Second:
    """The second table of one server, as the model sees it."""

    def __init__(self, model: Model, server: int) -> None:
        assert model.plan.second is not None
        self._model, self._server = model, server
        self.spec = spec = model.plan.second
        rows = spec.rows
        self.counts = rows.entry.kind is EntryKind.COUNT
        self.ttl_s = rows.bound.ttl_s if rows.bound is not None else 0.0
        self.up_since = 0.0
        """Since when the server serves."""
        spills = "spill" in model.plan.on  # no row leaves
        self._table = SparseTable(replace(spec, rows=replace(rows, bound=None)) if spills else spec)
        bounded = self._table.bounded
        self._most = 0 if bounded is None else (rows.bound.rows or rows.bound.bytes // bounded.row_cost)  # type: ignore[union-attr]
        self._at = (0, False)
        self._values: dict[tuple[int, bool], Tensor] = {}

    @property
    def exact(self) -> bool:
        """True if the model knows all values. For sync training."""
        model, bounded = self._model, self.spec.rows.bound is not None
        if model.vague or self.ttl_s or len(model.starts) > 1:
            return False
        return model.plan.sync and not (self.counts and (bounded or model.days))

    # ---- In sync training

    def _every_key(self) -> list[int]:
        model, server = self._model, self._server
        return [*(model.own_key(server, push) for push in model.all_pushes()), *model.shared(server)]

    def values_at(self, step: int) -> list[Tensor]:
        """Return the values of every key as of a step, before and after a day that passes there."""
        while self._at[0] < step:
            self._note()  # a trainer that repeats a step reads its values later
            self._pass_day(self._at[0])
            self._push(self._at[0])
            self._at = self._at[0] + 1, False
        self._note()
        self._pass_day(step)
        return [self._values[each] for each in ((step, False), (step, True)) if each in self._values]

    def _note(self) -> None:
        keys = torch.tensor(self._every_key())
        self._values[self._at] = self._table.pull(keys, insert=False)

    def _pass_day(self, step: int) -> None:
        if self._at == (step, False) and (0, step) in self._model.days:
            self._table.begin_shrink(self._model.plan.policy)
            while self._table.shrink_some(1 << 20) is None:
                pass
            self._table.release()
            self._at = step, True
            self._note()

    def _push(self, step: int) -> None:
        """Apply the mean of the pushes of all trainers. Each key is where the first of them has it."""
        model, server = self._model, self._server
        pushes = [Push(0, rank, step) for rank in range(model.trainers)]
        rows: dict[int, Tensor] = {}
        stats: dict[int, Tensor] = {}
        for push in pushes:
            if self.counts:
                self._table.pull(torch.tensor(model.keys(server, push)))
            keys, gradients = model.rows(server, push)
            counted = model.stats(server, push)
            for key, row, each in zip(keys.tolist(), gradients, counted, strict=True):
                rows[key] = rows[key] + row if key in rows else row
                stats[key] = stats[key] + each if key in stats else each
        mean = torch.stack(list(rows.values())) / len(pushes)
        shown = torch.stack(list(stats.values())) if self.spec.seen else None
        self._table.apply(torch.tensor(list(rows)), mean, model.lr(step), shown)

    # ---- In all modes

    @cached_property
    def _once(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """The initial value of each own row, and its value after one update."""
        model, server = self._model, self._server
        rows = replace(self.spec.rows, bound=None, entry=Entry(), statistics=False)
        table = SparseTable(replace(self.spec, rows=rows))
        pushes = [push for start in range(2) for push in self._some_pushes(start)]
        keys = torch.tensor([model.own_key(server, push) for push in pushes])
        gradients = [self._own_gradient(push) for push in pushes]
        before = table.pull(keys, insert=False)
        table.apply(keys, torch.tensor(gradients)[:, None].expand(-1, 2).contiguous(), 1.0)
        after = table.pull(keys, insert=False)
        names = keys.tolist()
        return dict(zip(names, before, strict=True)), dict(zip(names, after, strict=True))

    def _some_pushes(self, start: int) -> list[Push]:
        plan = self._model.plan
        trainers = (plan.trainers, plan.later_trainers)[start]
        return [Push(start, rank, step) for rank in range(trainers) for step in range(plan.steps)]

    def _own_gradient(self, push: Push) -> float:
        plan = self._model.plan
        trainers = (plan.trainers, plan.later_trainers)[push.start]
        return -1.0 if plan.sync else -float(trainers)

    def check(
        self, values: Tensor, keys: list[int], step: int, applied: set[Push], asked: float, now: float
    ) -> None:
        """Check values that were read as of a step, by a request that was sent at `asked`. `applied` has the
        pushes that the first table shows at the same moment.
        """
        where = f"the second table of server {self._server}"
        if not torch.isfinite(values).all():
            raise Violation(f"{where} has {values.tolist()}")
        found = dict(zip(keys, values, strict=True))
        if self.exact:
            self._check_exact(found, step)
        before, after = self._once
        for push in self._model.all_pushes():
            key = self._model.own_key(self._server, push)
            changed = not torch.equal(found[key], before[key])
            if changed and push not in applied:
                raise Violation(f"{where} has a row of {push}, which does not count: {found[key]}")
            if push not in applied or not self._model.lr(push.step):
                continue
            if changed and not self._is_once(found[key], after[key]):
                raise Violation(f"{where} has {found[key].tolist()} of {push}, not {after[key].tolist()}")
            if not changed and self._must_stay(push, key, now):
                raise Violation(f"{where} has lost the row of {push}")
            if changed and self._must_be_gone(push, key, asked):
                raise Violation(
                    f"{where} still has the row of {push}, {asked - self._used(push):.2f} s later"
                )

    def _check_exact(self, found: dict[int, Tensor], step: int) -> None:
        wanted = [dict(zip(self._every_key(), each, strict=True)) for each in self.values_at(step)]
        if any(all(torch.equal(value, each[key]) for key, value in found.items()) for each in wanted):
            return
        if self._most and self._is_repeated(found, wanted[-1], step):
            return
        wrong = [
            (key, value.tolist(), wanted[-1][key].tolist())
            for key, value in found.items()
            if not torch.equal(value, wanted[-1][key])
        ]
        raise Violation(
            f"the second table of server {self._server} differs as of step {step} in {len(wrong)} rows: "
            f"{wrong[:5]}"
        )

    def _is_repeated(self, found: dict[int, Tensor], wanted: dict[int, Tensor], step: int) -> bool:
        """Return True if a trainer that repeats a step differs only in rows that this step has evicted."""
        if step >= self._model.plan.steps:
            return False
        after = dict(zip(self._every_key(), self.values_at(step + 1)[0], strict=True))
        return all(
            torch.equal(value, wanted[key])
            or (torch.equal(value, self._fresh(key)) and torch.equal(value, after[key]))
            for key, value in found.items()
        )

    def _fresh(self, key: int) -> Tensor:
        return SparseTable(self.spec).pull(torch.tensor([key]), insert=False)[0]

    def _is_once(self, value: Tensor, wanted: Tensor) -> bool:
        return isinstance(self.spec.rule, _BY_STEP) or torch.allclose(value, wanted, rtol=0.02, atol=0.02)

    def _used(self, push: Push) -> float:
        """Return when a push was certainly applied, or infinity."""
        model = self._model
        step = [push]
        if model.plan.sync:
            step = [push._replace(rank=rank) for rank in range(model.starts[push.start])]
        return max(model.known.get((self._server, each), math.inf) for each in step)

    def _must_stay(self, push: Push, key: int, now: float) -> bool:
        """Return True if the row of an applied push cannot be missing."""
        model, rows = self._model, self.spec.rows
        sent = model.sent[self._server, push]
        if rows.entry.kind is EntryKind.PROBABILITY and not self._is_drawn(key):
            return False
        if self.counts and (rows.entry.a > 1 or rows.bound is not None or model.shrunk):
            return False
        if self.spec.seen and sum(end > sent for _, end in model.shrunk) > self._days:
            return False
        if self.ttl_s and (now - sent > 0.98 * self.ttl_s or self._clock_unknown):
            return False
        if self._most and "spill" not in model.plan.on:
            if self.ttl_s:  # rows that were used between two ticks leave in any order
                return False
            used = self._used_since(sent)
            # Uses of 8 units ago have no order. Hasty clocks need as many uses for them as rows fit.
            if "hasty" in model.plan.on and len(used) > 0.7 * self._most:
                return False
            return rows.bound.policy is EvictionPolicy.LRU and len(set(used)) < 0.7 * self._most - 2  # type: ignore[union-attr]
        return True

    def _must_be_gone(self, push: Push, key: int, asked: float) -> bool:
        model, rows = self._model, self.spec.rows
        if rows.entry.kind is EntryKind.PROBABILITY and not self._is_drawn(key):
            return True
        if self.counts and rows.entry.a > 1 and not model.vague:
            return True  # it was pulled once
        used = self._used(push)
        # Without a log, a server that was killed may have lost what happened before.
        since = self.up_since if model.plan.durability == "snapshot" else used
        days = sum(max(used, since) < begun and end < asked for begun, end in model.shrunk)
        if self.spec.seen and days > self._days:
            return True
        if not self.ttl_s or self._clock_unknown or model.plan.disk_errors or model.plan.late_errors:
            return False
        return asked > max(used + 1.01 * self.ttl_s, self.up_since) + _LATE_S

    @property
    def _days(self) -> float:
        return self._model.plan.policy.delete_after_unseen_days

    @property
    def _clock_unknown(self) -> bool:
        """True if the clock of the node may have been set while no server ran."""
        plan = self._model.plan
        ends = plan.server_kills or plan.disk_errors or plan.late_errors or "resize" in plan.on
        return bool(plan.clock_steps and ends)

    def _is_drawn(self, key: int) -> bool:
        rows, admitted = self.spec.rows, np.empty(1, np.bool_)
        drawn(np.array([key]), np.uint64(rows.init.seed), float(rows.entry.a), admitted)
        return bool(admitted[0])

    def _used_since(self, sent: float) -> list[int]:
        """Return the keys of rows that may have been used since a push was sent, each as often as it was."""
        model, server = self._model, self._server
        later = [
            push
            for where, push in model.sent
            if where == server and model.known.get((where, push), math.inf) >= sent
        ]
        return [key for push in later for key in model.keys(server, push)]
