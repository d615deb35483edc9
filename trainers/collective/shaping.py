"""What a strategy changes in a model before it is wrapped, and in which order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trainers.collective.compiling import compile_in_place
from trainers.collective.recompute import recompute
from trainers.collective.shardingconfigs import CompileConfigs, RecomputeConfigs
from trainers.collective.syncbatchnorm import synchronized
from trainers.errors import UsageError
from trainers.strategy import DistributedStrategy

SMALLEST_BUCKET_MB = 1.0
"""torch.distributed._DEFAULT_FIRST_BUCKET_BYTES; a compiled DDP model wants no smaller ones."""


def shaped(model: torch.nn.Module, strategy: DistributedStrategy) -> torch.nn.Module:
    """The model as the strategy wants it, before it is wrapped: `sync_batch_norm`, `recompute`, `compile`.
    Parameters keep their names and stay the same objects, so that an optimizer may have been made before.

    Raises UsageError for names that are no module's, NotSupportedError where something is missing.
    """
    if strategy.compile and strategy.fuse_grad_size_in_MB < SMALLEST_BUCKET_MB:
        raise UsageError(
            f"strategy.compile with fuse_grad_size_in_MB {strategy.fuse_grad_size_in_MB}: torch cuts a "
            f"compiled program at the buckets, and the first has {SMALLEST_BUCKET_MB} MB; give at least that"
        )
    if strategy.sync_batch_norm and dist.get_world_size() > 1:
        model = synchronized(model)
    if strategy.recompute:
        recompute(model, RecomputeConfigs(**strategy.recompute_configs), compiled=strategy.compile)
    if strategy.compile:
        compile_in_place(model, CompileConfigs(**strategy.compile_configs))
    return model
