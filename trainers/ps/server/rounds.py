"""Rounds: gradients of one push, and the average of a step over trainers. Pure arithmetic; leaves tables to
others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from trainers.ps.kernels.merge import merge_rows


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
