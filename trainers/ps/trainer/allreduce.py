"""Dense parameters that no server holds: gradients averaged among the trainers, updated in each of them.
Knows torch.distributed; leaves sparse tables to the exchange that it wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from trainers.collective.group import start as join_group
from trainers.ps.trainer.exchange import Batches, Exchange
from trainers.roles.identity import Identity


class AllReduced:
    """Steps of all trainers go together, whatever the servers do: an all-reduce waits for everyone."""

    def __init__(
        self,
        exchange: Exchange,
        identity: Identity,
        parameters: Sequence[torch.nn.Parameter],
        buffers: Sequence[torch.Tensor],
        local_step: Callable[[], None],
    ) -> None:
        self._exchange = exchange
        self._parameters = parameters
        self._local_step = local_step
        join_group(identity)
        for tensor in (*parameters, *buffers):  # all begin with trainer 0's values
            dist.broadcast(tensor.data, src=0)

    @property
    def step(self) -> int:
        return self._exchange.step

    @property
    def ahead(self) -> int:
        return self._exchange.ahead

    def start(self, step: int) -> None:
        self._exchange.start(step)

    def push(self) -> None:
        self._average()
        self._exchange.push()
        self._local_step()

    def prefetch(self, batches: Batches) -> None:
        self._exchange.prefetch(batches)

    def refresh(self) -> None:
        self._exchange.refresh()

    def flush(self) -> None:
        self._exchange.flush()

    def _average(self) -> None:
        """One all-reduce over all gradients; who has none for a parameter counts as zero."""
        if not self._parameters:
            return
        flat = torch.cat(
            [
                torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1).cpu()
                for parameter in self._parameters
            ]
        )
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        start = 0
        for parameter in self._parameters:
            stop = start + parameter.numel()
            averaged = flat[start:stop].view_as(parameter).to(parameter.device)
            if parameter.grad is None:
                parameter.grad = averaged.clone()
            else:
                parameter.grad.copy_(averaged)
            start = stop
