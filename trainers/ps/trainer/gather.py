"""Gather: rows by position, and a backward pass that adds gradients up in one go: on a CPU torch's own
embedding backward takes seven times as long. Knows autograd; leaves keys to others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from trainers.ps.kernels.merge import add_rows


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.place, ctx.count = place, len(rows)
        return functional.embedding(place, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, torch.Tensor]:
        (grad,) = grads
        dim = grad.shape[-1]
        out = np.zeros((ctx.count, dim), np.float32)
        # The first gradient of a row is copied, so places must come in the order of their first appearance:
        # with several lookups over the same keys they may not, and all are added to zeros.
        add_rows(ctx.place.reshape(-1).numpy(), grad.reshape(-1, dim).contiguous().numpy(), ctx.count, out)
        return None, torch.from_numpy(out)


def gathered(place: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """rows[place]: (...) int64 positions and (n, dim) -> (..., dim), differentiable in the rows."""
    if rows.is_cpu and rows.dtype is torch.float32:
        result: torch.Tensor = _Gather.apply(place, rows)  # type: ignore[no-untyped-call]  # torch's
        return result
    return functional.embedding(place.to(rows.device), rows)
