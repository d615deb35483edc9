"""Sparse tables of rows by int64 key, with update rule, entry filter and statistics. `make_table` makes a
table of either kind from a spec.

`storage` handles the memory, and the kernels do the arithmetic. A call that is refused (TableError) leaves
the table unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainers.kernels.compiled import Floats, Keys, Mask
from trainers.ps.kernels.batch import all_finite, array_of
from trainers.ps.kernels.counts import EVICTED, TableCounts
from trainers.ps.kernels.eviction import FLOORS, TOTAL, find_evicted
from trainers.ps.kernels.rows import (
    DTYPE,
    NOT_IN_SNAPSHOT,
    NOTHING,
    UNIFORM,
    UNPUBLISHED,
    UNSAVED,
    Fresh,
    add_seen,
    count_up,
    drawn,
    gather,
    initial_rows,
    pull,
    remove_keys,
    revise,
    settle_flags,
    without_row,
    write,
)
from trainers.ps.tables.budget import Budget, Budgets, Clock
from trainers.ps.tables.dense import DenseTable, Kernel, kernel_of, make_dense, numbers_of
from trainers.ps.tables.disk import RowsOnDisk
from trainers.ps.tables.removal import BoundedRows, PassingDay
from trainers.ps.tables.rules import state_widths
from trainers.ps.tables.spec import (
    EntryKind,
    KeysError,
    NotFiniteError,
    RowOptions,
    RowType,
    ShapeError,
    ShrinkPolicy,
    TableError,
    TableKind,
    TableSpec,
)
from trainers.ps.tables.storage import NOTHING_NEW, Candidates, Cut, SparseCut, SparseRows, Storage

# ---- Keys without a row, and keys that had one.


class WaitingKeys:
    """Keys that wait for an entry filter of kind COUNT. A key gets its row when it was pulled `needed` times
    in training. Until then, about 30 bytes here count the key. The key is forgotten if it was not pulled for
    some days, or if the budget evicts it.
    """

    def __init__(self, needed: float, budget: Budget | None) -> None:
        self._needed = np.float32(needed)
        # The number of pulls, and the days since the last pull.
        self.storage = Storage(2, 0, 0 if budget is None else 1)
        self.bounded = None if budget is None else BoundedRows(self.storage, budget, lambda keys: None)
        self._day: PassingDay | None = None

    def __len__(self) -> int:
        return len(self.storage)

    def pulled(self, keys: Keys) -> Mask:
        """Count pulls of these keys. Return a mask of the keys that get a row now."""
        admitted = np.empty(len(keys), np.bool_)
        if self.bounded is not None:
            self.bounded.before_use(keys)
        if self._day is not None:
            self._day.pass_for(keys)
        slots = self.storage.insert(keys, _UNINITIALIZED)  # before `rows`, because this may grow the storage
        count_up(self.storage.rows, slots, self._needed, admitted)
        if self.bounded is not None:
            self.bounded.count_uses(keys)
        if admitted.any():
            if self._day is not None:
                self._day.pass_for_last(len(keys))
            if self.bounded is not None:
                self.bounded.uncount(keys[admitted])
            remove_keys(*self.storage.arrays, keys[admitted])
        return admitted

    def begin_day(self, policy: Floats) -> None:
        """Start a day for the candidates. See PassingDay."""
        self._begin(PassingDay(self.storage, policy, lambda keys: None))

    def pass_some(self, rows: int) -> bool:
        """Let the day pass for so many candidates. Return True when the day has ended."""
        if self._day is not None:
            self._day.pass_some(rows)
            if self._day.over:
                self._begin(None)
        return self._day is None

    def _begin(self, day: PassingDay | None) -> None:
        self._day = day
        if self.bounded is not None:
            self.bounded.day = day

    def counts(self) -> tuple[Keys, Floats, Floats, Floats | None]:
        """Return copies of the candidates (n,) int64, and their pulls, unseen days and stamps (n,) float32.
        The stamps are None if the candidates are not bounded.
        """
        keys = self.storage.keys(0, len(self))
        columns = [self.storage.column(place).copy() for place in range(2 if self.bounded is None else 3)]
        if self.bounded is None:
            return keys, columns[0], columns[1], None
        evicted = np.zeros(len(keys), np.bool_)
        find_evicted(keys, columns[2], self.storage.uses.clock[FLOORS:], evicted)
        counts, days, stamps = (column[~evicted] for column in columns)
        return keys[~evicted], counts, days, stamps

    def load(self, keys: Keys, counts: Floats, days: Floats, stamps: Floats | None) -> None:
        """Load candidates from the result of `counts`."""
        if self.bounded is not None:
            self.bounded.uncount(keys)
        slots = self.storage.insert(keys, _UNINITIALIZED)
        self.storage.column(0)[slots] = counts
        self.storage.column(1)[slots] = days
        if self.bounded is None:
            return
        if stamps is None:  # candidates of a table without a bound
            self.bounded.count_uses(keys)
        else:
            self.storage.column(2)[slots] = stamps
            self.bounded.count_loaded(slots)


class RemovedKeys:
    """Keys whose rows were removed since the last save or snapshot that an incremental save may follow."""

    def __init__(self) -> None:
        self._since: list[Keys] | None = None
        self._kept, self._cut = False, list[Keys]()
        self.count = 0
        self.complete = True

    def add(self, keys: Keys) -> None:
        if self._since is not None and len(keys):
            self._since.append(keys.copy())
            self.count += len(keys)

    def forget(self) -> None:
        """Drop the keys, because there are too many to keep. An incremental save cannot follow."""
        self._since, self._cut, self.count, self.complete = None, [], 0, False

    def keys(self) -> Keys:
        """Return a copy of the keys until now."""
        return np.concatenate([np.empty(0, np.int64), *(self._since or ())])

    def begin_cut(self) -> None:
        """Keep keys from now on separate, because the cut contains the earlier keys."""
        self._kept, self._cut, self._since = self._since is not None, self._since or [], []

    def end_cut(self, marked: bool) -> None:
        """End the cut. With `marked`, the next incremental save follows this cut."""
        if self._since is None:  # the keys were forgotten
            return
        if marked:
            self.complete = True
        else:
            self._since = self._cut + self._since if self._kept else None
        self._cut = []
        self.count = sum(map(len, self._since or []))


_UNINITIALIZED = NOTHING_NEW._replace(kind=UNIFORM)


def bounds_of(options: RowOptions) -> tuple[float, float]:
    """Return the low and high bounds. For rows in 16 bits, return the nearest values of their type in
    between, so that no value is rounded beyond a bound.
    """
    low, high = options.low, options.high
    if options.dtype is RowType.FLOAT32:
        return low, high
    return min(each for each in _near(low, options) if each >= low), max(
        each for each in _near(high, options) if each <= high
    )


def _near(bound: float, options: RowOptions) -> list[float]:
    """Return the value of the rows' type that is nearest to a bound, and its neighbours."""
    bits = torch.tensor(bound, dtype=torch.float64).to(options.dtype.dtype).view(torch.int16)
    near: list[float] = torch.stack([bits - 1, bits, bits + 1]).view(options.dtype.dtype).tolist()
    return near


