"""What is estimated of a table from a few of its requests and rows: its hot keys, how many ids are used in an
hour, and the size of values and of gradients.
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
"""What is left of the counts of keys at each report, of five seconds: they halve in 19 minutes."""
HOT = 20
_SLOT_S = 300.0
_SLOTS = 12
_ROWS = 32
_NEW = 0.3
"""The weight of a new sample in a mean."""


class HotKeys:
    """The keys of the most pulls. Of all keys so far the 1024 with the highest counts are kept: a key that is
    in few pulls may be counted too low, one that is in many is not. `share`: the part of the sampled pulls
    that had the key.
    """

    def __init__(self) -> None:
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.float64)
        self._pulls = 0.0

    def add(self, keys: Keys, pulls: int) -> None:
        """The keys of so many pulls."""
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
        """The share of each, the largest first."""
        order = np.argsort(-self._counts, kind="stable")[:HOT]
        shares = (self._counts[order] / max(self._pulls, 1.0)).tolist()
        keys = self._keys[order].tolist()
        return {str(key): round(share, 4) for key, share in zip(keys, shares, strict=True)}


class DistinctKeys:
    """How many keys were used in the last hour, in slots of five minutes, by the registers of a table."""

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
    """How many keys made these registers: HyperLogLog, and linear counting where many are zero."""
    size = len(registers)
    found = 0.7213 / (1 + 1.079 / size) * size**2 / np.exp2(-registers.astype(np.float64)).sum()
    zeros = size - np.count_nonzero(registers)
    return size * math.log(size / zeros) if zeros and found <= 2.5 * size else float(found)


class Sizes:
    """Means over samples of rows: their L2 norm, and the parts of their numbers that are zero or not finite,
    0 to 1; the last samples have more weight.
    """

    def __init__(self) -> None:
        self._means: NDArray[np.float64] | None = None

    def add(self, rows: Floats) -> None:
        """(n, dim)."""
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
    """The values of a few rows in memory, (n, dim)."""
    slots = random.integers(0, len(storage), _ROWS) if len(storage) else np.empty(0, np.int64)
    records = storage.records(0, len(storage))[slots]
    values: Floats = split_records(storage, records, 0).values.float().numpy()
    return values
