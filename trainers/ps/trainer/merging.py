"""Merging: gradients of several steps become one push. Knows how rules want them merged; leaves sending to
`exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainers.ps.kernels.merge import merge_rows
from trainers.ps.net.wire import Part
from trainers.ps.tables.rules import SGD, AnyRule
from trainers.ps.trainer.dense import DenseParameters
from trainers.ps.trainer.remote import Merged, RemoteTable


class Merging:
    """Plain SGD gets the sum, which is what the steps one by one would have been; every other rule the mean
    over the steps, as in Paddle's AsyncCommunicator.
    """

    def __init__(self, tables: Sequence[RemoteTable]) -> None:
        self._tables = tables
        self._dense: list[dict[str, torch.Tensor]] = []
        self._sparse: dict[int, list[Merged]] = {}
        self.steps = 0

    def add(self, dense: dict[str, torch.Tensor]) -> None:
        """The gradients of one step: these dense ones, and those that the tables have kept."""
        self._dense.append(dense)
        for number, table in enumerate(self._tables):
            merged = table.take_gradients()
            if merged is not None:
                self._sparse.setdefault(number, []).append(merged)
        self.steps += 1

    def add_push(self, parameters: DenseParameters, push: Sequence[list[Part]]) -> None:
        """Append what has been added to each server's push, and begin anew."""
        dense, sparse, steps = self._dense, self._sparse, self.steps
        self._dense, self._sparse, self.steps = [], {}, 0
        parameters.add_push(push, dense[0] if steps == 1 else _merged_dense(dense, parameters))
        for number, pieces in sparse.items():
            table = self._tables[number]
            table.add_push(push, pieces[0] if steps == 1 else _merged_rows(pieces, table.sparse.rule, steps))


def _merged_dense(
    steps: list[dict[str, torch.Tensor]], parameters: DenseParameters
) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for step in steps:
        for name, gradient in step.items():
            if name in total:
                total[name].add_(gradient)
            else:
                total[name] = gradient.clone()
    for name, gradient in total.items():
        if not _sums(parameters.rule(name)):
            gradient.div_(len(steps))
    return total


def _merged_rows(pieces: list[Merged], rule: AnyRule, steps: int) -> Merged:
    keys, rows = merge_rows([(piece.keys, piece.rows) for piece in pieces])
    counted = [(piece.keys, piece.stats) for piece in pieces if piece.stats is not None]
    stats = merge_rows(counted)[1] if counted else None
    return Merged(keys, rows if _sums(rule) else rows.div_(steps), stats)


def _sums(rule: AnyRule) -> bool:
    return isinstance(rule, SGD) and not rule.momentum
