"""Change the modules of a model before it is wrapped.

The changes are torch.compile, recomputed activations, and batch norms over all ranks. Recomputed activations
use torch.utils.checkpoint. Batch norm over the batches of all ranks also works on CPUs, where torch's own
refuses. Modules are found by name and pattern.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from trainers.checks import nearest
from trainers.collective.configs import CompileConfigs, RecomputeConfigs
from trainers.errors import NotSupportedError, UsageError

# ---- torch.compile


def compile_in_place(model: Module, configs: CompileConfigs) -> None:
    """Compile the module's calls from the first one on. The module keeps its type and names.

    A DDP around it still makes torch cut the program at its buckets, so gradients travel during the backward
    pass. Raises NotSupportedError if inductor lacks a C++ compiler, because the first step would fail.
    """
    check_compiler(configs.backend, "strategy.compile")

    # This does the work of `model.compile()` without its frame. Otherwise torch skips frames of its own
    # modules, so a Sequential, for example, would silently stay uncompiled.
    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's

    model._compiled_call_impl = torch.compile(
        call,
        backend=configs.backend,
        mode=configs.mode,
        dynamic=configs.dynamic,
        fullgraph=configs.fullgraph,
    )


def check_compiler(backend: str, asked: str, path: str | None = None) -> None:
    """Raise NotSupportedError if a backend of torch.compile lacks the program that it calls.

    `asked` names what requested it. `path` is the search path, by default PATH.
    """
    # As torch._inductor chooses it.
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if backend == "inductor" and shutil.which(compiler, path=path) is None:
        raise NotSupportedError(
            f"NotSupported: {asked} needs a C++ compiler, and {compiler!r} is not here; install g++, or set "
            'the variable CXX, or use the backend "aot_eager"'
        )


# ---- Modules by name and pattern


def matching_modules(model: Module, patterns: Iterable[str], what: str) -> list[str]:
    """Return the names of the modules that match the patterns, in the model's order.

    A star matches one step of a name or a part of it. `blocks.*` is each of the blocks, without the modules
    in them. Raises UsageError, with `what`, for a pattern without a match.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if _fits_pattern(name.split("."), pattern.split("."))}
        if not matched:
            raise UsageError(
                f"{what} names {pattern!r}, and the model has no such module{nearest(pattern, names)}"
            )
        found |= matched
    return [name for name in names if name in found]


def outermost_modules(names: Iterable[str]) -> list[str]:
    """Return the names without modules that are inside another one of them."""
    kept: list[str] = []
    for name in sorted(names, key=lambda each: each.count(".")):
        if not any(name.startswith(f"{outer}.") for outer in kept):
            kept.append(name)
    return kept


def _fits_pattern(steps: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(steps) == len(pattern) and all(map(fnmatchcase, steps, pattern))


# ---- Activations that are recomputed in the backward pass instead of kept


def recompute(model: Module, configs: RecomputeConfigs, *, compiled: bool = False) -> None:
    """Keep only the inputs of the named modules for the backward pass, from now on.

    Gradients, buffers and random numbers are as in training without recomputation, and names stay. A module
    inside another named one is recomputed with it. Raises UsageError for unknown names and for an empty list,
    and NotSupportedError for combinations that a `compiled` model does not support.
    """
    if not configs.checkpoints:
        children = ", ".join(name for name, _ in model.named_children())
        raise UsageError(
            "strategy.recompute is True and recompute_configs names no checkpoints; give names of modules, "
            f'as {{"checkpoints": ["blocks.*"]}}; this model has {children or "none"}'
        )
    names = outermost_modules(matching_modules(model, configs.checkpoints, "recompute_configs checkpoints"))
    if compiled:
        _check_buffers(model, names)
    for name in names:
        module = model.get_submodule(name)
        # On the object, so that hooks (also FSDP2's) stay around it, and names stay free of a prefix.
        module.forward = _Recomputed(module, module.forward)


def _check_buffers(model: Module, names: Iterable[str]) -> None:
    for name in names:
        if any(True for _ in model.get_submodule(name).buffers()):
            raise NotSupportedError(
                f"NotSupported: strategy.compile with strategy.recompute of {name!r}, which has buffers: "
                "compiled, what the forward pass writes there would be written twice; leave it out of "
                "recompute_configs, or set strategy.compile = False"
            )


class _Recomputed:
    """A module's forward that keeps only its inputs.

    As a context, which may be entered again, it replaces the buffers by copies. Otherwise a batch norm's
    running statistics would count every batch twice.
    """

    def __init__(self, module: Module, forward: Callable[..., Any]) -> None:
        self._module, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # the contexts below are ignored there
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(
            self._forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), self), **kwargs
        )

    def __enter__(self) -> None:
        self._places = [
            (owner, name, buffer)
            for owner in self._module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]
        for owner, name, buffer in self._places:
            owner._buffers[name] = buffer.clone()

    def __exit__(self, *error: object) -> None:
        for owner, name, buffer in self._places:
            owner._buffers[name] = buffer


