"""Copy tensors between this process's memory and the device of embeddings and dense parameters.

Many tensors travel in one copy, through pinned memory, on a separate stream, so copies run while the device
computes. On the CPU there is neither pinned memory nor a stream, and everything else is the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from trainers.storage.safetensors import bytes_of

Spans = Sequence[tuple[int, int]]
"""Places [start, stop) in the ids of a batch."""


class Arriving:
    """Tensors on their way into this process's memory. You may call `wait` more than once."""

    def __init__(self, packed: Tensor, like: Sequence[Tensor], event: Any) -> None:
        self._packed, self._like, self._event = packed, like, event

    def wait(self) -> list[Tensor]:
        """Wait for the tensors and return them."""
        if self._event is not None:
            self._event.synchronize()
        return _unpacked(self._packed, self._like)


class Staging:
    """The copies of one device. The allocator of pinned memory keeps a buffer until its copy has ended."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = getattr(torch, device.type)
        streams = device.type != "cpu" and hasattr(self._module, "Stream")
        self._stream: Any = self._module.Stream(device) if streams else None

    def to_device(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return these tensors on the device, for computations from now on."""
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

    def to_host(self, tensors: Sequence[Tensor]) -> Arriving:
        """Return these tensors as they will be after all work that is queued on the device now."""
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

    def _buffer(self, tensors: Sequence[Tensor]) -> Tensor:
        total = sum(tensor.nbytes for tensor in tensors)
        return torch.empty(total, dtype=torch.uint8, pin_memory=self._stream is not None)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with self._module.stream(self._stream):
                yield


def _order(tensors: Sequence[Tensor]) -> list[int]:
    """Return the order of the copies, wide types first, so that each tensor is aligned after the ones before
    it.
    """
    return sorted(range(len(tensors)), key=lambda place: -tensors[place].element_size())


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the bytes, in the types and shapes of these tensors."""
    found, start = list(like), 0
    for place in _order(like):
        stop = start + like[place].nbytes
        found[place] = packed[start:stop].view(like[place].dtype).view(like[place].shape)
        start = stop
    return found


@functools.cache
def staging_of(device: torch.device) -> Staging | None:
    """Return the staging of this device, or None for the CPU."""
    return None if device.type in ("cpu", "meta") else Staging(device)


class DeviceRows:
    """The rows of a batch on a device, which arrive in one copy, and their gradient there.

    `index` (ids,) int64 gives the row of each id.
    """

    def __init__(self, staging: Staging, rows: Tensor, index: NDArray[np.int64]) -> None:
        self._staging = staging
        self._rows, self._index = staging.to_device([rows, torch.from_numpy(index)])

    def gather(self, start: int, stop: int, shape: torch.Size) -> Tensor:
        """Return the rows of the ids [start, stop), which have this shape, as (*shape, dim)."""
        # Return a tensor that torch does not treat as a view, so the script may change it in place.
        return functional.embedding(self._index[start:stop].view(shape), self._rows)

    def zeros(self) -> Tensor:
        """Return zeros for `scatter`."""
        return torch.zeros_like(self._rows)

    def scatter(self, spans: Spans, grads: Sequence[Tensor], out: Tensor) -> None:
        """Add the gradients of `gather`'s results for these spans to `out`."""
        index = torch.cat([self._index[start:stop] for start, stop in spans])
        out.index_add_(0, index, torch.cat([grad.reshape(-1, out.shape[1]) for grad in grads]))


# ---- Convert tensors of a script for kernels.


def flat_ids(ids: Sequence[Tensor], staging: Staging | None) -> list[Tensor]:
    """Return the same ids as contiguous int64 tensors. Ids on the device arrive in one copy."""
    if staging is None or not any(each.device == staging.device for each in ids):
        return [_flat(each) for each in ids]
    away = [each for each in ids if each.device == staging.device]
    arrived = iter(staging.to_host([each.detach().to(torch.int64) for each in away]).wait())
    return [next(arrived) if each.device == staging.device else _flat(each) for each in ids]


def _flat(ids: Tensor) -> Tensor:
    if ids.dtype is torch.int64 and ids.is_cpu and ids.is_contiguous():
        return ids
    return ids.detach().to("cpu", torch.int64).contiguous()


def strided(grad: Tensor, dim: int) -> tuple[Tensor, int]:
    """Return a gradient (..., dim) float32 whose rows have equal distances, and this distance in values.

    The gradient of torch.cat is a part of a wider tensor, and is used without a copy.
    """
    if grad.is_neg():
        grad = grad.resolve_neg()
    if not grad.is_cpu or grad.dtype is not torch.float32:
        grad = grad.to("cpu", torch.float32)
    if grad.dim() == 2 and grad.stride(1) == 1:
        return grad, grad.stride(0)
    return grad.contiguous(), dim
