"""Overlay: values that stand for those of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Overlay:
    """What dense blocks, and rows by (keys, rows), were before the last step; by number of the table."""

    dense: Mapping[int, torch.Tensor] = field(default_factory=dict)
    rows: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def lay_over(self, table: int, keys: torch.Tensor, rows: torch.Tensor) -> None:
        """Replace those of `rows` (n, dim), of these keys (n,), that are known here."""
        known, instead = self.rows.get(table, (keys[:0], rows[:0]))
        if not len(known) or not len(keys):
            return
        order = torch.argsort(known)
        near = torch.searchsorted(known[order], keys).clamp_(max=len(known) - 1)
        place = order[near]
        same = known[place] == keys
        rows[same] = instead[place[same]]
