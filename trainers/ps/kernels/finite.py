"""Finite: whether gradients are numbers."""

from __future__ import annotations

import numpy as np
import torch

from trainers.ps.kernels.arrays import array_of
from trainers.ps.kernels.compiled import Floats, compiled

_EXPONENT = np.uint32(0x7F800000)


@compiled
def any_not_finite(values: Floats) -> bool:
    """All exponent bits are set in infinity and NaN, and in nothing else."""
    bits, bad = values.view(np.uint32), np.uint32(0)
    for place in range(len(bits)):
        bad |= np.uint32((bits[place] & _EXPONENT) == _EXPONENT)
    return bool(bad)


def all_finite(grad: torch.Tensor) -> bool:
    """Whether a float32 tensor holds neither NaN nor infinity."""
    return not any_not_finite(array_of(grad).reshape(-1))
