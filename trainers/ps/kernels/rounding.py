"""Convert values of rows between float32 and 16 bits (bfloat16 or float16), rounded to the nearest or at
random.

Random (stochastic) rounding goes up or down with probabilities that make its mean exact. Updates smaller than
the distance between two neighbouring values are therefore not lost (Gupta, Agrawal, Gopalakrishnan, Narayanan
2015, "Deep learning with limited numerical precision"). The random bits are a pure function of seed, key,
step of the table and column, so a repeated update gives the same values.
"""

from __future__ import annotations

import numpy as np

from trainers.kernels.compiled import Floats, Halves, Scalar, compiled
from trainers.ps.kernels.index import GOLDEN, finalize
from trainers.ps.kernels.memory import bits_of, float_of

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

LARGEST = np.array([np.inf, 3.3895313892515355e38, 65504.0], np.float32)
"""The largest finite value of each type. Larger values are replaced by it."""

_SIGN, _REST = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_LEAST = np.float32(2.0**-14)
"""The smallest normal float16. Values below it are 2**-24 apart."""
_HALF = np.float32(0.5)  # float32 values from here to 1 have the same distance


@compiled
def widen(halves: Halves, start: Scalar, dtype: Scalar, out: Floats) -> None:
    """Write the values from `start` on, of type BFLOAT16 or FLOAT16, to `out` as float32."""
    source = halves[start : start + len(out)]
    if dtype == BFLOAT16:
        for column in range(len(out)):
            out[column] = float_of(np.uint32(np.uint32(source[column]) << np.uint32(16)))
        return
    for column in range(len(out)):
        half = np.uint32(source[column])
        rest = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
        if rest < np.uint32(1 << 23):  # computed as a normal number, without the leading 1
            value = float_of(np.uint32(rest + np.uint32(0x38800000))) - _LEAST
        elif rest < np.uint32(0x0F800000):
            value = float_of(np.uint32(rest + np.uint32(0x38000000)))
        else:  # infinity or NaN
            value = float_of(np.uint32(rest + np.uint32(0x70000000)))
        out[column] = -value if half & np.uint32(0x8000) else value


@compiled
def noise_of(word: Scalar, column: Scalar) -> Scalar:
    """Return 32 random bits from the finalizer of MurmurHash3 (Appleby 2011)."""
    bits = np.uint32(word + np.uint32(column) * np.uint32(0x9E3779B9))
    bits = np.uint32((bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    bits = np.uint32((bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(bits ^ (bits >> np.uint32(16)))


@compiled
def word_of(seed: Scalar, step: Scalar, key: Scalar) -> Scalar:
    """Return the word that, with the column, determines the random bits of a row at a step."""
    begin = finalize(finalize(np.uint64(seed) + GOLDEN) ^ np.uint64(step))
    return np.uint32(finalize(begin ^ np.uint64(key)) >> np.uint64(32))


@compiled
def limited(value: Scalar, largest: Scalar) -> Scalar:
    """Return the value, limited to [-largest, largest]. NaN stays NaN."""
    return largest if value > largest else (-largest if value < -largest else value)


@compiled
def narrow(values: Floats, halves: Halves, start: Scalar, dtype: Scalar) -> None:
    """Write the values to `halves` from `start` on, rounded to the nearest, ties to even, as torch does."""
    target, largest = halves[start : start + len(values)], LARGEST[dtype]
    if dtype == BFLOAT16:
        for column in range(len(values)):
            value = limited(values[column], largest)
            bits = bits_of(value)
            rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
            target[column] = rounded >> np.uint32(16) if value == value else np.uint32(0x7FC0)
        return
    for column in range(len(values)):
        value = limited(values[column], largest)
        size = abs(value)
        bits = bits_of(size)
        rounded = np.uint32(bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1)))
        half = np.uint32((rounded >> np.uint32(13)) - np.uint32(112 << 10))
        if size < _LEAST:
            half = np.uint32(bits_of(size + _HALF) - bits_of(_HALF))
        if value != value:
            half = np.uint32(0x7E00)
        target[column] = half | ((bits_of(value) & _SIGN) >> np.uint32(16))


@compiled
def narrow_randomly(values: Floats, halves: Halves, start: Scalar, dtype: Scalar, word: Scalar) -> None:
    """Write the values as `narrow` does, but rounded at random by the bits of `word_of`."""
    target, largest = halves[start : start + len(values)], LARGEST[dtype]
    if dtype == BFLOAT16:
        for column in range(len(values)):
            value = limited(values[column], largest)
            rounded = np.uint32(bits_of(value) + (noise_of(word, column) >> np.uint32(16)))
            target[column] = rounded >> np.uint32(16) if value == value else np.uint32(0x7FC0)
        return
    for column in range(len(values)):
        value = limited(values[column], largest)
        size, lead = abs(value), np.uint32(112 << 10)
        # Compute as for a normal number, because values below are as far apart as values above.
        if size < _LEAST:
            size, lead = size + _LEAST, np.uint32(113 << 10)
        rounded = np.uint32(bits_of(size) + (noise_of(word, column) >> np.uint32(19)))
        half = np.uint32((rounded >> np.uint32(13)) - lead)
        if value != value:
            half = np.uint32(0x7E00)
        target[column] = half | ((bits_of(value) & _SIGN) >> np.uint32(16))
