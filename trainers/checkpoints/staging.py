"""A copy of a state that training may go on beside. Knows tensors and devices; no file and no other rank."""

from __future__ import annotations

from typing import Any

import torch

from trainers.checkpoints.tensors import Tensors, is_sharded


class Staging:
    """Copies in this machine's memory, which the next ones use again: to get fresh memory from the system
    takes longer than to copy. So a copy is valid until the next.
    """

    def __init__(self) -> None:
        self._memory: Tensors = {}

    def copies(self, tensors: Tensors) -> Tensors:
        """The same tensors on the CPU, shards as shards, as they are now."""
        memory, self._memory = self._memory, {}
        copied = {}
        for key, value in tensors.items():
            local = _local(value.detach())
            self._memory[key] = _copied(local, memory.pop(key, None))
            copied[key] = _like(value, self._memory[key])
        if any(value.is_cuda for value in tensors.values()):
            torch.cuda.current_stream().synchronize()  # copies into pinned memory are under way until then
        return copied


def _copied(value: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
    if memory is None or memory.shape != value.shape or memory.dtype != value.dtype:
        memory = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
    return memory.copy_(value, non_blocking=value.is_cuda)


def _local(value: Any) -> torch.Tensor:
    local: torch.Tensor = value.to_local() if is_sharded(value) else value
    return local


def _like(value: Any, local: torch.Tensor) -> torch.Tensor:
    """`local` as the same part of the whole as `value` is of it. By the constructor, since `from_local` would
    bring it to the mesh's device.
    """
    if not is_sharded(value):
        return local
    shard: torch.Tensor = type(value)(local, value._spec, requires_grad=False)
    return shard
