"""Store: the tables of one server, made once from the trainers' specs, and the parts of messages that touch
them: gradients of a push, their average over trainers, values of a pull.

Knows what is asked of tables, and that all trainers must describe the same model; when a push is applied is
decided by `steps`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import NamedTuple

import torch

from trainers.process.log import glog
from trainers.ps.kernels.batch import all_finite, merge_rows
from trainers.ps.saves.write import counts_of
from trainers.ps.server.members import Refusal
from trainers.ps.tables.dense import DenseRun, DenseTable
from trainers.ps.tables.sparse import (
    KeysError,
    NotFiniteError,
    ShapeError,
    SparseTable,
    TableError,
    make_table,
)
from trainers.ps.tables.spec import EntryKind, ShrinkPolicy, SpecError, TableSpec
from trainers.ps.wire import MAX_FRAME_BYTES, Code, Field, Part
from trainers.storage.errors import LoadError


class Gradient(NamedTuple):
    """One table's share of a push: `values` is (size,), or (keys, dim) with `keys`; `stats` is (keys, 2).
    Or that of a run of dense blocks, the first of which is `table`, with the `sizes` of all of them.
    """

    table: int
    values: torch.Tensor
    keys: torch.Tensor | None
    lr: float
    stats: torch.Tensor | None = None
    sizes: Sequence[int] = ()

    def blocks(self) -> Sequence[Gradient]:
        """One gradient for each table."""
        if len(self.sizes) < 2:
            return (self,)
        shares = self.values.split_with_sizes(self.sizes)
        return [Gradient(table, share, None, self.lr) for table, share in enumerate(shares, self.table)]

    def tables(self) -> range:
        """The numbers of the tables."""
        return range(self.table, self.table + max(1, len(self.sizes)))


class Round:
    """The pushes of one step, one for each trainer. Kept apart until all are there, and added in rank
    order: the result does not depend on who came first.
    """

    def __init__(self) -> None:
        self._pushes: dict[int, Sequence[Gradient]] = {}

    @property
    def pushes(self) -> Mapping[int, Sequence[Gradient]]:
        return MappingProxyType(self._pushes)

    def add(self, rank: int, push: Sequence[Gradient]) -> None:
        """Runs are taken apart: another trainer's may be others."""
        self._pushes[rank] = [block for gradient in push for block in gradient.blocks()]

    def ranks(self) -> Collection[int]:
        return self._pushes.keys()

    def average(self) -> list[Gradient]:
        """For each table the sum over trainers divided by their number; who pushed nothing for a table
        pushed zero.

        The learning rate is that of the lowest rank with a gradient for the table.
        """
        by_table: dict[int, list[Gradient]] = {}
        for rank in sorted(self._pushes):
            for gradient in self._pushes[rank]:
                by_table.setdefault(gradient.table, []).append(gradient)
        return [_mean(gradients, len(self._pushes)) for gradients in by_table.values()]


def _mean(gradients: Sequence[Gradient], trainers: int) -> Gradient:
    first = gradients[0]
    if trainers == 1:
        return first
    if first.keys is None:
        values = first.values.clone()
        for gradient in gradients[1:]:
            values.add_(gradient.values)
        return Gradient(first.table, values.div_(trainers), None, first.lr)
    keys, values = merge_rows([(each.keys, each.values) for each in gradients if each.keys is not None])
    stats = [
        (each.keys, each.stats) for each in gradients if each.keys is not None and each.stats is not None
    ]
    # The same keys in the same order: merge_rows numbers them by first appearance.
    counted = merge_rows(stats)[1] if len(stats) == len(gradients) else None
    return Gradient(first.table, values.div_(trainers), keys, first.lr, counted)


# ---- Which parts of a message belong together: KEYS, then ROWS, then perhaps STATS. A VALUES part may cover
# several dense blocks.

AnyTable = DenseTable | SparseTable


