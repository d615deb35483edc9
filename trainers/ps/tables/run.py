"""Read and update a run of sparse tables by one call. The tables of a run have consecutive numbers and the
same size and rule. The result is the same as with one call for each table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetrun.frozen import frozen
from trainers.kernels.compiled import Flags, Floats, Keys
from trainers.ps.kernels.batch import all_finite, array_of
from trainers.ps.kernels.counts import COUNTERS, MISSED_KEYS, REGISTERS, count_pulls, count_pushes
from trainers.ps.kernels.index import ENOUGH
from trainers.ps.kernels.runs import (
    COLUMNS,
    Run,
    accumulate,
    count_uses_run,
    initial_run,
    insert_run,
    pull_run,
    without_room,
)
from trainers.ps.tables.dense import numbers_of, run_kernel_of
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import KeysError, NotFiniteError, ShapeError
from trainers.ps.tables.storage import MAX_ROWS

NOT_IN = -1
"""A value instead of a number of keys. The table is not in the push, so it does not count a step."""

_NO_STATS = np.empty((0, 2), np.float32)

_SAMPLED_ROWS = 32
"""The rows of each table that a Sampler keeps from a push."""

Spans = NDArray[np.int64]
"""The number of keys of each table of a run, (tables,) int64."""


def starts_of(spans: Spans) -> Keys:
    """Return the starts of the tables, (tables + 1,) int64. The keys of table t are at [starts[t], starts[t +
    1]).
    """
    starts = np.empty(len(spans) + 1, np.int64)
    accumulate(spans, starts)
    return starts


def fitting_starts(spans: Spans, keys: int) -> Keys | None:
    """Return the starts for unchecked spans, or None unless they are valid and add up to so many keys."""
    starts = np.empty(len(spans) + 1, np.int64)
    return starts if accumulate(spans, starts) and starts[-1] == keys else None


def positions_of(starts: Keys, missing: Keys, counts: Keys) -> Keys:
    """Return the positions of the missing keys of `pull_run` among all keys."""
    firsts = np.repeat(starts[: len(counts)], counts)
    within = np.arange(len(firsts)) - np.repeat(np.cumsum(counts) - counts, counts)
    found: Keys = missing[firsts + within] + firsts
    return found


_WORTH = 1 << 16
"""The row values per thread below which one thread does the work. Starting another takes 30 microseconds."""

Work = Callable[[Keys | slice, Keys, Keys], int]
"""A kernel that returns the number of keys without a row.

