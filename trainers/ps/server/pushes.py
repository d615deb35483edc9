"""The gradients of a push, and their average over trainers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from torch import Tensor

from trainers.ps.kernels.batch import merge_runs
from trainers.ps.tables.run import NOT_IN, Spans, starts_of


class Gradient(NamedTuple):
    """The gradient of a run of tables in a push. `table` is the first table of the run. Dense blocks have
    `sizes`, and `values` is (sum of sizes,). Sparse tables have `keys` (n,), `values` (n, dim), `spans` (see
    `tables.run`, None if all keys are of one table) and perhaps `stats` (n, 2). If `written`, the `values`
    replace the values of dense blocks before gradients are applied.
    """

    table: int
    values: Tensor
    keys: Tensor | None
    lr: float
    stats: Tensor | None = None
    sizes: Sequence[int] = ()
    spans: Spans | None = None
    written: bool = False

    def blocks(self) -> Sequence[Gradient]:
        """Return one gradient for each table."""
        if self.keys is None:
            if len(self.sizes) < 2:
                return (self,)
            shares = self.values.split_with_sizes(self.sizes)
            return [
                self._replace(table=table, values=share, sizes=())
                for table, share in enumerate(shares, self.table)
            ]
        if self.spans is None:
            return (self,)
        starts = starts_of(self.spans).tolist()
        return [
            Gradient(
                self.table + number,
                self.values[start:stop],
                self.keys[start:stop],
                self.lr,
                None if self.stats is None else self.stats[start:stop],
            )
            for number, (start, stop) in enumerate(pairwise(starts))
            if self.spans[number] != NOT_IN
        ]

    def tables(self) -> range:
        """Return the numbers of the tables."""
        count = len(self.sizes) if self.spans is None else len(self.spans)
        return range(self.table, self.table + max(1, count))

    @property
    def shape(self) -> tuple[object, ...]:
        """A value that is equal for gradients of a run that can be added."""
        if self.keys is None:
            return self.values.shape[0], self.written
        return self.stats is None, (self.each == NOT_IN).tobytes()

    @property
    def each(self) -> Spans:
        """The spans, also for one table."""
        assert self.keys is not None
        return np.array([self.keys.shape[0]]) if self.spans is None else self.spans


class StepPushes:
    """The pushes of one step, one for each trainer. They stay separate until all have arrived, and are then
    added in rank order. The result therefore does not depend on the order of arrival.
    """

    def __init__(self) -> None:
        self._pushes: dict[int, Sequence[Gradient]] = {}
        self.overflowed: set[int] = set()
        """The ranks whose gradients were not finite. If there are any, the step changes nothing."""

    @property
    def by_rank(self) -> Mapping[int, Sequence[Gradient]]:
        return MappingProxyType(self._pushes)

    def add(self, rank: int, push: Sequence[Gradient] | None) -> None:
        """Add a push. None means that its gradients were not finite."""
        if push is None:
            self.overflowed.add(rank)
        self._pushes[rank] = push or ()

    def ranks(self) -> Collection[int]:
        return self._pushes.keys()

    def average(self) -> list[Gradient]:
        """Return for each table the sum over trainers, divided by their number. A trainer without a gradient
        for a table counts as zero. The learning rate comes from the lowest rank with a gradient for the
        table, because rates differ at most in their last digits. Written values come first, also from the
        lowest rank.
        """
        pushes = [self._pushes[rank] for rank in sorted(self._pushes)]
        if self.overflowed:
            pushes = [[each for each in push if each.written] for push in pushes]
        if not _same_runs(pushes):
            # Some trainers used other tables than others, or grouped the tables differently.
            pushes = [[one for each in push for one in each.blocks()] for push in pushes]
        return sorted(_means(pushes), key=lambda each: not each.written)


def _same_runs(pushes: Sequence[Sequence[Gradient]]) -> bool:
    """Return True if all trainers have gradients for the same runs and tables, at the same rates."""
    shapes = [[(each.table, each.lr, *each.shape) for each in push] for push in pushes]
    return all(shape == shapes[0] for shape in shapes)


def _means(pushes: Sequence[Sequence[Gradient]]) -> list[Gradient]:
    by_table: dict[tuple[int, bool], list[Gradient]] = {}
    for push in pushes:
        for gradient in push:
            by_table.setdefault((gradient.table, gradient.written), []).append(gradient)
    return [_mean(gradients, len(pushes)) for gradients in by_table.values()]


def _mean(gradients: Sequence[Gradient], trainers: int) -> Gradient:
    first = gradients[0]
    if trainers == 1 or first.written:
        return first
    if first.keys is None:
        values = first.values.clone()
        for gradient in gradients[1:]:
            values.add_(gradient.values)
        return first._replace(values=values.div_(trainers))
    pieces = [(each.each, each.keys, each.values) for each in gradients if each.keys is not None]
    spans, keys, values = merge_runs(pieces)
    stats = [
        (each.each, each.keys, each.stats)
        for each in gradients
        if each.keys is not None and each.stats is not None
    ]
    # These are the same keys in the same order, because merge_runs numbers them by first appearance.
    counted = merge_runs(stats)[2] if len(stats) == len(gradients) else None
    return Gradient(
        first.table,
        values.div_(trainers),
        keys,
        first.lr,
        counted,
        spans=None if first.spans is None else spans,
    )
