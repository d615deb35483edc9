"""Arrays: the memory of tensors, as kernels take it."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


def array_of(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's own memory; a copy where that has gaps or lies at an odd address, as bytes of a message
    may: kernels are compiled for aligned arrays.
    """
    array: NDArray[Any] = (tensor.detach() if tensor.requires_grad else tensor).contiguous().numpy()
    return array if array.flags.aligned else array.copy()
