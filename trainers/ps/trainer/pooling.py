"""Call an EmbeddingBag. Sums or means of the rows of a batch are computed without a copy of the rows.

On a CPU, the backward pass of torch's embedding_bag takes longer than the rest of a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainers.kernels.compiled import Floats, Keys
from trainers.ps.kernels.bags import pool_bags, scatter_bags, weigh_bags
from trainers.ps.kernels.batch import array_of
from trainers.ps.trainer.group import Call
from trainers.ps.trainer.weight import once, without_overrides

_NO_WEIGHTS = np.empty(0, np.float32)


def ends_of(ids: Tensor, offsets: Tensor | None, *, last: bool) -> Keys | None:
    """Return the end of each bag among the ids, (bags,) int64.

    Return None for arguments that torch's embedding_bag would refuse, or that the kernels must not receive.
    With `last`, the last offset is the end of the ids.
    """
    if offsets is None:
        if ids.dim() != 2 or not ids.numel():
            return None
        return np.arange(1, ids.shape[0] + 1) * ids.shape[1]
    if ids.dim() != 1 or offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32):
        return None
    starts = offsets.detach().cpu().numpy().astype(np.int64)
    bounds = starts if last else np.append(starts, len(ids))
    if len(bounds) < 2 or bounds[0] or bounds[-1] != len(ids) or (bounds[1:] < bounds[:-1]).any():
        return None
    return bounds[1:]


def weighs(weights: Tensor | None, ids: Tensor, mode: str) -> bool:
    """Return True if these weights can be used, or if there are no weights."""
    if weights is None:
        return True
    fits = weights.shape == ids.shape and weights.is_cpu and weights.dtype is torch.float32
    return fits and mode == "sum"


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weight: Tensor,
        weights: Tensor | None,
        call: Call,
        ends: Keys,
        mean: bool,
    ) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.call = call
        out = torch.empty(len(ends), call.batch.rows.shape[1])
        features, bounds = ctx.bags = _bags(call, ends, mean)
        batch = call.batch
        pool_bags(batch.rows, batch.place, batch.moved, features, bounds, _values(weights), out.numpy())
        return out

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        call, batch, (features, bounds) = ctx.call, ctx.call.batch, ctx.bags
        given = array_of(grads[0].resolve_neg().float())
        of_rows = of_weights = None
        if ctx.needs_input_grad[1]:
            pushed = batch.place, batch.pushed[0], features, bounds, _values(weights)
            of_rows = batch.add(call, lambda out: scatter_bags(given, *pushed, out))
        if ctx.needs_input_grad[2]:
            of_weights = torch.zeros_like(weights, memory_format=torch.contiguous_format)
            weigh_bags(
                given, batch.rows, batch.place, batch.moved, features, bounds, of_weights.view(-1).numpy()
            )
        return None, of_rows, of_weights, None, None, None


def _bags(call: Call, ends: Keys, mean: bool) -> tuple[Keys, Keys]:
    """Return the single feature and the limits of its bags, for the kernels."""
    batch, table = call.batch, call.table
    feature = 0, -call.start, batch.ends[table], batch.padding[table], 0, mean
    return np.array([feature], np.int64), np.append(0, ends)


def _values(weights: Tensor | None) -> Floats:
    return _NO_WEIGHTS if weights is None else array_of(weights.resolve_neg()).reshape(-1)


def pool(call: Call, weight: Tensor, weights: Tensor | None, ends: Keys, *, mean: bool) -> Tensor:
    """Return the sums or means, (bags, dim) float32. A backward pass trains them if the module's weight needs
    a gradient. `weights` has one weight per id, or is None.
    """
    with without_overrides():
        anchor = call.batch.anchor if weight.requires_grad else None
        result: Tensor = _Pool.apply(anchor, weight, weights, call, ends, mean)  # type: ignore[no-untyped-call]  # torch's
    return result
