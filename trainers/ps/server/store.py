"""Hold the tables of one server, and handle the parts of messages that use them. These are gradients of a
push, and values of a pull.

The tables are made once from the trainers' specs, so all trainers must describe the same model. `steps`
decides when a push is applied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainers.kernels.compiled import Keys
from trainers.process.log import glog
from trainers.ps.kernels.batch import all_finite, array_of
from trainers.ps.kernels.eviction import TOTAL
from trainers.ps.saves.manifest import Loaded
from trainers.ps.server.checks import check_row
from trainers.ps.server.members import Refusal
from trainers.ps.server.pushes import Gradient
from trainers.ps.tables.budget import Budget
from trainers.ps.tables.dense import DenseRun, DenseTable
from trainers.ps.tables.looking import look
from trainers.ps.tables.run import (
    NOT_IN,
    Lines,
    Sampler,
    Spans,
    SparseRun,
    Threads,
    fitting_starts,
    starts_of,
)
from trainers.ps.tables.sparse import SparseTable, make_tables
from trainers.ps.tables.spec import (
    EntryKind,
    FullError,
    KeysError,
    NotFiniteError,
    ShapeError,
    ShrinkPolicy,
    SpecError,
    TableError,
    TableSpec,
)
from trainers.ps.wire import MAX_PART_BYTES, Code, Field, Part
from trainers.storage.errors import LoadError

# ---- Parts that belong together are perhaps SPANS, then KEYS, then ROWS, then perhaps STATS. A VALUES part
# may cover several dense blocks.

AnyTable = DenseTable | SparseTable


def sort_parts(
    parts: Sequence[Part], table: Callable[[int], AnyTable], run: Callable[[int, int], DenseRun]
) -> tuple[list[Gradient], list[Part]]:
    """Return the gradients of a message, and the parts that request values (WANT, and KEYS without ROWS after
    them). There is one gradient for each run of dense blocks and for each KEYS + ROWS (+ STATS). `table`
    finds a table by its number, and `run` finds a run by its first block and its elements. Both raise
    Refusal. Raises Refusal for parts in the wrong order.
    """
    gradients: list[Gradient] = []
    requests: list[Part] = []
    before: Part | None = None
    for part in parts:
        number, field, data, lr = part
        if field is Field.VALUES or field is Field.WRITTEN:
            sizes, written = run(number, data.shape[0]).sizes, field is Field.WRITTEN
            gradients.append(Gradient(number, data.float(), None, lr, None, sizes, written=written))
        elif field is Field.KEYS or field is Field.WANT or field is Field.SPANS:
            table(number)
            requests.append(part)
        elif before is None or before.table != number or before.field is not _FOLLOWS.get(field):
            raise Refusal(Code.BAD_MESSAGE, f"the {field.name} part is in the wrong place")
        elif field is Field.ROWS:
            keys = requests.pop().data
            follows = requests and requests[-1].field is Field.SPANS
            spans = spans_of(requests.pop(), number, keys) if follows else None
            gradients.append(Gradient(number, data.float(), keys, lr, spans=spans))
        else:
            gradients.append(_with_stats(gradients.pop(), part))
        before = part
    return gradients, requests


_FOLLOWS = {Field.ROWS: Field.KEYS, Field.STATS: Field.ROWS}


def spans_of(part: Part, table: int, keys: Tensor) -> Spans:
    """Return the spans of the keys of the run that starts with `table`. Raises Refusal if they do not fit."""
    spans: Spans = part.data.numpy()
    if part.table != table:
        raise Refusal(Code.BAD_MESSAGE, f"the SPANS part of table {part.table} is in the wrong place")
    if not len(spans) or fitting_starts(spans, keys.shape[0]) is None:
        raise Refusal(Code.BAD_SHAPE, f"the spans of {len(spans)} tables do not add up to {len(keys)} keys")
    return spans


def _with_stats(gradient: Gradient, part: Part) -> Gradient:
    if gradient.keys is None or part.data.shape != (gradient.keys.shape[0], 2):
        raise Refusal(Code.BAD_SHAPE, f"the statistics have the invalid shape {list(part.data.shape)}")
    return gradient._replace(stats=part.data)


def run_of(first: int, elements: int, table: Callable[[int], AnyTable]) -> DenseRun:
    """Return the dense blocks from `first` that so many elements fill. Raises Refusal for other numbers."""
    blocks: list[DenseTable] = []
    left = elements
    while left or not blocks:
        block = table(first + len(blocks))
        if not isinstance(block, DenseTable) or block.spec.size > left:
            raise Refusal(
                Code.BAD_SHAPE, f"{elements} values from table {first} on do not fill whole dense blocks"
            )
        blocks.append(block)
        left -= block.spec.size
    return DenseRun(blocks)


@dataclass(frozen=True)
class Overlay:
    """Former values that replace the current values in an answer. `dense` has blocks by number. `rows` has
    rows in the form of gradients, with the former values in `values`.
    """

    dense: Mapping[int, Tensor] = field(default_factory=dict)
    rows: Sequence[Gradient] = ()

    @cached_property
    def by_table(self) -> Mapping[int, tuple[Tensor, Tensor]]:
        """The keys and rows of each table. Only a trainer that repeats a step needs them."""
        return {
            one.table: (one.keys, one.values)
            for each in self.rows
            for one in each.blocks()
            if one.keys is not None
        }

    def apply_to(self, table: int, keys: Tensor, rows: Tensor) -> None:
        """Replace the `rows` (n, dim) whose keys (n,) have a former value."""
        known, instead = self.by_table.get(table, (keys[:0], rows[:0]))
        if not len(known) or not len(keys):
            return
        order = torch.argsort(known)
        near = torch.searchsorted(known[order], keys).clamp_(max=len(known) - 1)
        place = order[near]
        same = known[place] == keys
        rows[same] = instead[place[same]]


_CODES: dict[type[TableError], Code] = {
    ShapeError: Code.BAD_SHAPE,
    KeysError: Code.BAD_KEYS,
    NotFiniteError: Code.NOT_FINITE,
    FullError: Code.NO_MEMORY,
}
_POLICY = [each.name for each in fields(ShrinkPolicy)]
_MAX_REQUESTS = 4096
_ROW_REQUESTS = (Field.KEYS, Field.PEEK)
_NO_OVERLAY = Overlay()


class Store:
    """Tables by number. `ready` is set once trainer 0 has sent all initial values, except the values that
    `fill` has loaded. A server that recovers need not have `loaded`. Rows are sent as `row_dtype`. With
    `skip_bad`, gradients that are not finite are left out and counted, otherwise their push is refused. See
    Budgets for `disk` and Threads for `threads`.
    """

    def __init__(
        self,
        *,
        row_dtype: torch.dtype = torch.float32,
        skip_bad: bool = False,
        disk: Path | None = None,
        threads: int = 1,
        fill: Callable[[Sequence[AnyTable]], Loaded] | None = None,
    ) -> None:
        self._tables: dict[int, AnyTable] = {}
        self._lines = Lines({})
        self.budgets: deque[Budget] = deque()
        """The budgets of all tables, each once."""
        self._counting: frozenset[int] = frozenset()
        self._runs: dict[tuple[int, int], DenseRun] = {}
        """Runs by their first table and their number of elements."""
        self._wanted: dict[tuple[int, int], DenseRun] = {}
        """Runs by their first table and their number of tables."""
        self._fill, self._disk, self._threads = fill, disk, Threads(threads)
        self._row_dtype = row_dtype
        self._skip_bad = skip_bad
        self._declared = False
        self._shrinking: deque[SparseTable] = deque()
        self._removed = 0
        self.ready = False
        self.loaded: Loaded | None = None
        self.skipped = 0
        self.changes = 0
        """The number of changes of the tables, without changes by steps."""
        self.expires = False
        """True if rows have a time to live."""
        self._check_push = False

    @property
    def tables(self) -> Mapping[int, AnyTable]:
        return MappingProxyType(self._tables)

    @property
    def sampler(self) -> Sampler:
        """The sampler of requests for sparse tables."""
        return self._lines.sampler

    @property
    def seen(self) -> NDArray[np.uint8]:
        """The registers by table number, see Lines."""
        return self._lines.seen

    def declare(self, rank: int, parts: Sequence[Part]) -> None:
        """Create the tables, or check that this trainer describes the existing tables."""
        specs = _specs(parts)
        if not self._declared:
            self._begin(specs)
            return
        mine = {number: table.spec for number, table in self._tables.items()}
        for number in sorted(mine.keys() | specs.keys()):
            if mine.get(number) != specs.get(number):
                raise Refusal(
                    Code.MISMATCH,
                    f"trainer {rank} has another model or optimizer: its table {number} is "
                    f"{specs.get(number)}, but on this server it is {mine.get(number)}",
                )

    def make(self, specs: Mapping[int, TableSpec]) -> None:
        """Create empty tables."""
        self._set_tables(make_tables(specs, self._disk))

    def _begin(self, specs: Mapping[int, TableSpec]) -> None:
        try:
            tables = make_tables(specs, self._disk)
            if self._fill is not None:
                self.loaded = self._fill(list(tables.values()))
        except TableError as error:
            raise _refusal(error) from error
        except LoadError as error:
            raise Refusal(Code.FAILED, str(error)) from error
        self._set_tables(tables)

    def _set_tables(self, tables: dict[int, AnyTable]) -> None:
        self._tables, self._declared = tables, True
        self._lines = Lines(
            {number: each for number, each in tables.items() if isinstance(each, SparseTable)},
            self._threads,
        )
        self._runs.clear()
        self._wanted.clear()
        sparse = [each for each in tables.values() if isinstance(each, SparseTable)]
        self.budgets = deque(dict.fromkeys(budget for each in sparse for budget in each.budgets))
        self.expires = any(budget.bound.ttl_s for budget in self.budgets)
        self._counting = frozenset(
            number for number, table in tables.items() if table.spec.rows.entry.kind is EntryKind.COUNT
        )

    def assign(self, parts: Sequence[Part], *, keep_state: bool = False) -> None:
        """Set values. With `keep_state`, optimizer state and statistics of rows stay as they are.
        `keep_state` is for values of a trainer that loaded its state during training.
        """
        self.changes += 1
        for each in self.read_assign(parts, initial=not keep_state):
            table = self._tables[each.table]
            (table.revise if keep_state else table.assign)(each.keys, each.values)

    def look(self, name: str, keys: Keys) -> dict[str, list[Any]]:
        """Return `rows` of the sparse table with this name, one for each key (see `tables.looking`). Change
        nothing. If the table does not exist, return the names of all sparse tables in `tables`. Raises
        OSError for disk errors.
        """
        sparse = {each.spec.name: each for each in self._tables.values() if isinstance(each, SparseTable)}
        return {"rows": look(sparse[name], keys)} if name in sparse else {"tables": sorted(sparse)}

    def read_assign(self, parts: Sequence[Part], *, initial: bool) -> list[Gradient]:
        """Return the checked values, and change nothing. From initial values, leave out loaded values."""
        found = [block for gradient in self.sort(parts)[0] for block in gradient.blocks()]
        try:
            for each in found:
                self._tables[each.table].check_assign(each.keys, each.values)
        except TableError as error:
            raise _refusal(error) from error
        return [kept for each in found if (kept := self._not_loaded(each)) is not None] if initial else found

    def _not_loaded(self, values: Gradient) -> Gradient | None:
        """Return the initial values of a table, without the values that were loaded from saved tables."""
        table = self._tables[values.table]
        if self.loaded is None or table.spec.name not in self.loaded.tables:
            return values
        if values.keys is None or isinstance(table, DenseTable):
            return None
        if table.spec.rows.bound is not None or table.spec.ages:
            return None  # rows may be missing because they were removed
        missing = torch.from_numpy(table.kept[0].find(array_of(values.keys)) < 0)
        return values._replace(keys=values.keys[missing], values=values.values[missing])

    def pull(self, parts: Sequence[Part], overlay: Overlay | None = None) -> tuple[Part, ...]:
        """Return VALUES for WANT parts, and ROWS for KEYS and PEEK parts, in the order of the request. Values
        in `overlay` replace values of the tables.
        """
        overlay = overlay or _NO_OVERLAY
        if len(parts) > _MAX_REQUESTS:
            raise Refusal(Code.BAD_MESSAGE, f"a message contains {len(parts)} requests for values")
        answers, spans = [], None
        for part in parts:
            if part.field is Field.SPANS:
                spans = part
                continue
            answers.append(
                self._values(part, overlay) if part.field is Field.WANT else self._rows(part, spans, overlay)
            )
            spans = None
        return tuple(answers)

    def counts_pulls(self, parts: Sequence[Part]) -> bool:
        """Return True if answering these parts changes durable state (the counts of an entry filter)."""
        if not self._counting:
            return False
        count = 1
        for part in parts:
            if part.field is Field.KEYS and not self._counting.isdisjoint(
                range(part.table, part.table + count)
            ):
                return True
            count = len(part.data) if part.field is Field.SPANS else 1
        return False

    def sort(self, parts: Sequence[Part]) -> tuple[list[Gradient], list[Part]]:
        """Return the gradients of a push, and the parts that request values."""
        return sort_parts(parts, self._table, self._run)

    def check(self, gradients: Sequence[Gradient]) -> Sequence[Gradient]:
        """Return the gradients of a push to apply, checked so that `apply` will not fail. Change no table."""
        if self._skip_bad:
            gradients = [kept for gradient in gradients for kept in self._finite(gradient)]
        try:
            for each in gradients:
                if each.keys is None:
                    if not each.written:
                        self._run(each.table, each.values.shape[0]).check(each.values)
                else:
                    self._rows_of(each).check(each.each, each.keys, each.values, each.stats)
        except TableError as error:
            raise _refusal(error) from error
        if any(
            _overlap([each.tables() for each in gradients if each.written is one]) for one in (True, False)
        ):
            raise Refusal(Code.BAD_MESSAGE, "a push names the same table twice")
        return gradients

    def make_room(self, gradients: Sequence[Gradient], *, filtered: bool = True) -> None:
        """Reserve memory for rows that `apply` (without `filtered`: `assign`) will need. Raises Refusal."""
        rows = [each for each in gradients if each.keys is not None]
        runs: dict[range, list[Gradient]] = {}
        for each in rows:
            runs.setdefault(each.tables(), []).append(each)
        if not filtered or _overlap(runs):
            runs = {}
            for one in (one for each in rows for one in each.blocks()):
                runs.setdefault(one.tables(), []).append(one)
        try:
            for some in runs.values():
                pieces = [(each.each, each.keys) for each in some if each.keys is not None]
                self._rows_of(some[0]).make_room(pieces, filtered=filtered)
        except TableError as error:
            raise _refusal(error) from error

    def apply(self, gradients: Sequence[Gradient]) -> None:
        for each in gradients:
            if each.written:
                for block in each.blocks():
                    self._tables[block.table].assign(None, block.values)
            elif each.keys is None:
                self._run(each.table, each.values.shape[0]).apply(each.values, each.lr)
            else:
                self._rows_of(each).apply(each.each, each.keys, each.values, each.lr, each.stats)
        for each in gradients:
            if self._check_push and each.keys is not None and len(each.keys):
                self._check_push = False
                last = each.table + int(np.flatnonzero(each.each > 0)[-1])
                check_row(self._tables[last], int(each.keys[-1]))

    def verify(self) -> None:
        """Check one of the budgets, and a row of the next push. Raises BrokenError."""
        if self.budgets:
            self.budgets[0].verify()
            self.budgets.rotate()
        self._check_push = True

    def before(self, gradients: Sequence[Gradient]) -> Overlay:
        """Return the values that `apply` is about to change."""
        dense: dict[int, Tensor] = {}
        rows = []
        for each in gradients:
            if each.keys is None:
                run = self._run(each.table, each.values.shape[0])
                dense |= dict(enumerate(run.values().split_with_sizes(run.sizes), each.table))
            else:
                values = self._rows_of(each).pull(each.each, each.keys, insert=False)
                rows.append(each._replace(values=values, stats=None))
        return Overlay(dense, rows)

    def ticks_at(self, time: float) -> bool:
        """Return True if `tick` changes something at this time."""
        return any(budget.ticks_at(time) for budget in self.budgets)

    def moves_by(self, time: float, set_by: float) -> float:
        """Return the number of seconds by which the times of rows must move, after the clock was set by
        `set_by` to `time`. Rows keep their age, and no row was used in the future.
        """
        times = [budget.time for budget in self.budgets if budget.time is not None]
        return min(set_by, time - max(times)) if times else 0.0

    def tick(self, time: float, moved_by: float = 0.0) -> None:
        """Advance the time to `time`, in seconds since 1970, and remove rows whose time to live has passed.
        The times of rows first move by `moved_by` seconds.
        """
        before = self._cost()
        for budget in self.budgets:
            budget.move(moved_by)
            budget.tick(time)
        self.changes += self._cost() < before

    def _cost(self) -> float:
        return sum(float(budget.uses.clock[TOTAL]) for budget in self.budgets)

    def read_shrink(self, parts: Sequence[Part]) -> list[tuple[SparseTable, ShrinkPolicy]]:
        """Return the tables to shrink with their policies. Change nothing."""
        found = []
        for part in parts:
            table = self._table(part.table)
            if part.field is not Field.VALUES or len(part.data) != len(_POLICY):
                raise Refusal(Code.BAD_MESSAGE, f"a SHRINK contains a {part.field.name} part")
            if not isinstance(table, SparseTable) or not table.spec.ages:
                raise Refusal(
                    Code.FAILED,
                    f"table {table.spec.name!r} has no statistics, which shrink needs. Enable them with "
                    "SparseEmbedding(statistics=True) or sparse_table_configs",
                )
            try:
                found.append((table, ShrinkPolicy(**dict(zip(_POLICY, part.data.tolist(), strict=True)))))
            except ValueError as error:
                raise Refusal(Code.BAD_MESSAGE, str(error)) from error
        if len({part.table for part in parts}) != len(parts):
            raise Refusal(Code.BAD_MESSAGE, "a SHRINK names the same table twice")
        return found

    def begin_shrink(self, checked: Sequence[tuple[SparseTable, ShrinkPolicy]]) -> None:
        """Start a shrink. From now on, the tables behave as if shrunk, and `shrink_some` does the work."""
        self._removed = 0
        self.changes += 1
        for table, policy in checked:
            table.begin_shrink(policy)
            self._shrinking.append(table)

    def shrink_some(self, rows: int) -> int | None:
        """Shrink about so many rows. After the last slice, return the number of removed rows, else None."""
        while self._shrinking:
            if rows <= 0:
                return None
            table = self._shrinking[0]
            size = len(table)
            removed = table.shrink_some(rows)
            if removed is None:
                return None
            self._shrinking.popleft()
            self._removed += removed
            rows -= size
        return self._removed

    @property
    def shrinking(self) -> bool:
        """True while tables are being shrunk, and cannot be cut, or while budgets wait for `release`."""
        return self.slices_left or any(budget.held for budget in self.budgets)

    @property
    def slices_left(self) -> bool:
        """True if `shrink_some` has work to do."""
        return bool(self._shrinking)

    def release(self) -> None:
        """End a shrink, so that budgets evict rows again."""
        for budget in self.budgets:
            budget.held = False
            budget.settle()

    def _table(self, number: int) -> AnyTable:
        table = self._tables.get(number)
        if table is None:
            raise Refusal(Code.UNKNOWN_TABLE, f"this server has no table {number}")
        return table

    def _run(self, first: int, elements: int) -> DenseRun:
        run = self._runs.get((first, elements))
        if run is None:
            self._forget_runs(self._runs)
            run = self._runs[first, elements] = run_of(first, elements, self._table)
        return run

    def _forget_runs(self, runs: dict[tuple[int, int], DenseRun]) -> None:
        """Clear the runs if there are too many, because trainers group blocks in ever new ways."""
        if len(runs) > 4 * len(self._tables):
            runs.clear()

    def _rows_of(self, gradient: Gradient) -> SparseRun:
        return self._sparse_run(gradient.table, 1 if gradient.spans is None else len(gradient.spans))

    def _sparse_run(self, first: int, count: int) -> SparseRun:
        """Return the run. Raises Refusal for an unknown table, or KeysError for a dense one."""
        if count == 1 and isinstance(table := self._table(first), DenseTable):
            raise KeysError(f"table {table.spec.name!r} is dense and has no keys")
        return self._lines.run(first, count)

    def _rows(self, part: Part, spans: Part | None, overlay: Overlay) -> Part:
        if part.field not in _ROW_REQUESTS:
            raise Refusal(Code.BAD_MESSAGE, f"a PULL contains a {part.field.name} part")
        keys = part.data
        each = np.array([keys.shape[0]]) if spans is None else spans_of(spans, part.table, keys)
        try:
            run = self._sparse_run(part.table, len(each))
            if 4 * keys.shape[0] * run.size > MAX_PART_BYTES:
                raise Refusal(
                    Code.BAD_SHAPE, f"an answer cannot contain {len(keys)} rows of {run.size} values"
                )
            rows = run.pull(each, keys, insert=part.field is Field.KEYS)
        except TableError as error:
            raise _refusal(error) from error
        if overlay.rows:
            for number, (start, stop) in enumerate(pairwise(starts_of(each).tolist()), part.table):
                overlay.apply_to(number, keys[start:stop], rows[start:stop])
        return Part(part.table, Field.ROWS, rows.to(self._row_dtype))

    def _values(self, part: Part, overlay: Overlay) -> Part:
        """Return a copy of the values, because the reply may still be in flight at the next update."""
        if part.data.shape[0] != 1:
            raise Refusal(Code.BAD_MESSAGE, f"a WANT part has {len(part.data)} numbers, not 1")
        first, count = part.table, int(part.data)
        run = self._wanted.get((first, count))
        if run is None:
            self._forget_runs(self._wanted)
            blocks = [self._dense(number) for number in range(first, first + count)]
            if not blocks:
                raise Refusal(Code.BAD_MESSAGE, "a WANT part asks for no table")
            run = self._wanted[first, count] = DenseRun(blocks)
        if 4 * sum(run.sizes) > MAX_PART_BYTES:
            raise Refusal(Code.BAD_SHAPE, f"an answer cannot contain {sum(run.sizes)} values")
        values = run.values()
        for number, share in enumerate(values.split_with_sizes(run.sizes), first) if overlay.dense else ():
            if number in overlay.dense:
                share.copy_(overlay.dense[number])
        return Part(first, Field.VALUES, values)

    def _dense(self, number: int) -> DenseTable:
        table = self._table(number)
        if not isinstance(table, DenseTable):
            raise Refusal(Code.BAD_KEYS, f"table {table.spec.name!r} is sparse; a request needs keys")
        return table

    def _finite(self, gradient: Gradient) -> Sequence[Gradient]:
        """Return the gradient without rows and dense blocks that are not finite."""
        if gradient.written or all_finite(gradient.values):
            return (gradient,)
        if gradient.keys is None:
            kept = [block for block in gradient.blocks() if all_finite(block.values)]
            self._skip(len(gradient.tables()) - len(kept))
            return kept
        if len(gradient.keys) != len(gradient.values):
            return (gradient,)  # the table will refuse this gradient
        good = torch.isfinite(gradient.values).all(1)
        self._skip(int((~good).sum()))
        stats, spans = gradient.stats, gradient.spans
        if spans is not None:
            before = np.concatenate([[0], np.cumsum(good.numpy())])[starts_of(spans)]
            spans = np.where(spans == NOT_IN, NOT_IN, np.diff(before))
        return (
            gradient._replace(
                values=gradient.values[good],
                keys=gradient.keys[good],
                stats=None if stats is None else stats[good],
                spans=spans,
            ),
        )

    def _skip(self, count: int) -> None:
        """Count skipped gradients, and log the first, the tenth, the hundredth, and so on."""
        before, self.skipped = self.skipped, self.skipped + count
        if not before or len(str(self.skipped)) > len(str(before)):
            glog(f"skipped {self.skipped} gradients of rows and dense blocks with NaN or infinity so far")


def _overlap(ranges: Iterable[range]) -> bool:
    ordered = sorted(ranges, key=lambda each: each.start)
    return any(before.stop > after.start for before, after in pairwise(ordered))


def _specs(parts: Sequence[Part]) -> dict[int, TableSpec]:
    specs = {}
    for part in parts:
        if part.field is not Field.SPEC:
            raise Refusal(Code.BAD_MESSAGE, f"the table specs contain a {part.field.name} part")
        try:
            specs[part.table] = TableSpec.decode(part.data.numpy().tobytes())
        except SpecError as error:
            raise Refusal(Code.BAD_MESSAGE, str(error)) from error
    return specs


def _refusal(error: TableError) -> Refusal:
    return Refusal(_CODES.get(type(error), Code.BAD_MESSAGE), str(error))