def sort_parts(
    parts: Sequence[Part], table: Callable[[int], AnyTable], run: Callable[[int, int], DenseRun]
) -> tuple[list[Gradient], list[Part]]:
    """What is brought - an entry for each run of dense blocks and each KEYS + ROWS (+ STATS) - and the parts
    that ask: WANT, and KEYS that no rows follow. `table` finds a table by its number, `run` a run by its
    first block and its elements, or raises Refusal, as this does for parts in the wrong order.
    """
    brought: list[Gradient] = []
    asking: list[Part] = []
    before: Part | None = None
    for part in parts:
        number, field, data, lr = part
        if field is Field.VALUES:
            sizes = run(number, data.shape[0]).sizes
            brought.append(Gradient(number, data.float(), None, lr, None, sizes))
        elif field is Field.KEYS or field is Field.WANT:
            table(number)
            asking.append(part)
        elif before is None or before.table != number or before.field is not _FOLLOWS.get(field):
            raise Refusal(Code.BAD_MESSAGE, f"a {field.name} part in the wrong place")
        elif field is Field.ROWS:
            brought.append(Gradient(number, data.float(), asking.pop().data, lr))
        else:
            brought.append(_with_stats(brought.pop(), part))
        before = part
    return brought, asking


_FOLLOWS = {Field.ROWS: Field.KEYS, Field.STATS: Field.ROWS}


def _with_stats(gradient: Gradient, part: Part) -> Gradient:
    if gradient.keys is None or part.data.shape != (gradient.keys.shape[0], 2):
        raise Refusal(Code.BAD_SHAPE, f"statistics of shape {list(part.data.shape)}")
    return gradient._replace(stats=part.data)


def run_of(first: int, elements: int, table: Callable[[int], AnyTable]) -> DenseRun:
    """The dense blocks from `first` on that so many elements fill. Raises Refusal when they do not."""
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


@dataclass(frozen=True, slots=True)
class Overlay:
    """What dense blocks, and rows by (keys, rows), were before the last step; by number of the table."""

    dense: Mapping[int, torch.Tensor] = field(default_factory=dict)
    rows: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def lay_over(self, table: int, keys: torch.Tensor, rows: torch.Tensor) -> None:
        """Replace those of `rows` (n, dim), of these keys (n,), that are known here."""
        known, instead = self.rows.get(table, (keys[:0], rows[:0]))
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
}
_POLICY = [each.name for each in fields(ShrinkPolicy)]
_MOST_ASKS = 4096
_ASKS = (Field.KEYS, Field.PEEK)


_NOTHING = Overlay()