_AT_ONCE = 4096
"""The rows that are inserted and then written together. They are few enough to stay in the caches."""

_MANY = 1 << 40

_MOST_REMOVED, _REMOVED_OF = 1 << 16, {UNSAVED: 1, NOT_IN_SNAPSHOT: 4, UNPUBLISHED: 4}
"""The most removed keys to keep for an incremental save. The limit adds _MOST_REMOVED to the number of rows
divided by _REMOVED_OF. No bound includes this memory, and beyond the limit a full snapshot writes little
more.
"""

_NO_STATE = np.empty((0, 0, 0), np.float32)
_NO_ROW_STATE = np.empty((0, 0), np.float32)
_NO_STATISTICS = np.empty((0, 3), np.float32)
_NO_STATS = np.empty((0, 2), np.float32)


class SparseTable:
    """Rows of (dim,) values. They are float32 wherever they are read or given. The stored type may differ.
    Updates round values at random (see `kernels.rounding`), but `assign` and `load` round to the nearest.
    `keys` is (n,) int64, any values in any order. Use a table in one thread. Another thread may read a Cut.

    A key that occurs several times in a request is not merged. It is read or updated several times, in the
    order given.
    """

    def __init__(self, spec: TableSpec, budgets: Budgets | None = None) -> None:
        self.spec = spec
        self.step = 0
        """The number of updates so far."""
        self.counts = TableCounts()
        self._update: Kernel | None = kernel_of(spec.rule)
        rows = spec.rows
        self._counts = spec.seen
        states = sum(state_widths(spec.rule, spec.size))
        self._storage = Storage(spec.size, states, spec.statistics, dtype=rows.dtype, seed=rows.init.seed)
        self.bounds = bounds_of(rows)
        """The bounds of every value after an update."""
        budgets = budgets or Budgets()
        self.bounded: BoundedRows | None = None
        if rows.bound is not None:
            budget = budgets.of_rows(rows.bound)
            if budgets.disk is None:
                self.bounded = BoundedRows(self._storage, budget, self._note_evicted)
            else:
                self.bounded = RowsOnDisk(self._storage, budget, budgets.disk)
        self._waiting: WaitingKeys | None = None
        if rows.entry.kind is EntryKind.COUNT:
            of_waiting = None if rows.bound is None else budgets.of_candidates(rows.bound)
            self._waiting = WaitingKeys(rows.entry.a, of_waiting)
        self.fresh = Fresh(
            kind=int(rows.init.kind),
            a=np.float32(rows.init.a),
            b=np.float32(rows.init.b),
            seed=np.uint64(rows.init.seed),
            state=np.float32(spec.rule.initial_state),
        )
        self._cut: Cut | None = None
        self._day: PassingDay | None = None
        self._shrinking = False
        self._removed = {flag: RemovedKeys() for flag in _REMOVED_OF}

    def __len__(self) -> int:
        return len(self._storage) + self.on_disk

    @property
    def alive(self) -> int | None:
        """The number of rows without evicted ones. None if rows are on disk, or if tables share a budget."""
        if self.bounded is None:
            return len(self)
        budget = self.bounded.budget
        unknown = budget.on_disk or budget.bound.shared
        return None if unknown else int(budget.uses.clock[TOTAL]) // self.bounded.row_cost

    @property
    def kept(self) -> tuple[Storage, Storage | None, RowsOnDisk | None]:
        """The storages of rows and candidates, and the rows on disk, for readers that change nothing."""
        candidates = None if self._waiting is None else self._waiting.storage
        return self._storage, candidates, self._disk

    @property
    def on_disk(self) -> int:
        """The number of rows on disk."""
        return 0 if (disk := self._disk) is None else disk.away

    @property
    def _disk(self) -> RowsOnDisk | None:
        return self.bounded if isinstance(self.bounded, RowsOnDisk) else None

    @property
    def plain(self) -> bool:
        """True if the table has no statistics and admits every key, so kernels may run for several tables at
        once.
        """
        return not self._counts and self.spec.rows.entry.kind is EntryKind.ALL

    @property
    def budget(self) -> Budget | None:
        return None if self.bounded is None else self.bounded.budget

    @property
    def budgets(self) -> Sequence[Budget]:
        """The budgets of its rows and its candidates."""
        return [each.budget for each in (self.bounded, self._counting) if each is not None]

    @property
    def _counting(self) -> BoundedRows | None:
        """The candidates, or None if they are not bounded."""
        return None if self._waiting is None else self._waiting.bounded

    def publish(self, line: Keys) -> None:
        """Publish the line of the table. See Storage.publish."""
        self._storage.publish(line)

    def grow(self, needs: int, rows: int) -> None:
        """Grow the storage. See Storage.grow."""
        self._storage.grow(needs, rows)

    def begin_update(self, rows: int) -> None:
        """Count an update of so many rows that is about to be made."""
        self.step += 1
        self._storage.begin_update(self.step)
        if self._cut is not None:
            self._cut.expect(rows)

    def check_assign(self, keys: Tensor | None, values: Tensor) -> None:
        """Raise TableError for arguments that `assign` would refuse."""
        wanted = (self._checked(keys).shape[0], self.spec.size)
        if values.shape != wanted or values.dtype is not torch.float32:
            raise ShapeError(
                f"table {self.spec.name!r} needs rows of shape {list(wanted)} in float32, but was given "
                f"{list(values.shape)} in {str(values.dtype).removeprefix('torch.')}"
            )

    def assign(self, keys: Tensor | None, values: Tensor) -> None:
        """Insert or overwrite rows, and reset their state and statistics. Entry filters do not apply."""
        self.check_assign(keys, values)
        self._write(self._array(keys), array_of(values), _NO_STATE, _NO_ROW_STATE, _NO_STATISTICS)

    def revise(self, keys: Tensor | None, values: Tensor) -> None:
        """Insert or overwrite values as `assign` does, but keep state and statistics."""
        self.check_assign(keys, values)
        found = self._array(keys)
        self._before_use(found)
        if self._cut is not None:
            self._cut.expect(len(found))
        slots = self._storage.insert(found, self.fresh)  # before `rows`, because this may grow the storage
        revise(self._storage.rows, slots, array_of(values))
        self._count_uses(found)

    def pull(self, keys: Tensor | None, *, insert: bool = True) -> Tensor:
        """Return rows in a fresh tensor, (n, dim) float32. A key without a row reads as its initial value,
        and a push makes its row. If an entry filter counts lookups, the key gets its row here, provided that
        `insert` is true and the filter admits it. Raises FullError if memory for the row is missing.
        """
        wanted = self._array(keys)
        self._before_use(wanted)
        out = np.empty((len(wanted), self.spec.size), np.float32)
        missing = np.empty(len(wanted), np.int64)
        count = pull(*self._storage.arrays, wanted, out, missing)
        if insert and count:
            self.counts.missed(count)
        if count:
            self._pull_missing(wanted, missing[:count], out, insert)
        return torch.from_numpy(out)

    def check(self, keys: Tensor | None, grad: Tensor, stats: Tensor | None = None) -> None:
        """Raise TableError for arguments that `apply` would refuse, and for NaN or infinity."""
        self.check_assign(keys, grad)
        self._update_of(grad, stats)
        if not all_finite(grad) or not (stats is None or all_finite(stats)):
            raise NotFiniteError(f"a gradient for table {self.spec.name!r} contains NaN or infinity")

    def make_room(self, keys: Sequence[Tensor], *, filtered: bool) -> None:
        """Ensure that these keys get their rows in an `apply`, or in an `assign` if not `filtered`. If memory
        is not certain, make the rows now. Raises FullError if memory is missing.
        """
        if self._storage.has_room(sum(map(len, keys))):
            return
        for some in map(self._array, keys):
            if self.bounded is not None:
                self.bounded.before_use(some)
            if not filtered:
                self._storage.insert(some, self.fresh)
                continue
            missing = np.empty(len(some), np.int64)
            count = without_row(*self._storage.arrays, some, missing)
            self._insert_pushed(some, missing[:count])

    def apply(self, keys: Tensor | None, grad: Tensor, lr: float, stats: Tensor | None = None) -> None:
        """Update the table once, even without keys, because torch counts the steps of the whole table on any
        server. A key without a row gets one first, or is dropped if the entry filter does not admit it.

        `stats` (n, 2) float32 holds shows and clicks to add, for tables with statistics. Raises TableError
        for other shapes. Raises FullError if memory for new rows is missing. Part of the push is applied in
        this case. `make_room` rules this case out.
        """
        self.check_assign(keys, grad)
        update = self._update_of(grad, stats)
        updated, gradients = self._array(keys), array_of(grad)
        missing = np.empty(len(updated), np.int64)
        self._before_use(updated)
        # Count the update only now, because an update that finds no memory or no disk is not a step.
        self.begin_update(len(updated))
        numbers = numbers_of(self.spec.rule, self.step, lr)
        options = np.array((*self.bounds, *numbers), np.float32)
        count = update(*self._storage.arrays, updated, gradients, options, missing)
        if count:
            self._apply_missing(updated, gradients, options, missing[:count])
        shown = _NO_STATS if stats is None else array_of(stats)
        if self._counts:
            add_seen(*self._storage.arrays, updated, shown)
        self._count_uses(updated, shown)

    def remove(self, keys: Tensor) -> None:
        """Remove the existing rows of these keys."""
        removed, storage = self._array(keys), self._storage
        if self.bounded is not None:
            self.bounded.uncount(removed)
        remove_keys(*storage.arrays, removed)
        self._note_removed(removed)

    def clocks(self) -> tuple[Clock, Clock]:
        """Return the clocks of the budgets of rows and candidates, each empty if they are not bounded."""
        rows, candidates = self.bounded, self._counting
        return (
            () if rows is None else rows.budget.clock(),
            () if candidates is None else candidates.budget.clock(),
        )

    def restore_clocks(self, rows: Sequence[Clock], candidates: Sequence[Clock]) -> None:
        """Continue from the clocks of the tables whose rows and candidates will be loaded."""
        for bounded, clocks in ((self.bounded, rows), (self._counting, candidates)):
            if bounded is not None and clocks:
                bounded.budget.restore(clocks)

    def _note_evicted(self, keys: Keys) -> None:
        self.counts.evicted(keys)
        self._note_removed(keys)

    def _note_shrunk(self, keys: Keys) -> None:
        self.counts.removed(keys)
        self._add_removed(keys)

    def _note_removed(self, keys: Keys) -> None:
        self._add_removed(keys)
        for flag, removed in self._removed.items():
            if removed.count > len(self) // _REMOVED_OF[flag] + _MOST_REMOVED:
                removed.forget()

    def _add_removed(self, keys: Keys) -> None:
        for removed in self._removed.values():
            removed.add(keys)

    def _count_uses(self, keys: Keys, stats: Floats = _NO_STATS) -> None:
        if self.bounded is not None:
            self.bounded.count_uses(keys, stats)

    def begin_shrink(self, policy: ShrinkPolicy) -> None:
        """Let a day pass (see ShrinkPolicy), in slices. Call `shrink_some` until it returns the number of
        removed rows. You may use but not cut the table meanwhile, and it behaves as if the day were over. Its
        budgets evict nothing until `release`. A server that recovers must call `release` at the same moment.

        Raises TableError without statistics and candidates, and while a cut is open, because slots move.
        """
        if not self.spec.ages:
            raise TableError(f"table {self.spec.name!r} has no statistics, which shrink needs")
        if self._cut is not None or self._shrinking:
            raise TableError(f"table {self.spec.name!r} is being saved or shrunk; shrink it afterwards")
        numbers, self._shrinking = policy.numbers(), True
        for budget in self.budgets:
            budget.held = True
        if self._waiting is not None:
            self._waiting.begin_day(numbers)
        if self._counts:
            self._begin(PassingDay(self._storage, numbers, self._note_shrunk))

    def sweep(self) -> int:
        """Remove the records of all evicted rows. Return the number of rows evicted so far."""
        while self.bounded is not None and self.bounded.sweep(_MANY):
            pass
        return int(self.counts.row[EVICTED])

    def release(self) -> None:
        """Let the budgets evict again after a shrink."""
        for budget in self.budgets:
            budget.held = False
            budget.settle()

    def shrink_some(self, rows: int) -> int | None:
        """Shrink a slice of so many rows. After the last slice, return the number of all removed rows, else
        None.
        """
        if self._waiting is not None and not self._waiting.pass_some(rows):
            return None
        removed = 0
        if self._day is not None:
            self._day.pass_some(rows)
            if not self._day.over:
                return None
            removed = self._day.removed
            self._begin(None)
        self._shrinking = False
        return removed

    def _begin(self, day: PassingDay | None) -> None:
        self._day = day
        if self.bounded is not None:
            self.bounded.day = day

    @property
    def is_cut(self) -> bool:
        """True while the table is being saved."""
        return self._cut is not None

    def cut(self, *, changed_only: bool = False, mark: bool = False, of: int = UNSAVED) -> SparseCut:
        """Return a view as of now, for saving while training continues. There may be one cut at a time.

        With `changed_only`, the cut has only rows that changed since the last saved cut with `mark` (all rows
        if there was none), and `Cut.removed`. See Cut.close for `mark`. `of` is UNSAVED, or the other flag of
        CHANGED whose cuts count. Raises TableError if there is another cut, during a shrink, and with
        `changed_only` if more rows were removed than can be reported.
        """
        if self._cut is not None:
            raise TableError(f"table {self.spec.name!r} is already being saved; close that cut first")
        if self._shrinking:
            raise TableError(f"table {self.spec.name!r} is being shrunk; save it afterwards")
        removed = self._removed[of]
        if changed_only and not self.reports_removed(of):
            raise TableError(
                f"since the last save, table {self.spec.name!r} has lost more rows than it has now, and the "
                "keys of the lost rows were not kept; save with mode 0"
            )
        rule, changed, marked = self.spec.rule, of if changed_only else 0, of if mark else 0

        def ended(saved: bool) -> None:
            settle_flags(self._storage.rows.flags[: len(self._storage)], marked if saved else 0)
            removed.end_cut(saved and mark)
            self._storage.end_cut()
            self._cut = None

        removed_keys, row_states = removed.keys(), rule.row_states
        self._cut = Cut(self._storage, rule.states, row_states, self.step, changed, removed_keys, ended)
        removed.begin_cut()  # not earlier, because without memory for the cut its keys would be lost
        if (disk := self._disk) is None:
            return self._cut
        return disk.cut(self._cut, row_states, changed, marked)

    def follow_removed(self, of: int) -> None:
        """Act as if a cut with `mark` had been saved now, except for the flags of rows."""
        self._removed[of].begin_cut()
        self._removed[of].end_cut(True)

    def reports_removed(self, of: int) -> bool:
        """Return True if a cut of changed rows is possible, because the keys of all removed rows are
        there.
        """
        return self._removed[of].complete

    def expect(self, rows: int) -> None:
        """Prepare for loading `rows` rows in all, which makes loading faster."""
        self._storage.expect(rows if (disk := self._disk) is None else min(rows, disk.most))

    def load(self, chunk: SparseRows) -> None:
        """Insert or overwrite rows with state and statistics from a cut. Values of another type are rounded
        to the nearest. The step is set separately. Raises ShapeError for rows of another table.
        """
        wide = chunk.values.float()
        self.check_assign(chunk.keys, wide)
        widths, count = state_widths(self.spec.rule, self.spec.size), len(chunk.keys)
        if [tuple(state.shape) for state in chunk.state] != [(count, width) for width in widths]:
            raise ShapeError(f"table {self.spec.name!r} has {len(widths)} states of {list(widths)} columns")
        counts, columns = chunk.statistics, self._storage.statistics
        if (0 if counts is None else counts.shape[1]) != columns:
            raise ShapeError(
                f"table {self.spec.name!r} has {columns} statistics, but the saved rows have none"
            )
        keys, values = self._array(chunk.keys), array_of(wide)
        split = self.spec.rule.states
        states, of_row = list(map(array_of, chunk.state[:split])), list(map(array_of, chunk.state[split:]))
        statistics = _NO_STATISTICS if counts is None else array_of(counts)
        for start in range(0, len(keys), _AT_ONCE):
            some = slice(start, start + _AT_ONCE)
            state = [each[some] for each in states]
            stacked = _NO_STATE if not state else state[0][None] if len(state) == 1 else np.stack(state)
            joined = np.hstack([each[some] for each in of_row]) if of_row else _NO_ROW_STATE
            self._write(keys[some], values[some], stacked, joined, statistics[some])

    def candidates(self) -> Candidates:
        """Return copies of keys that wait for an entry filter of kind COUNT. Other filters have none."""
        if self._waiting is None:
            return Candidates(torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0))
        keys, counts, days, stamps = self._waiting.counts()
        kept = None if stamps is None else torch.from_numpy(stamps)
        return Candidates(torch.from_numpy(keys), torch.from_numpy(counts), torch.from_numpy(days), kept)

    def load_candidates(self, found: Candidates) -> None:
        """Load candidates from the result of `candidates`."""
        if any(column.shape != found.keys.shape for column in found.columns):
            lengths = list(map(len, found.columns))
            raise ShapeError(f"keys, counts, .. of candidates of {self.spec.name!r} have lengths {lengths}")
        if self._waiting is not None:
            stamps = None if found.stamps is None else array_of(found.stamps)
            keys = self._array(found.keys)
            self._waiting.load(keys, array_of(found.counts), array_of(found.days), stamps)

    def _array(self, keys: Tensor | None) -> Keys:
        return array_of(self._checked(keys))

    def _checked(self, keys: Tensor | None) -> Tensor:
        if keys is None:
            raise KeysError(f"table {self.spec.name!r} is sparse; a request needs keys")
        if keys.dim() != 1 or keys.dtype is not torch.int64:
            raise KeysError(
                f"keys of table {self.spec.name!r} have shape {keys.shape}; they must be (n,) int64"
            )
        return keys

    def _update_of(self, grad: Tensor, stats: Tensor | None) -> Kernel:
        if self._update is None:
            raise TableError(f"table {self.spec.name!r} is not trained: its parameter is in no optimizer")
        if stats is not None:
            shape = (len(grad), 2)
            if not self._counts:
                raise ShapeError(f"table {self.spec.name!r} has no statistics")
            if stats.shape != shape or stats.dtype is not torch.float32:
                raise ShapeError(
                    f"table {self.spec.name!r} needs statistics of shape {list(shape)} in float32"
                )
        return self._update

    def _pull_missing(self, keys: Keys, positions: Keys, out: Floats, insert: bool) -> None:
        """Fill rows `positions` of `out`, whose keys have no row."""
        if not insert or self._waiting is None:
            self._fill_initial(keys, positions, out)
            return
        admitted = self._waiting.pulled(keys[positions])
        self.counts.filtered(admitted)
        self._fill_initial(keys, positions[~admitted], out)
        positions = positions[admitted]
        # Insert before reading `rows`, because the storage may grow.
        slots = self._storage.insert(keys[positions], self.fresh)
        gather(self._storage.rows, slots, positions, out)
        self._count_uses(keys[positions])  # a push admits no key

    def _fill_initial(self, keys: Keys, positions: Keys, out: Floats) -> None:
        dtype = self._storage.rows.numbers[DTYPE]
        initial_rows(self.fresh, keys, positions, out.reshape(-1), self.spec.size, dtype)

    def _apply_missing(self, keys: Keys, grad: Floats, options: Floats, positions: Keys) -> None:
        positions = self._insert_pushed(keys, positions)
        some = keys[positions]
        assert self._update is not None
        missing = np.empty(len(some), np.int64)
        self._update(*self._storage.arrays, some, grad[positions], options, missing)

    def _insert_pushed(self, keys: Keys, positions: Keys) -> Keys:
        """Insert the rows that a push makes. Return those of `positions` that now have a row."""
        entry = self.spec.rows.entry
        if entry.kind is EntryKind.COUNT:  # only pulls admit keys
            return positions[:0]
        if entry.kind is EntryKind.PROBABILITY:
            admitted = np.empty(len(positions), np.bool_)
            drawn(keys[positions], self.fresh.seed, float(entry.a), admitted)
            positions = positions[admitted]
        self._storage.insert(keys[positions], self.fresh)
        return positions

    def _before_use(self, keys: Keys) -> None:
        if self.bounded is not None:
            self.bounded.budget.before_use()
            self.bounded.before_use(keys)
        if self._day is not None:
            self._day.pass_for(keys)

    def _write(self, keys: Keys, values: Floats, state: Floats, of_row: Floats, statistics: Floats) -> None:
        self._before_use(keys)
        storage = self._storage
        if self.bounded is not None:
            self.bounded.uncount(keys)
        slots = storage.insert(keys, self.fresh._replace(kind=NOTHING))
        write(storage.rows, slots, values, state, of_row, statistics, self.fresh.state)
        if self.bounded is not None and len(statistics):
            self.bounded.count_loaded(slots)
            keys = keys[statistics[:, -1] == 0]  # rows of saved tables without stamps
        self._count_uses(keys)


def make_table(spec: TableSpec, budgets: Budgets | None = None) -> DenseTable | SparseTable:
    """Return an empty table."""
    return DenseTable(spec) if spec.kind is TableKind.DENSE else SparseTable(spec, budgets)


def make_tables(
    specs: Mapping[int, TableSpec], disk: Path | None = None
) -> dict[int, DenseTable | SparseTable]:
    """Return empty tables. Tables with the same shared bound have one budget. See Budgets for `disk`."""
    budgets = Budgets(disk)
    dense = make_dense({number: each for number, each in specs.items() if each.kind is TableKind.DENSE})
    return {
        number: dense[number] if number in dense else SparseTable(spec, budgets)
        for number, spec in specs.items()
    }
