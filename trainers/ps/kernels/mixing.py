"""Mixing: hashes of int64 keys. Pure arithmetic on 64-bit words, to be inlined into kernels."""

from __future__ import annotations

import secrets

import numpy as np

from trainers.ps.kernels.compiled import Scalar, compiled

_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)

SECRET = np.frombuffer(secrets.token_bytes(16), dtype=np.uint64).copy()
"""Two words that nobody outside of this process knows: nobody can choose keys that meet in one place."""


@compiled
def finalize(word: Scalar) -> Scalar:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a permutation of the 64-bit words."""
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))


@compiled
def keyed_hash(key: Scalar, first: Scalar, second: Scalar) -> Scalar:
    """A hash of one key under two secret words, well mixed in all bits."""
    word = np.uint64(key) ^ first
    word = (word ^ (word >> np.uint64(32))) * _FIRST
    word = (word ^ (word >> np.uint64(29))) + second
    word = word * _SECOND
    word = (word ^ (word >> np.uint64(32))) * GOLDEN
    return word ^ (word >> np.uint64(29))