class Store:
    """Tables by number. `ready` once trainer 0 has sent all initial values, or `fill` has loaded them. Rows
    leave as `row_dtype`; with `skip_bad` gradients that are not finite are left out and counted, otherwise
    their push is refused.
    """

    def __init__(
        self,
        *,
        row_dtype: torch.dtype = torch.float32,
        skip_bad: bool = False,
        fill: Callable[[Sequence[AnyTable]], None] | None = None,
    ) -> None:
        self._tables: dict[int, AnyTable] = {}
        self._counting: Collection[int] = ()
        self._runs: dict[tuple[int, int], DenseRun] = {}
        self._fill = fill
        self._row_dtype = row_dtype
        self._skip_bad = skip_bad
        self._declared = False
        self.ready = False
        self.skipped = 0

    @property
    def tables(self) -> Mapping[int, AnyTable]:
        return MappingProxyType(self._tables)

    def declare(self, rank: int, parts: Sequence[Part]) -> None:
        """Make the tables, or check that this trainer describes the ones that exist."""
        specs = _specs(parts)
        if not self._declared:
            self._begin(specs)
            return
        mine = {number: table.spec for number, table in self._tables.items()}
        for number in sorted(mine.keys() | specs.keys()):
            if mine.get(number) != specs.get(number):
                raise Refusal(
                    Code.MISMATCH,
                    f"trainer {rank} describes another model or optimizer: {specs.get(number)}; "
                    f"here it is {mine.get(number)}",
                )

    def make(self, specs: Mapping[int, TableSpec]) -> None:
        """The tables, empty."""
        self._take({number: make_table(spec) for number, spec in specs.items()})

    def _begin(self, specs: Mapping[int, TableSpec]) -> None:
        try:
            tables = {number: make_table(spec) for number, spec in specs.items()}
            if self._fill is not None:
                self._fill(list(tables.values()))
        except TableError as error:
            raise _refusal(error) from error
        except LoadError as error:
            raise Refusal(Code.FAILED, str(error)) from error
        self._take(tables)
        self.ready = self._fill is not None

    def _take(self, tables: dict[int, AnyTable]) -> None:
        self._tables, self._declared = tables, True
        self._runs.clear()
        self._counting = {
            number for number, table in tables.items() if table.spec.rows.entry.kind is EntryKind.COUNT
        }

    def assign(self, parts: Sequence[Part]) -> None:
        """Take initial values."""
        for each in self.read_assign(parts):
            self._tables[each.table].assign(each.keys, each.values)

    def read_assign(self, parts: Sequence[Part]) -> list[Gradient]:
        """Initial values, every one of them checked; changes nothing."""
        found = [block for gradient in self.sort(parts)[0] for block in gradient.blocks()]
        try:
            for each in found:
                self._tables[each.table].fits(each.keys, each.values)
        except TableError as error:
            raise _refusal(error) from error
        return found

    def pull(self, parts: Sequence[Part], instead: Overlay | None = None) -> tuple[Part, ...]:
        """WANT parts become VALUES, KEYS and PEEK parts ROWS, in the order asked; where `instead` has
        values, those.
        """
        overlay = instead or _NOTHING
        if len(parts) > _MOST_ASKS:
            raise Refusal(Code.BAD_MESSAGE, f"{len(parts)} questions in one message")
        return tuple(
            self._values(part, overlay) if part.field is Field.WANT else self._rows(part, overlay)
            for part in parts
        )

    def counts_pulls(self, parts: Sequence[Part]) -> bool:
        """Whether answering these changes what must survive: the counts of an entry filter."""
        return bool(self._counting) and any(
            part.field is Field.KEYS and part.table in self._counting for part in parts
        )

    def sort(self, parts: Sequence[Part]) -> tuple[list[Gradient], list[Part]]:
        """The gradients of a push, and the parts that ask for values."""
        return sort_parts(parts, self._table, self._run)

    def check(self, gradients: Sequence[Gradient]) -> Sequence[Gradient]:
        """Those of a push that are to be applied, every one of them checked: `apply` will not refuse them.
        Changes no table.
        """
        if self._skip_bad:
            gradients = [kept for gradient in gradients for kept in self._finite(gradient)]
        tables: list[int] = []
        try:
            for each in gradients:
                tables += each.tables()
                if each.keys is None:
                    self._run(each.table, each.values.shape[0]).check(each.values)
                else:
                    self._tables[each.table].check(each.keys, each.values, each.stats)
        except TableError as error:
            raise _refusal(error) from error
        if len(set(tables)) != len(tables):
            raise Refusal(Code.BAD_MESSAGE, "a push names the same table twice")
        return gradients

    def apply(self, gradients: Sequence[Gradient]) -> None:
        for each in gradients:
            if each.keys is None:
                self._run(each.table, each.values.shape[0]).apply(each.values, each.lr)
            else:
                self._tables[each.table].apply(each.keys, each.values, each.lr, each.stats)

    def before(self, gradients: Sequence[Gradient]) -> Overlay:
        """The values that `apply` is about to change."""
        dense, rows = {}, {}
        for each in gradients:
            values = self._tables[each.table].pull(each.keys, insert=False)
            if each.keys is None:
                dense[each.table] = values
            else:
                rows[each.table] = (each.keys, values)
        return Overlay(dense, rows)

    def read_shrink(self, parts: Sequence[Part]) -> list[tuple[SparseTable, ShrinkPolicy]]:
        """The tables that are to shrink, and how; changes nothing."""
        found = []
        for part in parts:
            table = self._table(part.table)
            if part.field is not Field.VALUES or len(part.data) != len(_POLICY):
                raise Refusal(Code.BAD_MESSAGE, f"a SHRINK with a {part.field.name} part")
            if not isinstance(table, SparseTable) or not counts_of(table.spec):
                raise Refusal(
                    Code.FAILED,
                    f"table {table.spec.name!r} keeps no statistics by which rows could go; ask for them "
                    "with SparseEmbedding(statistics=True) or sparse_table_configs",
                )
            try:
                found.append((table, ShrinkPolicy(**dict(zip(_POLICY, part.data.tolist(), strict=True)))))
            except ValueError as error:
                raise Refusal(Code.BAD_MESSAGE, str(error)) from error
        return found

    def shrink(self, checked: Sequence[tuple[SparseTable, ShrinkPolicy]]) -> int:
        """How many rows went."""
        return sum(table.shrink(policy) for table, policy in checked)

    def _table(self, number: int) -> AnyTable:
        table = self._tables.get(number)
        if table is None:
            raise Refusal(Code.UNKNOWN_TABLE, f"table {number} is not on this server")
        return table

    def _run(self, first: int, elements: int) -> DenseRun:
        run = self._runs.get((first, elements))
        if run is None:
            run = self._runs[first, elements] = run_of(first, elements, self._table)
        return run

    def _rows(self, part: Part, overlay: Overlay) -> Part:
        if part.field not in _ASKS:
            raise Refusal(Code.BAD_MESSAGE, f"a pull with a {part.field.name} part")
        table = self._table(part.table)
        if 4 * part.data.shape[0] * table.spec.size > MAX_FRAME_BYTES:
            raise Refusal(Code.BAD_SHAPE, f"{len(part.data)} rows of {table.spec.size} in one answer")
        try:
            rows = table.pull(part.data, insert=part.field is Field.KEYS)
        except TableError as error:
            raise _refusal(error) from error
        if overlay.rows:
            overlay.lay_over(part.table, part.data, rows)
        return Part(part.table, Field.ROWS, rows.to(self._row_dtype))

    def _values(self, part: Part, overlay: Overlay) -> Part:
        """A copy: the reply may still be on its way when the next update comes."""
        if part.data.shape[0] != 1:
            raise Refusal(Code.BAD_MESSAGE, f"a WANT part of {len(part.data)} numbers")
        blocks = []
        for number in range(part.table, part.table + int(part.data)):
            table = self._table(number)
            if not isinstance(table, DenseTable):
                raise Refusal(Code.BAD_KEYS, f"table {table.spec.name!r} is sparse; a request needs keys")
            blocks.append(overlay.dense.get(number, table.values))
        if not blocks:
            raise Refusal(Code.BAD_MESSAGE, "a WANT part for no table")
        values = torch.cat(blocks)
        if values.nbytes > MAX_FRAME_BYTES:
            raise Refusal(Code.BAD_SHAPE, f"{len(values)} values in one answer")
        return Part(part.table, Field.VALUES, values)

    def _finite(self, gradient: Gradient) -> Sequence[Gradient]:
        """The gradient without the rows and the dense blocks that are not finite."""
        if all_finite(gradient.values):
            return (gradient,)
        if gradient.keys is None:
            kept = [block for block in gradient.blocks() if all_finite(block.values)]
            self._skip(len(gradient.tables()) - len(kept))
            return kept
        if len(gradient.keys) != len(gradient.values):
            return (gradient,)  # which the table will refuse
        good = torch.isfinite(gradient.values).all(1)
        self._skip(int((~good).sum()))
        stats = None if gradient.stats is None else gradient.stats[good]
        return (Gradient(gradient.table, gradient.values[good], gradient.keys[good], gradient.lr, stats),)

    def _skip(self, count: int) -> None:
        """Said of the first, the tenth, the hundredth, ..."""
        before, self.skipped = self.skipped, self.skipped + count
        if not before or len(str(self.skipped)) > len(str(before)):
            glog(f"left out {self.skipped} gradients of rows and dense blocks so far: NaN or infinity")


def _specs(parts: Sequence[Part]) -> dict[int, TableSpec]:
    specs = {}
    for part in parts:
        if part.field is not Field.SPEC:
            raise Refusal(Code.BAD_MESSAGE, f"a {part.field.name} part among table specs")
        try:
            specs[part.table] = TableSpec.decode(part.data.numpy().tobytes())
        except SpecError as error:
            raise Refusal(Code.BAD_MESSAGE, str(error)) from error
    return specs


def _refusal(error: TableError) -> Refusal:
    return Refusal(_CODES.get(type(error), Code.BAD_MESSAGE), str(error))
