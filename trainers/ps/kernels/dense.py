"""Dense: one step of an optimizer on a whole block, in place, in one pass. Knows the formulas on blocks;
`tables.rules` has the same as torch operations.

float32 throughout. Products are added with one rounding (`fma`) just where torch's vectorized operations do
so (add with alpha, addcmul, lerp). So results are torch's bit for bit, but for its square roots: those of
MKL, which torch takes where it can, are not always the nearest number; here they are. All arrays are (n,).
"""

from __future__ import annotations

import math

import numpy as np

from trainers.ps.kernels.compiled import Floats, compiled
from trainers.ps.kernels.memory import fma


@compiled
def sgd(values: Floats, grad: Floats, options: Floats) -> None:
    """options: -lr, weight decay."""
    back, decay = options[0], options[1]
    for i in range(len(values)):
        values[i] = fma(fma(values[i], decay, grad[i]), back, values[i])


@compiled
def momentum(values: Floats, grad: Floats, buffer: Floats, options: Floats) -> None:
    """options: -lr, weight decay, how much of the buffer stays, how much of the gradient joins it, and how
    much of the buffer and of the gradient make the step.
    """
    back, decay, kept, added = options[0], options[1], options[2], options[3]
    ahead, share = options[4], options[5]
    for i in range(len(values)):
        slope = fma(values[i], decay, grad[i])
        moving = fma(slope, added, buffer[i] * kept)
        buffer[i] = moving
        values[i] = fma(fma(moving, ahead, share * slope), back, values[i])


@compiled
def adagrad(values: Floats, grad: Floats, total: Floats, options: Floats) -> None:
    """options: -lr after its decay, weight decay, eps."""
    back, decay, eps = options[0], options[1], options[2]
    for i in range(len(values)):
        slope = fma(values[i], decay, grad[i])
        squares = fma(slope, slope, total[i])
        total[i] = squares
        values[i] += back * slope / (math.sqrt(squares) + eps)


@compiled
def adam(values: Floats, grad: Floats, mean: Floats, square: Floats, options: Floats) -> None:
    """options: -lr / correction of the mean, weight decay, 1 - beta1, beta2, 1 - beta2, root of the
    square's correction, eps.
    """
    back, decay, fast, kept = options[0], options[1], options[2], options[3]
    slow, root, eps = options[4], options[5], options[6]
    for i in range(len(values)):
        slope = fma(values[i], decay, grad[i])
        first = fma(fast, slope - mean[i], mean[i])
        second = fma(slow * slope, slope, square[i] * kept)
        mean[i] = first
        square[i] = second
        values[i] += back * first / (math.sqrt(second) / root + eps)


@compiled
def ftrl(values: Floats, grad: Floats, squares: Floats, linear: Floats, options: Floats) -> None:
    """options: lr, l1, 2 * l2, beta; the power is 1/2."""
    lr, l1, twice_l2, beta = options[0], options[1], options[2], options[3]
    for i in range(len(values)):
        slope = grad[i]
        new = fma(slope, slope, squares[i])
        root = math.sqrt(new)
        term = linear[i] + (slope - (root - math.sqrt(squares[i])) / lr * values[i])
        squares[i] = new
        linear[i] = term
        moved = (math.copysign(l1, term) - term) / ((root + beta) / lr + twice_l2)
        values[i] = np.float32(0) if abs(term) <= l1 else moved
