"""The gradient of a group of tables between two pushes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from trainers.ps.kernels.batch import merge_runs
from trainers.ps.tables.run import Spans


@dataclass(slots=True, eq=False)
class GroupGradient:
    """The gradient of a group since the last push, each key once: keys (n,) and rows (n, dim), ordered by
    server and table. `spans` (servers, tables): how many each has, see `tables.run`. `stats` (n, 2): shows
    and clicks.
    """

    spans: Spans
    keys: torch.Tensor
    rows: torch.Tensor
    stats: torch.Tensor | None = None

    @property
    def cuts(self) -> list[int]:
        """The keys of server s are at [cuts[s], cuts[s + 1])."""
        return [0, *np.cumsum(np.maximum(self.spans, 0).sum(axis=1)).tolist()]

    def on_servers(self) -> Iterator[tuple[Spans, slice]]:
        """Of each server the spans, and where its keys are."""
        for spans, (start, stop) in zip(self.spans, pairwise(self.cuts), strict=True):
            yield spans, slice(start, stop)


def merged_rows(
    gradients: Sequence[GroupGradient], values: Sequence[torch.Tensor]
) -> tuple[Spans, torch.Tensor, torch.Tensor]:
    """See `merge_runs`: of all servers together, with these values for their rows."""
    return merge_runs(
        [
            (spans, gradient.keys[some], value[some])
            for gradient, value in zip(gradients, values, strict=True)
            for spans, some in gradient.on_servers()
        ]
    )
