"""Finite: whether gradients are numbers, and what is left of a push without the rows that are not."""

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


def finite_rows(keys: torch.Tensor, grad: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """(number of rows with NaN or infinity, the keys of the others, their gradients). Without any such row
    these are the tensors that came in.
    """
    if all_finite(grad):
        return 0, keys, grad
    good = torch.isfinite(grad).all(dim=1)
    kept = keys[good]
    return len(keys) - len(kept), kept, grad[good]
