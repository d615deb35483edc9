"""Updates: from a rule to the kernel that does it on rows, or on a whole block. Knows which number of a rule
goes where; leaves the arithmetic to the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from trainers.ps.kernels import dense, update
from trainers.ps.kernels.index import Index
from trainers.ps.kernels.rows import Rows
from trainers.ps.tables.errors import TableError
from trainers.ps.tables.rules import FTRL, SGD, Adagrad, Adam, AnyRule, Fixed, SparseAdam

Floats = NDArray[np.float32]
Keys = NDArray[np.int64]
Kernel = Callable[[Index, Rows, Keys, Floats, Floats, Keys], int]
BlockKernel = Callable[..., None]

_KERNELS: dict[type[AnyRule], Kernel] = {
    SGD: update.sgd,
    Adagrad: update.adagrad,
    SparseAdam: update.sparse_adam,
    FTRL: update.ftrl,
}


def kernel_of(rule: AnyRule, table: str) -> Kernel | None:
    """The kernel of a rule; None for Fixed. Raises TableError for a rule that has none on rows."""
    if isinstance(rule, Fixed):
        return None
    kernel = _KERNELS.get(type(rule))
    if kernel is None or (isinstance(rule, SGD) and rule.momentum):
        raise TableError(
            f"sparse table {table!r} cannot be trained by {rule}, which moves every row at every step; "
            "take SGD without momentum, Adagrad, SparseAdam or FTRL"
        )
    return kernel


def numbers_of(rule: AnyRule, step: int, lr: float) -> tuple[float, ...]:
    """What the kernel of a rule takes after the bounds, at the step-th update of the table."""
    match rule:
        case SGD():
            return lr, rule.weight_decay
        case Adagrad():
            return lr / (1 + (step - 1) * rule.lr_decay), rule.weight_decay, rule.eps
        case SparseAdam():
            size = lr * math.sqrt(1 - rule.beta2**step) / (1 - rule.beta1**step)
            return size, 1 - rule.beta1, 1 - rule.beta2, rule.eps
        case FTRL():
            return lr, rule.l1, rule.l2, -rule.lr_power, rule.beta
        case _:
            raise AssertionError(f"{rule} has no kernel on rows")


def block_kernel_of(rule: AnyRule) -> BlockKernel | None:
    """The kernel of a rule on a dense block, to be called with values, gradient, each state and
    `block_numbers_of`. None where torch's operations are to be used.
    """
    match rule:
        case SGD(momentum=0.0, weight_decay=0.0):
            return None  # one torch operation, which begins sooner than a kernel
        case SGD(momentum=0.0):
            return dense.sgd
        case SGD():
            return dense.momentum
        case Adagrad():
            return dense.adagrad
        case Adam():
            return dense.adam
        case FTRL(lr_power=-0.5):
            return dense.ftrl
        case _:
            return None


def block_numbers_of(rule: AnyRule, step: int, lr: float) -> Floats:
    """What the kernel of a rule takes last, at the step-th update of the block."""
    numbers: tuple[float, ...]
    match rule:
        case Adam():
            corrected, root = -lr / (1 - rule.beta1**step), math.sqrt(1 - rule.beta2**step)
            shares = (1 - rule.beta1, rule.beta2, 1 - rule.beta2)
            numbers = (corrected, rule.weight_decay, *shares, root, rule.eps)
        case Adagrad():
            numbers = (-lr / (1 + (step - 1) * rule.lr_decay), rule.weight_decay, rule.eps)
        case FTRL():
            numbers = (lr, rule.l1, 2 * rule.l2, rule.beta)
        case SGD(momentum=0.0):
            numbers = (-lr, rule.weight_decay)
        case SGD():
            # torch begins the buffer with the whole gradient.
            moving = (0.0, 1.0) if step == 1 else (rule.momentum, 1 - rule.dampening)
            used = (rule.momentum, 1.0) if rule.nesterov else (1.0, 0.0)
            numbers = (-lr, rule.weight_decay, *moving, *used)
        case _:
            raise AssertionError(f"{rule} has no kernel on blocks")
    return np.array(numbers, np.float32)
