"""Key index: from int64 keys to row numbers, a whole request at a time. Knows keys; leaves the rows to the
table.

Sorted keys and binary search: any int64 is a key, nothing is done per key in Python. Rows are numbered in
the order in which keys were first inserted.
"""

from __future__ import annotations

import torch


class KeyIndex:
    """A growing map int64 -> row number."""

    def __init__(self) -> None:
        self._keys = torch.empty(0, dtype=torch.int64)
        self._slots = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._keys)

    def lookup(self, keys: torch.Tensor) -> torch.Tensor:
        """Row numbers of `keys`, (n,) int64; -1 for a key that is not there."""
        if not len(self._keys):
            return torch.full_like(keys, -1)
        near = torch.searchsorted(self._keys, keys).clamp_(max=len(self._keys) - 1)
        return torch.where(self._keys[near] == keys, self._slots[near], -1)

    def insert(self, keys: torch.Tensor) -> torch.Tensor:
        """Row numbers of `keys` (strictly ascending); new keys get the next numbers."""
        slots = self.lookup(keys)
        new = keys[slots < 0]
        if len(new):
            fresh = torch.arange(len(self), len(self) + len(new))
            slots[slots < 0] = fresh
            self._merge(new, fresh)
        return slots

    def _merge(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        appended = not len(self._keys) or bool(keys[0] > self._keys[-1])
        self._keys, self._slots = torch.cat([self._keys, keys]), torch.cat([self._slots, slots])
        if not appended:
            self._keys, order = torch.sort(self._keys)
            self._slots = self._slots[order]
