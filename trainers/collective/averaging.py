"""Average tensors over all ranks, in messages of about 25 MB.

It averages models, as in localsgd (Lin et al. 2018, https://arxiv.org/abs/1808.07217), and gradients outside
DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainers.collective.group import gather, group_of
from trainers.optimizer import parameters_of

MESSAGE_BYTES = 25 << 20
"""Tensors travel in messages of about this many bytes, as DDP sends gradients."""


@torch.no_grad()
def average_model(model: torch.nn.Module) -> None:
    """Set parameters and floating-point buffers to their average over all ranks. All ranks must call it.

    Each rank keeps its own optimizer state.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    average_tensors([*trained, *(buffer for buffer in model.buffers() if buffer.is_floating_point())])


@torch.no_grad()
def average_state(optimizer: torch.optim.Optimizer) -> None:
    """Average an optimizer's state, as far as all ranks have it, because a checkpoint has only one."""
    mine = {
        (place, key): value
        for place, param in enumerate(parameters_of(optimizer))
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    gathered = gather(sorted(mine))
    average_tensors(mine[name] for name in gathered[0] if all(name in names for names in gathered))


@torch.no_grad()
def average_tensors(tensors: Iterable[Tensor]) -> None:
    """Average tensors of equal shapes and order on all ranks, in place.

    torch's own averager gives parameters new memory in one block, which files of tensors cannot hold.
    """
    for message in messages_of(tensors):
        _Pending(message).finish()


def messages_of(
    tensors: Iterable[Tensor],
    kind: Callable[[Tensor], object] = lambda tensor: (tensor.dtype, tensor.device),
) -> list[list[Tensor]]:
    """Divide tensors into groups of one kind that travel together, in this order."""
    messages: list[list[Tensor]] = []
    last: dict[object, list[Tensor]] = {}
    sizes: dict[object, int] = {}
    for tensor in tensors:
        key = kind(tensor)
        if key not in last or sizes[key] + tensor.nbytes > MESSAGE_BYTES:
            last[key], sizes[key] = [], 0
            messages.append(last[key])
        last[key].append(tensor)
        sizes[key] += tensor.nbytes
    return messages


def put_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the values of a message into its tensors."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


class PendingAverage:
    """An average with all messages sent at once, starting at construction."""

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._messages = [_Pending(message) for message in messages_of(tensors)]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the averages, and write them into the tensors."""
        for message in self._messages:
            message.finish()


class _Pending:
    """One message that is being sent."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._flat.div_(dist.get_world_size())  # before adding, so that sums do not overflow
        self._work = dist.all_reduce(self._flat, group=group_of(self._flat), async_op=True)

    def finish(self) -> None:
        self._work.wait()
        put_back(self._flat, self._tensors)
