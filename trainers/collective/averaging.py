"""Models of all ranks averaged, as localsgd does (Lin et al. 2018, https://arxiv.org/abs/1808.07217). Knows
tensors; leaves when to the cadence.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

MESSAGE_BYTES = 25 << 20
"""Tensors travel in messages of about this size, as DDP sends gradients."""


@torch.no_grad()
def average_model(model: torch.nn.Module) -> None:
    """Bring parameters and floating point buffers to their average over all ranks; all ranks call it. State
    of optimizers stays each rank's own.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    average([*trained, *(buffer for buffer in model.buffers() if buffer.is_floating_point())])


@torch.no_grad()
def average_state(optimizer: torch.optim.Optimizer) -> None:
    """The same for the state of an optimizer, as far as all ranks have it: a checkpoint has only one."""
    mine = {
        (place, key): value
        for place, param in enumerate(param for group in optimizer.param_groups for param in group["params"])
        for key, value in optimizer.state.get(param, {}).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    told: list[list[tuple[int, str]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(told, sorted(mine))
    average(mine[name] for name in told[0] if all(name in names for names in told))


@torch.no_grad()
def average(tensors: Iterable[torch.Tensor]) -> None:
    """The same for tensors of equal shapes and order on all ranks, in place. torch's own averager gives
    parameters new memory, all of them one block, which files of tensors do not take.
    """
    for message in _messages(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in message])
        flat.div_(dist.get_world_size())  # before adding up: no sum may overflow
        dist.all_reduce(flat)
        pieces = torch.split(flat, [tensor.numel() for tensor in message])
        for tensor, piece in zip(message, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))


def _messages(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors that travel together: of one type and device."""
    messages: list[list[torch.Tensor]] = []
    last: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        message = last.get(kind)
        if message is None or sum(each.nbytes for each in message) + tensor.nbytes > MESSAGE_BYTES:
            last[kind] = message = []
            messages.append(message)
        message.append(tensor)
    return messages
