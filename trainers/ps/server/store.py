"""Store: the tables of one server, made once from the trainers' specs, and the parts of messages that touch
them.

Knows which parts belong together (KEYS then ROWS) and that all trainers must describe the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from trainers.ps.net.wire import Code, Field, Part
from trainers.ps.server.members import Refusal
from trainers.ps.server.rounds import Gradient
from trainers.ps.tables.spec import SpecError, TableSpec
from trainers.ps.tables.table import KeysError, ShapeError, Table, TableError, make_table

_CODES: dict[type[TableError], Code] = {ShapeError: Code.BAD_SHAPE, KeysError: Code.BAD_KEYS}


class Store:
    """Tables by number. `ready` once trainer 0 has sent all initial values."""

    def __init__(self) -> None:
        self._tables: dict[int, Table] = {}
        self._declared = False
        self.ready = False

    def declare(self, rank: int, parts: Sequence[Part]) -> None:
        """Make the tables, or check that this trainer describes the ones that exist."""
        specs = _specs(parts)
        if not self._declared:
            self._tables = {number: make_table(spec) for number, spec in specs.items()}
            self._declared = True
            return
        mine = {number: table.spec for number, table in self._tables.items()}
        for number in sorted(mine.keys() | specs.keys()):
            if mine.get(number) != specs.get(number):
                raise Refusal(
                    Code.MISMATCH,
                    f"trainer {rank} describes another model or optimizer: {specs.get(number)}; "
                    f"here it is {mine.get(number)}",
                )

    def assign(self, parts: Sequence[Part]) -> None:
        """Initial values; all parts are checked before the first is stored."""
        found = list(self._entries(parts))
        for table, keys, part in found:
            _translated(table.fits, keys, part.data)
        for table, keys, part in found:
            table.assign(keys, part.data)

    def pull(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """WANT parts become VALUES, KEYS parts become ROWS, in the order asked."""
        return tuple(self._pull(part) for part in parts)

    def read_push(self, parts: Sequence[Part]) -> list[Gradient]:
        """The gradients of a push, every one of them checked: `apply` will not refuse them. Changes
        nothing.
        """
        push = []
        for table, keys, part in self._entries(parts):
            _translated(table.check, keys, part.data)
            push.append(Gradient(part.table, part.data, keys, part.lr))
        if len({gradient.table for gradient in push}) != len(push):
            raise Refusal(Code.BAD_MESSAGE, "a push names the same table twice")
        return push

    def apply(self, gradients: Sequence[Gradient]) -> None:
        for gradient in gradients:
            self._tables[gradient.table].apply(gradient.keys, gradient.values, gradient.lr)

    def _table(self, number: int) -> Table:
        if number not in self._tables:
            raise Refusal(Code.UNKNOWN_TABLE, f"table {number} is not on this server")
        return self._tables[number]

    def _pull(self, part: Part) -> Part:
        table = self._table(part.table)
        if part.field is Field.KEYS:
            return Part(part.table, Field.ROWS, _pulled(table, part.data))
        if part.field is Field.WANT:
            return Part(part.table, Field.VALUES, _pulled(table, None))
        raise Refusal(Code.BAD_MESSAGE, f"a pull with a {part.field.name} part")

    def _entries(self, parts: Sequence[Part]) -> Iterator[tuple[Table, torch.Tensor | None, Part]]:
        """(table, keys or None, the part with the values) for each VALUES part and each KEYS + ROWS pair."""
        waiting: Part | None = None
        for part in parts:
            if part.field is Field.KEYS and waiting is None:
                waiting = part
            elif part.field is Field.ROWS and waiting is not None and waiting.table == part.table:
                yield self._table(part.table), waiting.data, part
                waiting = None
            elif part.field is Field.VALUES and waiting is None:
                yield self._table(part.table), None, part
            else:
                raise Refusal(Code.BAD_MESSAGE, f"a {part.field.name} part in the wrong place")
        if waiting is not None:
            raise Refusal(Code.BAD_MESSAGE, "a KEYS part without its ROWS")


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


def _pulled(table: Table, keys: torch.Tensor | None) -> torch.Tensor:
    try:
        return table.pull(keys)
    except TableError as error:
        raise _refusal(error) from error


def _translated(
    check: Callable[[torch.Tensor | None, torch.Tensor], None],
    keys: torch.Tensor | None,
    values: torch.Tensor,
) -> None:
    try:
        check(keys, values)
    except TableError as error:
        raise _refusal(error) from error
