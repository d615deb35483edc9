"""Fit: whether saved tables are those of a model. Pure: two sets of specs in, an error that says both out.

A dense block is named `parameter[start:stop]` and saved under that name. Another number of servers cuts a
parameter elsewhere, so dense tables are compared by parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from trainers.ps.partition import SLICE_ABOVE
from trainers.ps.saved.errors import LoadError
from trainers.ps.tables.rules import AnyRule
from trainers.ps.tables.spec import TableKind, TableSpec

_BLOCK = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """Elements `[start, stop)` of a dense parameter."""

    parameter: str
    start: int
    stop: int


def block_of(spec: TableSpec) -> Block:
    """Of a dense table; one whose name says no range is a whole parameter."""
    found = _BLOCK.fullmatch(spec.name)
    if found and int(found[3]) - int(found[2]) == spec.size:
        return Block(found[1], int(found[2]), int(found[3]))
    return Block(spec.name, 0, spec.size)


def check_fit(
    saved: Iterable[TableSpec], model: Iterable[TableSpec], where: str, *, whole: bool, values_only: bool
) -> None:
    """Raises LoadError when rows of `saved` cannot be rows of `model`: other names, row lengths, sizes or
    rules. `whole`: `model` is all of it; otherwise it is what one server holds, that is all sparse tables
    and some dense blocks. `values_only`: rules need not agree, because their state starts anew.

    A rule's options may differ (another weight decay, say): the model's count from then on.
    """
    theirs, ours = _shapes(saved), _shapes(model)
    missing = sorted(ours.keys() - theirs.keys())
    extra = sorted(name for name in theirs.keys() - ours.keys() if whole or theirs[name].sparse)
    if missing or extra:
        raise LoadError(
            f"the save in {where} is of another model: it has the tables {_listed(theirs)}; this model has "
            f"{_listed(ours)}. Not in the save: {_listed(missing)}. Not in this model: {_listed(extra)}."
        )
    for name, mine in ours.items():
        kept = theirs[name]
        same_size = kept.size == mine.size if whole or mine.sparse else kept.size >= mine.size
        if kept.sparse != mine.sparse or not same_size:
            raise LoadError(f"table {name!r} of {where} is {kept.words}; in this model it is {mine.words}")
        if not values_only and (type(kept.rule), kept.rule.states) != (type(mine.rule), mine.rule.states):
            raise LoadError(
                f"table {name!r} of {where} was trained with {kept.rule}, this model has {mine.rule}, "
                "and the optimizer state does not fit. Use the saved rule, or load a save of mode 2 (values)."
            )


def check_small(saved: Iterable[TableSpec], model: Iterable[TableSpec], where: str) -> None:
    """Raises LoadError for a dense parameter of another size, as far as one server can tell: small ones are
    never sliced, so their one block is all of them.
    """
    theirs = _shapes(saved)
    for name, mine in _shapes(model).items():
        kept = theirs.get(name, mine)
        if not mine.sparse and mine.size < SLICE_ABOVE and kept.size != mine.size:
            raise LoadError(f"table {name!r} of {where} is {kept.words}; in this model it is {mine.words}")


@dataclass(frozen=True, slots=True)
class _Shape:
    sparse: bool
    size: int
    rule: AnyRule

    @property
    def words(self) -> str:
        return f"sparse with rows of {self.size}" if self.sparse else f"dense with {self.size} elements"


def _shapes(specs: Iterable[TableSpec]) -> dict[str, _Shape]:
    shapes: dict[str, _Shape] = {}
    for spec in specs:
        if spec.kind is TableKind.SPARSE:
            shapes[spec.name] = _Shape(True, spec.size, spec.rule)
            continue
        block = block_of(spec)
        size = max(block.stop, shapes[block.parameter].size) if block.parameter in shapes else block.stop
        shapes[block.parameter] = _Shape(False, size, spec.rule)
    return shapes


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
