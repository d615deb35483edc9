"""Blocks: dense parameters cut in one way, put together in another. Knows ranges of elements; leaves files to
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from trainers.ps.saved.errors import LoadError
from trainers.ps.saved.fit import Block, block_of
from trainers.ps.tables.cut import DenseRows
from trainers.ps.tables.spec import TableSpec


@dataclass(slots=True)
class _Filling:
    """A block whose elements come in any order, some of them more than once."""

    name: str
    block: Block
    values: torch.Tensor
    seen: torch.Tensor
    state: list[torch.Tensor] = field(default_factory=list)


class Blocks:
    """The dense blocks of one server, while they are filled."""

    def __init__(self, specs: Sequence[TableSpec]) -> None:
        self._by_parameter: dict[str, list[tuple[TableSpec, Block]]] = {}
        self._filling: dict[str, _Filling] = {}
        for spec in specs:
            block = block_of(spec)
            self._by_parameter.setdefault(block.parameter, []).append((spec, block))

    def overlap(self, saved: TableSpec) -> bool:
        """Whether a saved block has elements of any of these."""
        return any(True for _ in self._overlapping(block_of(saved)))

    def add(self, saved: TableSpec, rows: DenseRows) -> None:
        """Take what there is in a saved block. A later one overwrites an earlier one."""
        source = block_of(saved)
        for spec, block in self._overlapping(source):
            filling = self._filling.setdefault(spec.name, _empty(spec, block, len(rows.state)))
            start, stop = max(block.start, source.start), min(block.stop, source.stop)
            into = slice(start - block.start, stop - block.start)
            out_of = slice(start - source.start, stop - source.start)
            filling.values[into] = rows.values[out_of]
            filling.seen[into] = True
            for mine, theirs in zip(filling.state, rows.state, strict=True):
                mine[into] = theirs[out_of]

    def whole(self, where: str) -> Iterator[tuple[str, DenseRows]]:
        """(table name, block) of each. Raises LoadError when elements are missing."""
        for pieces in self._by_parameter.values():
            for spec, block in pieces:
                filling = self._filling.get(spec.name)
                if filling is None or not bool(filling.seen.all()):
                    raise LoadError(
                        f"the save in {where} lacks elements of parameter {block.parameter!r} between "
                        f"{block.start} and {block.stop}: it has another size now, or parts are missing"
                    )
                yield spec.name, DenseRows(filling.values, tuple(filling.state))

    def _overlapping(self, source: Block) -> Iterator[tuple[TableSpec, Block]]:
        for spec, block in self._by_parameter.get(source.parameter, []):
            if block.start < source.stop and source.start < block.stop:
                yield spec, block


def _empty(spec: TableSpec, block: Block, states: int) -> _Filling:
    values, seen = torch.empty(spec.size), torch.zeros(spec.size, dtype=torch.bool)
    return _Filling(spec.name, block, values, seen, [torch.empty(spec.size) for _ in range(states)])
