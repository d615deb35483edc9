"""Copies between this process's memory and a device on which embeddings and dense parameters are: of many
tensors in one, through pinned memory, on a stream of their own, so that they run while the device computes.

With the CPU as the device nothing is pinned and there is no stream, and all the rest is the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from trainers.storage.safetensors import bytes_of

Spans = Sequence[tuple[int, int]]
"""Places [start, stop) in the ids of a batch."""


class Arriving:
    """Tensors on their way into this process's memory; `wait` may be called more than once."""

    def __init__(self, packed: torch.Tensor, like: Sequence[torch.Tensor], event: Any) -> None:
        self._packed, self._like, self._event = packed, like, event

    def wait(self) -> list[torch.Tensor]:
        """They have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return _unpacked(self._packed, self._like)


class Staging:
    """The copies of one device. The allocator of pinned memory keeps a buffer until its copy is over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = getattr(torch, device.type)
        streams = device.type != "cpu" and hasattr(self._module, "Stream")
        self._stream: Any = self._module.Stream(device) if streams else None

    def to_device(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """These on the device, for what is computed there from now on."""
        packed = self._buffer(tensors)
        for place, tensor in zip(_unpacked(packed, tensors), tensors, strict=True):
            place.copy_(tensor)
        with self._beside():
            there = packed.to(self.device, non_blocking=True)
        if self._stream is not None:
            current = self._module.current_stream(self.device)
            current.wait_stream(self._stream)
            there.record_stream(current)
        return _unpacked(there, tensors)

    def to_host(self, tensors: Sequence[torch.Tensor]) -> Arriving:
        """These as they will be when what has been queued on the device until now is done."""
        packed = self._buffer(tensors)
        there = torch.cat([bytes_of(tensors[place].contiguous()) for place in _order(tensors)])
        if self._stream is not None:
            self._stream.wait_stream(self._module.current_stream(self.device))
        with self._beside():
            packed.copy_(there, non_blocking=True)
        if self._stream is None:
            return Arriving(packed, tensors, None)
        there.record_stream(self._stream)
        return Arriving(packed, tensors, self._stream.record_event())

    def _buffer(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        total = sum(tensor.nbytes for tensor in tensors)
        return torch.empty(total, dtype=torch.uint8, pin_memory=self._stream is not None)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with self._module.stream(self._stream):
                yield


def _order(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Wide types first, so that each is aligned behind those before it."""
    return sorted(range(len(tensors)), key=lambda place: -tensors[place].element_size())


def _unpacked(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of the bytes, in the types and shapes of these."""
    found, start = list(like), 0
    for place in _order(like):
        stop = start + like[place].nbytes
        found[place] = packed[start:stop].view(like[place].dtype).view(like[place].shape)
        start = stop
    return found


@functools.cache
def staging_of(device: torch.device) -> Staging | None:
    """That of this device; None for the CPU."""
    return None if device.type in ("cpu", "meta") else Staging(device)


class DeviceRows:
    """The rows of a batch on a device, where they come in one copy, and their gradient there. `index` (ids,):
    the row of each id.
    """

    def __init__(self, staging: Staging, rows: torch.Tensor, index: NDArray[np.int64]) -> None:
        self._staging = staging
        self._rows, self._index = staging.to_device([rows, torch.from_numpy(index)])

    def gather(self, start: int, stop: int, shape: torch.Size) -> torch.Tensor:
        """The rows of the ids [start, stop), which have this shape: (*shape, dim)."""
        # What is no view to torch, so that the script may change it in place.
        return functional.embedding(self._index[start:stop].view(shape), self._rows)

    def zeros(self) -> torch.Tensor:
        """For `scatter`."""
        return torch.zeros_like(self._rows)

    def scatter(self, spans: Spans, grads: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Add to `out` the gradients of what `gather` gave for these spans."""
        index = torch.cat([self._index[start:stop] for start, stop in spans])
        out.index_add_(0, index, torch.cat([grad.reshape(-1, out.shape[1]) for grad in grads]))


# ---- Tensors of a script as kernels take them.


def flat_ids(ids: Sequence[torch.Tensor], staging: Staging | None) -> list[torch.Tensor]:
    """The same ids, int64 and in sequence; those on the device come in one copy."""
    if staging is None or not any(each.device == staging.device for each in ids):
        return [_flat(each) for each in ids]
    away = [each for each in ids if each.device == staging.device]
    arrived = iter(staging.to_host([each.detach().to(torch.int64) for each in away]).wait())
    return [next(arrived) if each.device == staging.device else _flat(each) for each in ids]


def _flat(ids: torch.Tensor) -> torch.Tensor:
    if ids.dtype is torch.int64 and ids.is_cpu and ids.is_contiguous():
        return ids
    return ids.detach().to("cpu", torch.int64).contiguous()


def strided(grad: torch.Tensor, dim: int) -> tuple[torch.Tensor, int]:
    """A gradient of (..., dim) float32 whose rows are at equal distances, and this distance in values. That
    of torch.cat is a part of a wider one, and is used as it is.
    """
    if grad.is_neg():
        grad = grad.resolve_neg()
    if not grad.is_cpu or grad.dtype is not torch.float32:
        grad = grad.to("cpu", torch.float32)
    if grad.dim() == 2 and grad.stride(1) == 1:
        return grad, grad.stride(0)
    return grad.contiguous(), dim
