"""Rounds: gradients of one push, and the average of a step over trainers. Pure arithmetic; leaves tables to
others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Gradient:
    """One table's share of a push: `values` is (size,), or (keys, dim) with `keys` (strictly ascending)."""

    table: int
    values: torch.Tensor
    keys: torch.Tensor | None
    lr: float


class Round:
    """The pushes of one step, one for each trainer. Kept apart until all are there, and added in rank
    order: the result does not depend on who came first.
    """

    def __init__(self) -> None:
        self._pushes: dict[int, list[Gradient]] = {}

    def add(self, rank: int, push: list[Gradient]) -> None:
        self._pushes[rank] = push

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


def _mean(gradients: list[Gradient], trainers: int) -> Gradient:
    first = gradients[0]
    if trainers == 1:
        return first
    if first.keys is None:
        values = torch.stack([gradient.values for gradient in gradients]).sum(0)
        return Gradient(first.table, values.div_(trainers), None, first.lr)
    keys, values = merge_rows(
        (gradient.keys, gradient.values) for gradient in gradients if gradient.keys is not None
    )
    return Gradient(first.table, values.div_(trainers), keys, first.lr)


def merge_rows(pieces: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum rows of equal keys: pieces of (keys (n,), rows (n, dim)) -> keys strictly ascending and their
    summed rows.
    """
    all_keys, all_rows = zip(*pieces, strict=True)
    rows = torch.cat(all_rows)
    keys, place = torch.unique(torch.cat(all_keys), return_inverse=True)
    return keys, torch.zeros(len(keys), rows.shape[1]).index_add_(0, place, rows)