Its arguments are tables by number (some with only a part of their keys), the bounds of their keys, and an
array for the number of keys of each table without a row.
"""


class Threads:
    """Several threads for the kernels of one request (`server_threads`), including the calling thread.

    Kernels run without the GIL. Each thread has a part of the keys, which consists of whole tables and of
    some keys of tables that span several parts. Parts share no key, so the result is equal to the result of
    one thread, to the bit.
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count - 1, "rows") if count > 1 else None

    def do(self, work: Work, starts: Keys, missing: Keys, counts: Keys, size: int) -> int:
        """Run `work` in several threads, with the result of one thread.

        The missing keys of table t, which has the keys [starts[t], starts[t + 1]), are in `missing` from
        starts[t] on, and there are counts[t] of them. `size` is the number of values per row.
        """
        total = int(starts[-1])
        count = min(self.count, total * size // _WORTH)
        if self._pool is None or count < 2:
            return work(slice(None), starts, counts)
        cuts = total * np.arange(count + 1) // count
        bounds = np.unique(np.concatenate([starts, cuts]))
        owners = np.searchsorted(starts, bounds[:-1], side="right") - 1
        firsts, found = np.searchsorted(bounds, cuts), np.zeros(len(owners), np.int64)

        def part(number: int) -> int:
            first, last = firsts[number], firsts[number + 1]
            return work(owners[first:last], bounds[first : last + 1], found[first:last])

        others = [self._pool.submit(part, number) for number in range(1, count)]
        result = part(0) + sum(other.result() for other in others)
        counts[:] = 0
        for place in np.flatnonzero(found):  # join the parts of a table, relative to its first key
            owner, bound, some = owners[place], bounds[place], found[place]
            begin = starts[owner] + counts[owner]
            missing[begin : begin + some] = missing[bound : bound + some] + (bound - starts[owner])
            counts[owner] += some
        return result


ONE_THREAD = Threads()


class Lines:
    """The lines of all sparse tables of a server (see `kernels.runs`), by number."""

    def __init__(self, tables: dict[int, SparseTable], threads: Threads = ONE_THREAD) -> None:
        self._tables, self._threads = tables, threads
        self._lines = np.zeros((max(tables, default=-1) + 1, COLUMNS), np.int64)
        self._counts = np.zeros((len(self._lines), COUNTERS), np.int64)
        self.seen = np.zeros((len(self._lines), REGISTERS), np.uint8)
        """The registers of pulled keys by table number, see `kernels.counts`."""
        self.sampler = Sampler()
        for number, table in tables.items():
            table.publish(self._lines[number])
            table.counts.row = self._counts[number]
        self._runs: dict[tuple[int, int], SparseRun] = {}

    def run(self, first: int, count: int) -> SparseRun:
        """Return the run of `count` tables from `first` on. Raises KeysError if these tables cannot be used
        together.
        """
        run = self._runs.get((first, count))
        if run is None:
            if not 0 < count <= len(self._tables):
                raise KeysError(f"{count} tables from {first} on are not sparse tables of this server")
            tables = [self._tables.get(number) for number in range(first, first + count)]
            found = [each for each in tables if each is not None]
            if len(found) != count:
                raise KeysError(
                    f"tables {first} to {first + count - 1} are not all sparse tables of this server"
                )
            if len(self._runs) > 4 * len(self._tables):  # for a sender that groups tables in ever new ways
                self._runs.clear()
            some = slice(first, first + count)
            use = Use(first, self._counts[some], self.seen[some], self.sampler)
            run = self._runs[first, count] = SparseRun(found, self._lines[some], self._threads, use)
        return run


class Sampler:
    """Keep copies of the next few requests for measurements.

    `pulls` and `pushes` hold the number of the first table, the starts, and the keys or some rows of
    gradients.
    """

    def __init__(self) -> None:
        self.wanted_pulls = self.wanted_pushes = 0
        self.pulls: list[tuple[int, Keys, Keys]] = []
        self.pushes: list[tuple[int, Keys, Floats]] = []

    def want(self, pulls: int, pushes: int) -> None:
        """Sample so many pulls and pushes, and drop the former samples."""
        self.wanted_pulls, self.wanted_pushes = pulls, pushes
        self.pulls, self.pushes = [], []


@frozen
class Use:
    """The counters of a run, in the arrays of all tables from number `first` on."""

    first: int
    counts: Keys
    seen: Flags
    sampler: Sampler

    def pulled(self, starts: Keys, keys: Keys) -> None:
        count_pulls(self.counts, self.seen, starts, keys)
        if self.sampler.wanted_pulls:
            self.sampler.wanted_pulls -= 1
            self.sampler.pulls.append((self.first, starts, keys.copy()))

    def pushed(self, starts: Keys, grad: Floats) -> None:
        """Count a push, and sample some gradients of each table from `grad`, (n, dim) float32."""
        count_pushes(self.counts, starts)
        if self.sampler.wanted_pushes:
            self.sampler.wanted_pushes -= 1
            spans = np.minimum(np.diff(starts), _SAMPLED_ROWS)
            some = starts_of(spans)
            places = np.arange(some[-1]) + np.repeat(starts[:-1] - some[:-1], spans)
            self.sampler.pushes.append((self.first, some, grad[places]))


class SparseRun:
    """Some tables and their lines. The methods raise the same errors as SparseTable.

    `spans` (tables,) int64 gives how many of the keys belong to each table, one after another. `use` holds
    the counters of requests, or None.
    """

    def __init__(
        self,
        tables: Sequence[SparseTable],
        lines: Keys,
        threads: Threads = ONE_THREAD,
        use: Use | None = None,
    ) -> None:
        first = tables[0].spec
        self._threads, self._use = threads, use
        for spec in (table.spec for table in tables):
            if (spec.size, spec.rule, spec.rows.dtype) != (first.size, first.rule, first.rows.dtype):
                raise KeysError(f"tables {first.name!r} and {spec.name!r} differ in size, rule or type")
        self._tables = tables
        self._name = first.name if len(tables) == 1 else f"{first.name} to {tables[-1].spec.name}"
        self._rule = first.rule
        self._update: Callable[..., int] | None = run_kernel_of(first.rule)
        self.size = first.size
        bounded = {table.budget is not None for table in tables}
        self._together = all(table.plain for table in tables) and len(bounded) == 1
        """True if one call can handle all tables, because they have no statistics and admit every key."""
        self._budgets = list({id(table.budget): table.budget for table in tables if table.budget}.values())
        fresh = [table.fresh for table in tables]
        self._run = Run(
            lines=lines,
            kinds=np.array([each.kind for each in fresh], np.int64),
            seeds=np.array([each.seed for each in fresh], np.uint64),
            numbers=np.array([(each.a, each.b, each.state) for each in fresh], np.float32),
        )
        self._bounds = np.array([table.bounds for table in tables], np.float32)

    def pull(self, spans: Spans, keys: Tensor, *, insert: bool) -> Tensor:
        """Return rows in a fresh tensor, (n, size) float32. See SparseTable.pull."""
        starts = self._starts(spans, keys)
        if insert and self._use is not None:
            self._use.pulled(starts, array_of(keys))
        if not self._together:
            out = torch.empty(len(keys), self.size)
            for table, (start, stop) in zip(self._tables, pairwise(starts.tolist()), strict=True):
                if start < stop:
                    out[start:stop] = table.pull(keys[start:stop], insert=insert)
            return out
        wanted = array_of(keys)
        self._before_use(starts, wanted)
        rows = np.empty((len(wanted), self.size), np.float32)
        missing, counts = np.empty(len(wanted), np.int64), np.zeros(len(spans), np.int64)
        lines = self._run.lines

        def work(tables: Keys | slice, bounds: Keys, found: Keys) -> int:
            return pull_run(lines[tables], bounds, wanted, rows, missing, found)

        if self._threads.do(work, starts, missing, counts, self.size):
            initial_run(self._run, starts, wanted, missing, counts, rows.reshape(-1))
            if insert and self._use is not None:
                self._use.counts[:, MISSED_KEYS] += counts
        return torch.from_numpy(rows)

    def check(self, spans: Spans, keys: Tensor, grad: Tensor, stats: Tensor | None = None) -> None:
        """Raise TableError for arguments that `apply` would refuse, and for NaN or infinity."""
        self._starts(spans, keys)
        wanted = (keys.shape[0], self.size)
        if grad.shape != wanted or grad.dtype is not torch.float32:
            raise ShapeError(
                f"tables {self._name} need rows of shape {list(wanted)}, but were given {list(grad.shape)}"
            )
        if stats is not None or self._update is None:
            for table in self._tables:
                table.check(keys[:0], grad[:0], None if stats is None else stats[:0])
        if stats is not None and stats.shape != (keys.shape[0], 2):
            raise ShapeError(f"tables {self._name} need statistics of 2 columns for each key")
        if not all_finite(grad) or not (stats is None or all_finite(stats)):
            raise NotFiniteError(f"a gradient for tables {self._name} contains NaN or infinity")

    def make_room(self, pieces: Sequence[tuple[Spans, Tensor]], *, filtered: bool = True) -> None:
        """Ensure memory for the rows that `apply` of all these spans and keys will need, or `assign` if not
        `filtered`.

        Raises FullError if memory is missing.
        """
        starts = [self._starts(spans, keys) for spans, keys in pieces]
        lacking = np.zeros(len(self._tables), np.bool_)
        if without_room(self._run.lines, sum(starts[1:], start=starts[0]), MAX_ROWS, lacking):
            for number in np.flatnonzero(lacking).tolist():
                some = [
                    keys[start[number] : start[number + 1]]
                    for start, (_, keys) in zip(starts, pieces, strict=True)
                ]
                self._tables[number].make_room(some, filtered=filtered)

    def apply(
        self,
        spans: Spans,
        keys: Tensor,
        grad: Tensor,
        lr: float,
        stats: Tensor | None = None,
    ) -> None:
        """Update every table of the push once. See SparseTable.apply."""
        starts = self._starts(spans, keys)
        if self._use is not None:
            self._use.pushed(starts, array_of(grad))
        if not self._together:
            for table, span, start in zip(self._tables, spans, starts[:-1], strict=True):
                if span != NOT_IN:
                    some = slice(start, start + span)
                    table.apply(keys[some], grad[some], lr, None if stats is None else stats[some])
            return
        assert self._update is not None
        updated, gradients = array_of(keys), array_of(grad)
        missing, counts = np.empty(len(updated), np.int64), np.zeros(len(spans), np.int64)
        self._before_use(starts, updated)
        options = self._options(spans, lr)
        lines, update = self._run.lines, self._update

        def work(tables: Keys | slice, bounds: Keys, found: Keys) -> int:
            return update(lines[tables], bounds, updated, gradients, options[tables], missing, found)

        # Use one thread during a cut, because one counter assigns the images of unread rows.
        threads = ONE_THREAD if any(table.is_cut for table in self._tables) else self._threads
        if threads.do(work, starts, missing, counts, self.size):
            self._insert(starts, updated, missing, counts)
            positions = positions_of(starts, missing, counts)
            update(
                lines, starts_of(counts), updated[positions], gradients[positions], options, missing, counts
            )
        if self._budgets:
            count_uses_run(self._run.lines, starts, updated, _NO_STATS)
            for budget in self._budgets:
                budget.settle()

    def _before_use(self, starts: Keys, keys: Keys) -> None:
        if self._budgets:
            for budget in self._budgets:
                budget.before_use()
            for table, start, stop in zip(self._tables, starts[:-1], starts[1:], strict=True):
                if table.bounded is not None:
                    table.bounded.before_use(keys[start:stop])

    def _options(self, spans: Spans, lr: float) -> Floats:
        """Count a step of every table in the push, and return the kernel's options for each table."""
        by_step: dict[int, tuple[float, ...]] = {}
        lines: list[tuple[float, ...]] = []
        for table, span in zip(self._tables, spans.tolist(), strict=True):
            if span != NOT_IN:
                table.begin_update(span)
            numbers = by_step.get(table.step)
            if numbers is None:
                numbers = by_step[table.step] = numbers_of(self._rule, max(1, table.step), lr)
            lines.append(numbers)
        options = np.empty((len(spans), 2 + len(lines[0])), np.float32)
        options[:, :2] = self._bounds
        options[:, 2:] = lines[0] if len(by_step) == 1 else lines
        return options

    def _insert(self, starts: Keys, keys: Keys, missing: Keys, counts: Keys) -> Keys:
        slots = np.empty(len(keys), np.int64)
        number, done = 0, 0
        while number < len(self._tables):
            number, done, needs = insert_run(self._run, starts, keys, missing, counts, slots, number, done)
            if needs != ENOUGH:
                self._tables[number].grow(needs, int(counts[number]))
        return slots

    def _starts(self, spans: Spans, keys: Tensor) -> Keys:
        starts = fitting_starts(spans, keys.shape[0]) if len(spans) == len(self._tables) else None
        if starts is None or keys.dim() != 1 or keys.dtype is not torch.int64:
            raise KeysError(
                f"tables {self._name} were given spans {spans.tolist()} and keys {list(keys.shape)} in "
                f"{keys.dtype}. Keys must be (n,) int64, and the spans must add up to n"
            )
        return starts
