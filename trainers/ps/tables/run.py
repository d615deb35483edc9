"""Run: adjacent dense blocks whose gradients come together. Knows how they share one tensor; leaves what is
done with a share to the block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainers.ps.kernels.arrays import array_of
from trainers.ps.kernels.finite import all_finite
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.rules import Fixed


class DenseRun:
    """Takes gradients of (sum of `sizes`,) float32: those of the blocks, one behind the other."""

    def __init__(self, blocks: Sequence[DenseTable]) -> None:
        self._blocks = blocks
        self._trained = not any(isinstance(block.spec.rule, Fixed) for block in blocks)
        self.sizes = [block.spec.size for block in blocks]

    def check(self, grad: torch.Tensor) -> None:
        """Raises TableError where a block would."""
        if self._trained and all_finite(grad):
            return
        for block, share in zip(self._blocks, grad.split_with_sizes(self.sizes), strict=True):
            block.check(None, share)

    def apply(self, grad: torch.Tensor, lr: float) -> None:
        """One update of every block."""
        slopes, start = array_of(grad), 0
        for block, size in zip(self._blocks, self.sizes, strict=True):
            block.update(slopes[start : start + size], lr)
            start += size
