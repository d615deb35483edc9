"""How gradients of all ranks become one, when DDP's own average will not do. Knows gradient buckets; leaves
when to DDP.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainers.errors import NotSupportedError


class Bucket(Protocol):
    """torch's GradBucket, which it does not name for type checkers."""

    def buffer(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Reducing:
    """The sum of all ranks' gradients over `divisor`. `dtype`: in which they travel; None: in their own."""

    divisor: float
    dtype: torch.dtype | None = None


def reduce(how: Reducing, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
    """What a communication hook of DDP does."""
    buffer = bucket.buffer()
    sent = buffer if how.dtype is None else buffer.to(how.dtype)
    sent.div_(how.divisor)  # before adding up: a sum of float16 overflows earlier than an average
    future: torch.futures.Future[list[torch.Tensor]] = dist.all_reduce(sent, async_op=True).get_future()

    def back(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        summed = done.value()[0]
        return summed if summed.dtype == buffer.dtype else buffer.copy_(summed)

    return future.then(back)


def set_reducing(model: torch.nn.Module, how: Reducing) -> None:
    """Have a model's gradients reduced like this: one that DDP wraps, or that FSDP2 has sharded."""
    if isinstance(model, DistributedDataParallel):
        # torch wants the hook's annotations to be its own types, and not their names; a lambda has none.
        model.register_comm_hook(None, lambda _, bucket: reduce(how, bucket))
        return
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise NotSupportedError(
            "NotSupported: strategy.gradient_merge and gradient_scale_configs together with sharding stage 2 "
            f"or 3 need a newer torch than {torch.__version__}; use stage 1, or drop them"
        )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(how.divisor)
            module.set_force_sum_reduction_for_comms(True)  # a factor before the sum is NCCL's alone
