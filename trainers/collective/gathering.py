"""What each rank has, to all ranks, by way of the CPU: small things beside the training. Knows the process
group; leaves what the bytes mean to its callers.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist


def cpu_group() -> dist.ProcessGroup | None:
    """A group of all ranks whose tensors are on the CPU; the first call makes it, on all ranks. With NCCL
    alone an answer would come when the GPU has done all that waits there.
    """
    return _beside(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _beside(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return None if dist.get_backend(world) == "gloo" else dist.new_group(backend="gloo")


def gather(mine: bytes) -> list[bytes]:
    """What every rank gives, in rank order; all ranks call it. Raises what torch does when a rank is gone."""
    world = dist.get_world_size()
    if world == 1:
        return [mine]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=cpu_group())
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    given = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(given, padded, group=cpu_group())
    return [each[: int(size)].numpy().tobytes() for each, size in zip(given, sizes, strict=True)]