# ---- Batch norm over the batches of all ranks, also on CPUs, which torch's own does not support


def with_synchronized_batch_norm(model: Module) -> Module:
    """Make the model's batch norms use the batches of all ranks. Return the model with the same parameters.

    On GPUs it uses torch's SyncBatchNorm. That does not work on CPUs, and DDP refuses it there, so CPUs use
    `CpuSyncBatchNorm`.
    """
    if next(model.parameters()).device.type != "cpu":
        converted: Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch's
        return converted
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = CpuSyncBatchNorm
    return model


class CpuSyncBatchNorm(_BatchNorm):
    """A batch norm that, in training, uses the batches of all ranks together.

    Inputs and outputs are (batch, channels, ...) floats. A rank may have an empty batch.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        normed, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]  # torch's
        if self.running_mean is not None and self.running_var is not None:
            self._track(mean, variance * (count / (count - 1)))
        out: Tensor = normed
        return out

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any number of dimensions."""

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
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
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        mean, variance, count = _moments_of_all(values)
        if count.item() < 2:
            raise ValueError(
                f"batch norm in training needs more than 1 value per channel, got {count.item():.0f}"
            )
        scale = torch.rsqrt(variance + eps)
        normed = (values - _by_channel(mean, values)) * _by_channel(scale, values)
        ctx.save_for_backward(normed, weight, scale, count)
        ctx.mark_non_differentiable(mean, variance, count)
        out = normed if weight is None else normed * _by_channel(weight, values)
        out = out if bias is None else out + _by_channel(bias, values)
        return out.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        normed, weight, scale, count = ctx.saved_tensors
        grads = grad.to(normed.dtype)
        sums = torch.stack([_sum_by_channel(grads), _sum_by_channel(grads * normed)])
        of_bias, of_weight = sums.clone()  # this rank's gradients, which DDP averages like all others
        dist.all_reduce(sums)
        shift, slope = sums / count
        of_input = (grads - _by_channel(shift, grads) - normed * _by_channel(slope, grads)) * _by_channel(
            scale, grads
        )
        if weight is not None:
            of_input = of_input * _by_channel(weight, grads)
        wanted = ctx.needs_input_grad
        return of_input.to(grad.dtype), of_weight if wanted[1] else None, of_bias if wanted[2] else None, None


def _moments_of_all(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and variance of each channel, and the number of its values.

    They are combined from the ranks' own means, as in Chan, Golub and LeVeque 1979. Sums of squares would
    lose digits.
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


def _sum_by_channel(values: Tensor) -> Tensor:
    return values.sum([dim for dim in range(values.dim()) if dim != 1])


def _by_channel(channels: Tensor, like: Tensor) -> Tensor:
    """Reshape (channels) to (1, channels, 1, ...)."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))
