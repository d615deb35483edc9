"""A model as the strategy of a collective job wants it, and an optimizer likewise. Knows in which order the
parts of a strategy are applied; leaves each to its file.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from trainers.collective.cadence import Cadence
from trainers.collective.data_parallel import DataParallel
from trainers.collective.pacing import compute_in, pace
from trainers.collective.reducing import Reducing, set_reducing
from trainers.collective.settings import CollectiveSettings
from trainers.collective.shaping import shaped
from trainers.errors import UsageError
from trainers.optimizer import DistributedOptimizer
from trainers.strategy import DistributedStrategy

Names = dict[torch.Tensor, str]


def wrapped(
    model: torch.nn.Module, strategy: DistributedStrategy, settings: CollectiveSettings, cadence: Cadence
) -> torch.nn.Module:
    """DataParallel around the model, or, sharded, the model itself. Raises UsageError for one without
    parameters.
    """
    if not any(True for _ in model.parameters()):
        raise UsageError(
            f"fleet.distributed_model() was given a {type(model).__name__} without parameters, of which "
            "ranks have nothing to tell each other; use it as it is"
        )
    model = shaped(model, strategy)
    if settings.sharded and settings.sharding is not None:
        from trainers.collective.sharding import shard

        model = shard(model, settings.sharding)
    else:
        model = DataParallel(
            model,
            find_unused_parameters=settings.find_unused_parameters,
            bucket_cap_mb=settings.fuse_grad_size_in_MB,
        )
    world = dist.get_world_size()
    divisor = settings.divisor(world)
    if divisor != world or settings.fp16_allreduce:
        set_reducing(model, Reducing(divisor, torch.float16 if settings.fp16_allreduce else None))
    if settings.amp is not None:
        compute_in(model, getattr(torch, settings.amp.dtype))
    if settings.paced:
        pace(model, cadence)
    return model


def replaced(
    optimizer: torch.optim.Optimizer, settings: CollectiveSettings, names: Names
) -> torch.optim.Optimizer:
    """The optimizer that updates: the one given, LARS or LAMB in its place, its state divided or not."""
    if settings.lars is not None or settings.lamb is not None:
        from trainers.collective import largebatch

        if settings.lars is not None:
            optimizer = largebatch.lars(optimizer, settings.lars, names)
        elif settings.lamb is not None:
            optimizer = largebatch.lamb(optimizer, settings.lamb, names)
    if settings.sharding is not None and not settings.sharded:
        from trainers.collective.sharding import zero_optimizer

        optimizer = zero_optimizer(optimizer)
    return optimizer


def stepping(
    optimizer: torch.optim.Optimizer,
    settings: CollectiveSettings,
    cadence: Cadence,
    average: Callable[[], None],
) -> DistributedOptimizer:
    """In fleet's clothes: the plain ones when each step is an update and no loss is scaled."""
    own_backward = settings.scale_strategy == "customized"
    if not (settings.paced or settings.float16 or own_backward):
        return DistributedOptimizer(optimizer)
    from trainers.collective.scaling import scaler_of
    from trainers.collective.stepping import SteppingOptimizer

    scaler = None
    if settings.float16 and settings.amp is not None:
        scaler = scaler_of(settings.amp, _device_of(optimizer))
    return SteppingOptimizer(optimizer, cadence, average, scaler=scaler, own_backward=own_backward)


def _device_of(optimizer: torch.optim.Optimizer) -> str:
    return next((param.device.type for group in optimizer.param_groups for param in group["params"]), "cpu")
