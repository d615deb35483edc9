"""Finite: whether gradients are numbers."""

from __future__ import annotations

import numpy as np
import torch

from trainers.ps.kernels.compiled import Bits, compiled

_EXPONENT = np.uint32(0x7F800000)


@compiled
def any_not_finite(bits: Bits) -> bool:
    """`bits`: float32 as uint32. All exponent bits are set in infinity and NaN, and in nothing else."""
    bad = np.uint32(0)
    for place in range(len(bits)):
        bad |= np.uint32((bits[place] & _EXPONENT) == _EXPONENT)
    return bool(bad)


def all_finite(grad: torch.Tensor) -> bool:
    """Whether a float32 tensor holds neither NaN nor infinity."""
    return not any_not_finite(grad.detach().contiguous().numpy().reshape(-1).view(np.uint32))
