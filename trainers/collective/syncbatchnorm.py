"""Batch norm over the batches of all ranks, on CPUs too, where torch's own refuses to work. Knows what ranks
tell each other for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def synchronized(model: torch.nn.Module) -> torch.nn.Module:
    """The model, its batch norms over the batches of all ranks; the parameters are the same objects. torch's
    SyncBatchNorm on GPUs; on CPUs, where that does not work and DDP refuses it, our own.
    """
    if next(model.parameters()).device.type != "cpu":
        converted: torch.nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch's
        return converted
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = CpuSyncBatchNorm
    return model


class CpuSyncBatchNorm(_BatchNorm):
    """A batch norm's place, and in training its values for the batches of all ranks together.

    (batch, channels, ...) floats in, as many out; a rank may have none.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        normed, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]  # torch's
        if self.running_mean is not None and self.running_var is not None:
            self._track(mean, variance * (count / (count - 1)))
        out: torch.Tensor = normed
        return out

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Any number of dimensions."""

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.lerp_(new.to(running.dtype), share)


class _Normalize(torch.autograd.Function):
    """Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, with mean and variance over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        mean, variance, count = _moments_of_all(values)
        if count.item() < 2:
            raise ValueError(
                f"batch norm in training wants more than 1 value per channel, got {count.item():.0f}"
            )
        scale = torch.rsqrt(variance + eps)
        normed = (values - _wide(mean, values)) * _wide(scale, values)
        ctx.save_for_backward(normed, weight, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        out = normed if weight is None else normed * _wide(weight, values)
        out = out if bias is None else out + _wide(bias, values)
        return out.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *unused: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normed, weight, scale, count = ctx.saved_tensors
        grads = grad.to(normed.dtype)
        sums = torch.stack([_sum(grads), _sum(grads * normed)])
        of_bias, of_weight = sums.clone()  # this rank's; DDP averages them as it does all gradients
        dist.all_reduce(sums)
        shift, slope = sums / count
        of_input = (grads - _wide(shift, grads) - normed * _wide(slope, grads)) * _wide(scale, grads)
        if weight is not None:
            of_input = of_input * _wide(weight, grads)
        wanted = ctx.needs_input_grad
        return of_input.to(grad.dtype), of_weight if wanted[1] else None, of_bias if wanted[2] else None, None


def _moments_of_all(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and variance of each channel, and how many values of it there are. From the ranks' own means, as
    in Chan, Golub and LeVeque 1979: sums of squares would lose digits.
    """
    count = values.numel() // values.shape[1]
    mine = values.new_zeros(3, values.shape[1])
    if count:
        dims = [dim for dim in range(values.dim()) if dim != 1]
        variance, mean = torch.var_mean(values, dims, correction=0)
        mine = torch.stack([mean, variance, torch.full_like(mean, count)])
    told = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(told, mine)
    means, variances, counts = torch.stack(told, dim=1)
    total = counts.sum(dim=0)
    mean = (means * counts).sum(dim=0) / total
    variance = ((variances + (means - mean).square()) * counts).sum(dim=0) / total
    return mean, variance, total[0]


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.sum([dim for dim in range(values.dim()) if dim != 1])


def _wide(channels: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(channels) as (1, channels, 1, ...)"""
    return channels.view(1, -1, *[1] * (like.dim() - 2))
