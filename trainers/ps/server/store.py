"""Store: the tables of one server, made once from the trainers' specs, and the parts of messages that touch
them.

Knows what is asked of tables, and that all trainers must describe the same model; leaves the order of parts
to `parts`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType

import torch

from trainers.process.log import glog
from trainers.ps.kernels.finite import all_finite
from trainers.ps.net.wire import MAX_FRAME_BYTES, Code, Field, Part
from trainers.ps.saved.errors import LoadError
from trainers.ps.saved.source import counts_of
from trainers.ps.server.members import Refusal
from trainers.ps.server.overlay import Overlay
from trainers.ps.server.parts import AnyTable, run_of, sort_parts
from trainers.ps.server.rounds import Gradient
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.run import DenseRun
from trainers.ps.tables.shrink import ShrinkPolicy
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import EntryKind, SpecError, TableSpec
from trainers.ps.tables.table import KeysError, NotFiniteError, ShapeError, TableError, make_table

_CODES: dict[type[TableError], Code] = {
    ShapeError: Code.BAD_SHAPE,
    KeysError: Code.BAD_KEYS,
    NotFiniteError: Code.NOT_FINITE,
}
_POLICY = [field.name for field in fields(ShrinkPolicy)]
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
