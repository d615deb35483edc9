"""EmbeddingBag in operations of which torch.export can tell the shapes. Its own says how many bags there are
by an arange over all ids, which fixes a program to the batch that it was exported with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import torch
from torch.nn import functional


class Bags(torch.nn.Module):
    """An EmbeddingBag in evaluation: the same arguments, the same answers. `rows`: what looks up (..., dim)
    for ids (...), where it is not the bag's own weight.
    """

    weight: torch.nn.Parameter | None

    def __init__(self, bag: torch.nn.EmbeddingBag, rows: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.rows = rows
        self.weight = cast(torch.nn.Parameter, bag.weight) if rows is None else None
        self._mode = bag.mode
        self._last = bag.include_last_offset
        self._padding = bag.padding_idx

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows = self._look_up(input)
        kept = torch.ones_like(input, dtype=torch.bool) if self._padding is None else input != self._padding
        if input.dim() == 2 and offsets is None:
            weights = None if per_sample_weights is None else per_sample_weights[..., None]
            return _COMBINED[self._mode](rows if weights is None else rows * weights, kept[..., None])
        place = torch.where(kept, torch.arange(1, len(input) + 1, device=input.device), 0)
        return functional.embedding_bag(
            place,
            torch.cat([torch.zeros_like(rows[:1]), rows]),
            offsets,
            mode=self._mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self._last,
            padding_idx=0,
        )

    def _look_up(self, ids: torch.Tensor) -> torch.Tensor:
        if self.rows is not None:
            found: torch.Tensor = self.rows(ids)
            return found
        assert self.weight is not None
        return functional.embedding(ids, self.weight)


def _sum(rows: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.where(kept, rows, 0.0).sum(1)


def _mean(rows: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return _sum(rows, kept) / kept.sum(1).clamp(min=1)


def _max(rows: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.where(kept.any(1), torch.where(kept, rows, -math.inf).amax(1), 0.0)


_COMBINED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "max": _max,
}
