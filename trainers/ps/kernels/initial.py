"""Initial values: a pure function of (seed, key, column), so that they depend neither on the order of
arrival nor on the number of servers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from trainers.ps.kernels.compiled import Floats, Keys, Scalar, compiled
from trainers.ps.kernels.mixing import GOLDEN, finalize

UNIFORM, NOTHING = 1, 0

_UNIT24 = np.float32(2.0**-24)
_UNIT53 = 2.0**-53
_TURN = 2.0 * math.pi


class Fresh(NamedTuple):
    """What a new row is filled with. Kind 1: uniform from a up to b; 2: normal, mean a, deviation b; 0: what
    is there, state and statistics included, because all of it will be overwritten.
    """

    kind: int
    a: np.float32
    b: np.float32
    seed: np.uint64
    state: np.float32


@compiled
def fill_values(fresh: Fresh, key: Scalar, floats: Floats, start: Scalar, dim: Scalar) -> None:
    """floats[start : start + dim] = the initial values of a key: splitmix64's sequence from a start that is
    made of seed and key; 24 bits of a word for a uniform value, two words for two normal ones (Box-Muller).
    """
    word = finalize(finalize(fresh.seed + GOLDEN) ^ np.uint64(key))
    if fresh.kind == UNIFORM:
        width = fresh.b - fresh.a
        for column in range(dim):
            word += GOLDEN
            part = np.float32(np.int64(finalize(word) >> np.uint64(40)))
            floats[start + column] = fresh.a + width * (part * _UNIT24)
        return
    for column in range(0, dim, 2):
        word += GOLDEN
        above_zero = (np.float64(np.int64(finalize(word) >> np.uint64(11))) + 1.0) * _UNIT53
        word += GOLDEN
        angle = _TURN * (np.float64(np.int64(finalize(word) >> np.uint64(11))) * _UNIT53)
        radius = math.sqrt(-2.0 * math.log(above_zero))
        floats[start + column] = fresh.a + fresh.b * np.float32(radius * math.cos(angle))
        if column + 1 < dim:
            floats[start + column + 1] = fresh.a + fresh.b * np.float32(radius * math.sin(angle))


@compiled
def initial_rows(fresh: Fresh, keys: Keys, positions: Keys, flat: Floats, dim: Scalar) -> None:
    """Rows `positions` of `flat` = the initial values of their keys: those of all `keys` are not asked."""
    for position in positions:
        fill_values(fresh, keys[position], flat, position * dim, dim)
