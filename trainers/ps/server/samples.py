"""Estimate numbers of a table from a few of its requests and rows. They are its hot keys, the number of ids
used in an hour, and the sizes of values and gradients.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

from trainers.kernels.compiled import Flags, Floats, Keys
from trainers.ps.kernels.counts import REGISTERS, SAMPLED
from trainers.ps.tables.storage import Storage, split_records

_COUNTERS = 1024
_KEPT_A_REPORT = 0.997
"""The share of the counts of keys that remains at each report. A report comes every five seconds, so counts
halve in 19 minutes.
"""
HOT = 20
_SLOT_S = 300.0
_SLOTS = 12
_ROWS = 32
_NEW = 0.3
"""The weight of a new sample in a mean."""


class HotKeys:
    """The keys that occur in the most pulls.

    The 1024 keys with the highest counts so far are kept. The count of a key in few pulls may be too low, but
    the count of a key in many pulls is right. `share` is the part of the sampled pulls that contained the
    key.
    """

    def __init__(self) -> None:
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float64)
        self._pulls = 0.0

    def add(self, keys: Keys, pulls: int) -> None:
        """Add the keys of so many pulls."""
        some, counts = np.unique(keys, return_counts=True)
        found, places = np.unique(np.concatenate([self._keys, some]), return_inverse=True)
        weights = np.concatenate([self._counts * _KEPT_A_REPORT, counts])
        total = np.bincount(places, weights, len(found)).astype(np.float64)
        if len(found) > _COUNTERS:
            kept = np.argpartition(total, -_COUNTERS)[-_COUNTERS:]
            found, total = found[kept], total[kept]
        self._keys, self._counts = found, total
        self._pulls = self._pulls * _KEPT_A_REPORT + pulls

    def top(self) -> dict[str, float]:
        """Return the share of each hot key, the largest first."""
        order = np.argsort(-self._counts, kind="stable")[:HOT]
        shares = (self._counts[order] / max(self._pulls, 1.0)).tolist()
        keys = self._keys[order].tolist()
        return {str(key): round(share, 4) for key, share in zip(keys, shares, strict=True)}


class DistinctKeys:
    """The number of keys used in the last hour, in slots of five minutes, from the registers of a table."""

    def __init__(self, registers: Flags, now: float) -> None:
        self._registers = registers
        self._former: deque[Flags] = deque(maxlen=_SLOTS - 1)
        self._past = np.zeros(REGISTERS, np.uint8)
        self._next = now + _SLOT_S

    def count(self, now: float) -> int:
        if now >= self._next:
            idle = int((now - self._next) // _SLOT_S)
            self._former.extend([self._registers.copy(), *([np.zeros_like(self._past)] * min(idle, _SLOTS))])
            self._registers[:] = 0
            self._next += (1 + idle) * _SLOT_S
            self._past = np.maximum.reduce(list(self._former))
        return round(SAMPLED * estimate(np.maximum(self._past, self._registers)))


def estimate(registers: Flags) -> float:
    """Return the number of keys that produced these registers.

    The formulas are HyperLogLog and, if many registers are zero, linear counting.
    """
    size = len(registers)
    found = 0.7213 / (1 + 1.079 / size) * size**2 / np.exp2(-registers.astype(np.float64)).sum()
    zeros = size - np.count_nonzero(registers)
    return size * math.log(size / zeros) if zeros and found <= 2.5 * size else float(found)


class Sizes:
    """Means over samples of rows. The last samples have more weight.

    The means are the L2 norm, and the shares (0 to 1) of numbers that are zero or not finite.
    """

    def __init__(self) -> None:
        self._means: NDArray[np.float64] | None = None

    def add(self, rows: Floats) -> None:
        """Add a sample of rows, (n, dim) float32."""
        if not len(rows):
            return
        finite = np.isfinite(rows)
        zero, bad = (rows == 0).mean(), 1.0 - finite.mean()
        norm = np.sqrt(np.square(np.where(finite, rows, 0), dtype=np.float64).sum(1)).mean()
        new = np.array([norm, zero, bad])
        self._means = new if self._means is None else self._means + _NEW * (new - self._means)

    def numbers(self, name: str) -> dict[str, float]:
        if self._means is None:
            return {}
        norm, zero, bad = self._means.tolist()
        return {
            f"{name}_norm": float(f"{norm:.4g}"),
            f"{name}_zeros": round(zero, 4),
            f"{name}_not_finite": round(bad, 4),
        }


def sample_rows(storage: Storage, random: np.random.Generator) -> Floats:
    """Return the values of a few rows in memory, (n, dim) float32."""
    slots = random.integers(0, len(storage), _ROWS) if len(storage) else np.empty(0, np.int64)
    records = storage.records(0, len(storage))[slots]
    values: Floats = split_records(storage, records, 0).values.float().numpy()
    return values
