"""Take one step of an optimizer, in place, on the rows of a push or on a dense block.

`tables.rules` has the same formulas as torch operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from trainers.kernels.compiled import Floats, Keys, Scalar, compiled, inlined, variant
from trainers.ps.kernels.index import BLOCK, Index
from trainers.ps.kernels.memory import carray, fma, pointer
from trainers.ps.kernels.rounding import narrow_randomly, widen, word_of
from trainers.ps.kernels.rows import (
    DIM,
    DTYPE,
    SEED,
    STEP,
    STRIDE,
    VALUES,
    WIDTH,
    Rows,
    locate,
    will_change,
    work_of_block,
)

# ---- Rows of a push. Everything is float32, in the order of torch.optim's formulas for sparse gradients. A
# step changes the values of one row and its state, which starts at `place` of `floats`.


@compiled
def bounded(value: Scalar, low: Scalar, high: Scalar) -> Scalar:
    """Return the value, limited to [low, high]. NaN stays NaN."""
    return low if value < low else (high if value > high else value)


@inlined
def sgd(value: Floats, slopes: Floats, floats: Floats, place: Scalar, options: Floats) -> None:
    """Take a step of SGD. `options` holds low, high, lr and weight decay."""
    low, high, lr, decay = options[0], options[1], options[2], options[3]
    for column in range(len(value)):
        slope = slopes[column] + decay * value[column]
        value[column] = bounded(value[column] - lr * slope, low, high)


@inlined
def momentum(value: Floats, slopes: Floats, floats: Floats, place: Scalar, options: Floats) -> None:
    """Take a step of SGD with momentum. `options` holds low, high, and the options of `momentum_block`."""
    low, high, back, decay, kept = options[0], options[1], options[2], options[3], options[4]
    added, ahead, share = options[5], options[6], options[7]
    buffer = floats[place : place + len(value)]
    for column in range(len(value)):
        slope = fma(value[column], decay, slopes[column])
        moving = fma(slope, added, buffer[column] * kept)
        buffer[column] = moving
        moved = fma(fma(moving, ahead, share * slope), back, value[column])
        value[column] = bounded(moved, low, high)


@inlined
def adagrad(value: Floats, slopes: Floats, floats: Floats, place: Scalar, options: Floats) -> None:
    """Take a step of Adagrad. `options` holds low, high, lr after its decay, weight decay and eps."""
    low, high, lr, decay, eps = options[0], options[1], options[2], options[3], options[4]
    total = floats[place : place + len(value)]
    for column in range(len(value)):
        slope = slopes[column] + decay * value[column]
        squares = total[column] + slope * slope
        total[column] = squares
        moved = value[column] - lr * (slope / (math.sqrt(squares) + eps))
        value[column] = bounded(moved, low, high)


@inlined
def sparse_adam(value: Floats, slopes: Floats, floats: Floats, place: Scalar, options: Floats) -> None:
    """Take a step of SparseAdam. `options` holds low, high, step size (lr with both corrections), 1 - beta1,
    1 - beta2 and eps.
    """
    low, high, size, fast, slow, eps = options[0], options[1], options[2], options[3], options[4], options[5]
    dim = len(value)
    first, second = floats[place : place + dim], floats[place + dim : place + 2 * dim]
    for column in range(dim):
        slope = slopes[column]
        mean = first[column] + (slope - first[column]) * fast
        square = second[column] + (slope * slope - second[column]) * slow
        first[column] = mean
        second[column] = square
        moved = value[column] - size * mean / (math.sqrt(square) + eps)
        value[column] = bounded(moved, low, high)


@inlined
def adam(value: Floats, slopes: Floats, floats: Floats, place: Scalar, options: Floats) -> None:
    """Take a step of Adam. `options` holds low, high, the options of `adam_block`, and amsgrad.

    The state is mean, square and, with amsgrad, the largest square.
    """
    low, high, back, stays, decay = options[0], options[1], options[2], options[3], options[4]
    fast, kept, slow, root, eps = options[5], options[6], options[7], options[8], options[9]
    amsgrad, dim = options[10] != np.float32(0), len(value)
    mean, square = floats[place : place + dim], floats[place + dim : place + 2 * dim]
    last = place + 2 * dim if amsgrad else place + dim
    largest = floats[last : last + dim]  # without amsgrad, the square itself
    for column in range(dim):
        slope = fma(value[column], decay, slopes[column])
        first = fma(fast, slope - mean[column], mean[column])
        second = fma(slow * slope, slope, square[column] * kept)
        mean[column] = first
        square[column] = second
        if amsgrad:
            second = max(largest[column], second)
            largest[column] = second
        moved = value[column] * stays + back * first / (math.sqrt(second) / root + eps)
        value[column] = bounded(moved, low, high)


@inlined
def row_wise_adagrad(value: Floats, slopes: Floats, floats: Floats, place: Scalar, options: Floats) -> None:
    """Take a step of row-wise Adagrad. The state is one sum of squares for the row.

    `options` holds low, high, lr after its decay, the share of a value that decoupled weight decay keeps,
    weight decay and eps.
    """
    low, high, lr, stays, decay, eps = options[0], options[1], options[2], options[3], options[4], options[5]
    squares = floats[place] + mean_square(value, slopes, decay)
    floats[place] = squares
    size = lr / (math.sqrt(squares) + eps)
    for column in range(len(value)):
        slope = slopes[column] + decay * value[column]
        value[column] = bounded(value[column] * stays - size * slope, low, high)


@inlined
def row_wise_adam(value: Floats, slopes: Floats, floats: Floats, place: Scalar, options: Floats) -> None:
    """Take a step of row-wise Adam. `options` holds low, high, and the options of `adam_block`.

    The state is the mean, and one mean square for the row.
    """
    low, high, back, stays, decay = options[0], options[1], options[2], options[3], options[4]
    fast, kept, slow, root, eps = options[5], options[6], options[7], options[8], options[9]
    mean, last = floats[place : place + len(value)], place + len(value)
    square = floats[last] * kept + slow * mean_square(value, slopes, decay)
    floats[last] = square
    size = back / (math.sqrt(square) / root + eps)
    for column in range(len(value)):
        slope = fma(value[column], decay, slopes[column])
        first = fma(fast, slope - mean[column], mean[column])
        mean[column] = first
        value[column] = bounded(value[column] * stays + size * first, low, high)


@inlined
def mean_square(value: Floats, slopes: Floats, decay: Scalar) -> Scalar:
    """Return the mean square of a row's gradient with L2 weight decay.

    The loop keeps four sums, because each addition waits for the addition before it.
    """
    one = two = three = four = np.float32(0)
    dim = len(value)
    whole = dim - dim % 4
    for column in range(0, whole, 4):
        a = slopes[column] + decay * value[column]
        b = slopes[column + 1] + decay * value[column + 1]
        c = slopes[column + 2] + decay * value[column + 2]
        d = slopes[column + 3] + decay * value[column + 3]
        one += a * a
        two += b * b
        three += c * c
        four += d * d
    for column in range(whole, dim):
        a = slopes[column] + decay * value[column]
        one += a * a
    return np.float32((one + two) + (three + four)) / np.float32(dim)


@inlined
def rmsprop(value: Floats, slopes: Floats, floats: Floats, place: Scalar, options: Floats) -> None:
    """Take a step of RMSprop. `options` holds low, high, -lr, weight decay, alpha, 1 - alpha, eps, momentum
    and centered.

    The state is the mean square, the mean if centered, and the buffer if there is momentum.
    """
    low, high, back, decay, kept = options[0], options[1], options[2], options[3], options[4]
    slow, eps, inertia, centered = options[5], options[6], options[7], options[8] != np.float32(0)
    moves = inertia != np.float32(0)
    mean = place + len(value) if centered else place
    buffer = mean + len(value) if moves else mean
    for column in range(len(value)):
        slope = fma(value[column], decay, slopes[column])
        spread = fma(slow * slope, slope, floats[place + column] * kept)
        floats[place + column] = spread
        if centered:
            middle = fma(slow, slope - floats[mean + column], floats[mean + column])
            floats[mean + column] = middle
            spread = fma(-middle, middle, spread)
        step = slope / (math.sqrt(spread) + eps)
        if moves:
            step = fma(floats[buffer + column], inertia, step)
            floats[buffer + column] = step
        value[column] = bounded(fma(back, step, value[column]), low, high)


@inlined
def ftrl(value: Floats, slopes: Floats, floats: Floats, place: Scalar, options: Floats) -> None:
    """Take a step of FTRL. `options` holds low, high, lr, l1, l2, power and beta.

    The state is the sum of squares, then the linear term.
    """
    low, high, lr, l1, l2 = options[0], options[1], options[2], options[3], options[4]
    power, beta, dim = options[5], options[6], len(value)
    for column in range(dim):
        moved = ftrl_step(value[column], floats, place + column, dim, slopes[column], lr, l1, l2, power, beta)
        value[column] = bounded(moved, low, high)


@compiled
def ftrl_step(
    value: Scalar,
    floats: Floats,
    place: Scalar,
    dim: Scalar,
    slope: Scalar,
    lr: Scalar,
    l1: Scalar,
    l2: Scalar,
    power: Scalar,
    beta: Scalar,
) -> Scalar:
    """Return the new value. The sum of squares is at `place`, and the linear term is `dim` places later."""
    if lr == np.float32(0):
        return value
    old = floats[place]
    new = old + slope * slope
    if power == np.float32(0.5):
        old_root, new_root = math.sqrt(old), math.sqrt(new)
    else:
        old_root, new_root = old**power, new**power
    linear = floats[place + dim] + (slope - (new_root - old_root) / lr * value)
    floats[place] = new
    floats[place + dim] = linear
    if abs(linear) <= l1:
        return np.float32(0)
    pull = l1 - linear if linear > np.float32(0) else -l1 - linear
    scale = (new_root + beta) / lr + np.float32(2) * l2
    return pull / scale if scale > np.float32(0) else value


# ---- A step on all rows of a push. Each rule has a kernel, and all kernels are variants of one function (see
# `variant`).

step: Callable[..., None] = sgd


def _on_rows(index: Index, rows: Rows, keys: Keys, grad: Floats, options: Floats, missing: Keys) -> int:
    """Update the existing rows by `step`, in the order of the keys. A key that occurs twice is updated twice.

    Write the positions of the other keys to `missing`, and return their number.
    """
    count, numbers, floats = 0, rows.numbers, rows.floats
    stride, dim, width, dtype = numbers[STRIDE], numbers[DIM], numbers[WIDTH], numbers[DTYPE]
    halves, work = floats.view(np.uint16), np.empty(dim, np.float32)
    records, space = np.int64(floats.ctypes.data), np.int64(work.ctypes.data)
    seed, number = numbers[SEED], numbers[STEP]
    bases, tags, slots = work_of_block()
    for start in range(0, len(keys), BLOCK):
        stop = min(start + BLOCK, len(keys))
        locate(index, rows, keys, start, stop, stride, bases, tags, slots)
        will_change(rows, slots, stop - start)
        for i in range(stop - start):
            if slots[i] < 0:
                missing[count] = start + i
                count += 1
                continue
            place = slots[i] * stride + VALUES
            if dtype:
                widen(halves, 2 * place, dtype, work)
            # Pass the address, because numba would count references to an array that alternates row by row.
            value = carray(pointer(space if dtype else records + 4 * place), (dim,), np.float32)
            step(value, grad[start + i], floats, place + width, options)
            if dtype:
                word = word_of(seed, number, keys[start + i])
                narrow_randomly(work, halves, 2 * place, dtype, word)
    return count


@cache
def on_rows(rule: Callable[..., None]) -> Callable[..., int]:
    """Return the kernel that applies this step to the rows of a push."""
    return variant(_on_rows, f"{rule.__name__}_rows", step=rule)


# ---- Dense blocks, in one pass. A product is added with one rounding (`fma`) exactly where torch's
# vectorized operations do so (add with alpha, addcmul, lerp). The results therefore equal torch's bit for
# bit, except for square roots. These are always the nearest number. torch uses MKL's square roots where it
# can, and they are not always the nearest. All arrays are (n,).


@compiled
def sgd_block(values: Floats, grad: Floats, options: Floats) -> None:
    """Take a step of SGD. `options` holds -lr and weight decay."""
    back, decay = options[0], options[1]
    for i in range(len(values)):
        values[i] = fma(fma(values[i], decay, grad[i]), back, values[i])


@compiled
def momentum_block(values: Floats, grad: Floats, buffer: Floats, options: Floats) -> None:
    """Take a step of SGD with momentum.

    `options` holds -lr, weight decay, the share of the buffer that stays, and the share of the gradient that
    joins the buffer. The last two are the shares of the buffer and of the gradient in the step.
    """
    back, decay, kept, added = options[0], options[1], options[2], options[3]
    ahead, share = options[4], options[5]
    for i in range(len(values)):
        slope = fma(values[i], decay, grad[i])
        moving = fma(slope, added, buffer[i] * kept)
        buffer[i] = moving
        values[i] = fma(fma(moving, ahead, share * slope), back, values[i])


@compiled
def adagrad_block(values: Floats, grad: Floats, total: Floats, options: Floats) -> None:
    """Take a step of Adagrad. `options` holds -lr after its decay, weight decay and eps."""
    back, decay, eps = options[0], options[1], options[2]
    for i in range(len(values)):
        slope = fma(values[i], decay, grad[i])
        squares = fma(slope, slope, total[i])
        total[i] = squares
        values[i] += back * slope / (math.sqrt(squares) + eps)


@compiled
def adam_block(values: Floats, grad: Floats, mean: Floats, square: Floats, options: Floats) -> None:
    """Take a step of Adam.

    `options` holds -lr / correction of the mean, the share of a value that decoupled weight decay keeps,
    weight decay, 1 - beta1, beta2, 1 - beta2, the root of the square's correction, and eps.
    """
    back, stays, decay, fast = options[0], options[1], options[2], options[3]
    kept, slow, root, eps = options[4], options[5], options[6], options[7]
    for i in range(len(values)):
        slope = fma(values[i], decay, grad[i])
        first = fma(fast, slope - mean[i], mean[i])
        second = fma(slow * slope, slope, square[i] * kept)
        mean[i] = first
        square[i] = second
        values[i] = values[i] * stays + back * first / (math.sqrt(second) / root + eps)


@compiled
def ftrl_block(values: Floats, grad: Floats, squares: Floats, linear: Floats, options: Floats) -> None:
    """Take a step of FTRL with power 1/2. `options` holds lr, l1, 2 * l2 and beta."""
    lr, l1, twice_l2, beta = options[0], options[1], options[2], options[3]
    if lr == np.float32(0):
        return
    for i in range(len(values)):
        slope = grad[i]
        new = fma(slope, slope, squares[i])
        root = math.sqrt(new)
        term = linear[i] + (slope - (root - math.sqrt(squares[i])) / lr * values[i])
        squares[i] = new
        linear[i] = term
        scale = (root + beta) / lr + twice_l2
        moved = (math.copysign(l1, term) - term) / scale if scale > np.float32(0) else values[i]
        values[i] = np.float32(0) if abs(term) <= l1 else moved
