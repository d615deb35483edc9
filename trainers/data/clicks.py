"""Draw synthetic click logs with their true probabilities.

An example has 13 integer features, 26 categorical slots, and a label for the click. The module has the
distributions, and the best AUC that any model can reach. `click_files` writes the files.

    logit = bias + sum_j v_j x_j + sum_s w_s(category),    click ~ Bernoulli(sigmoid(logit))

x_j is feature j scaled to [0, 1]. v_j and the spread of slot s follow from the seed. w_s(category) is a
normal number that is a pure function of (seed, id). Without a table of weights, vocabularies may be large.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fleetrun.frozen import frozen_by_name
from trainers.errors import UsageError
from trainers.metrics import auc, log_loss

DENSE, SLOTS = 13, 26
MISSING = np.iinfo(np.int32).min
"""A missing value in `Clicks.counts`."""

# Minimum and range, like the integer features of Criteo's display advertising challenge.
LEAST = np.array([0, -3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], np.int32)
RANGE = np.array([20, 603, 100, 50, 64000, 500, 100, 50, 500, 10, 10, 10, 50], np.int32)
# Sizes like its categorical slots: a few tiny ones, many medium ones, and a few very large ones.
VOCABULARIES = (
    1400, 550, 1_000_000, 200_000, 300, 24, 12_000, 600, 3, 90_000, 5000, 800_000, 3000,
    27, 14_000, 500_000, 10, 5500, 2100, 4, 700_000, 17, 15, 250_000, 100, 130_000,
)  # fmt: skip

Ints = npt.NDArray[np.int32]
Ids = npt.NDArray[np.int64]
Categories = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


@frozen_by_name
class Best:
    """The result of a model with the true probabilities on a split, which bounds all other models."""

    auc: float
    log_loss: float


@dataclass(frozen=True, kw_only=True)
class Clicks:
    """`rows` examples.

    `counts` is (rows, 13) int32, with MISSING for missing values. `categories` is (rows, 26) uint32, as in a
    log. `ids` is (rows, 26) int64, the 63-bit feature signs, with 0 for missing categories. `labels` is
    (rows,) float32, 0 or 1. `probability` is (rows,) float64, the true probability of a click.
    """

    counts: Ints
    categories: Categories
    ids: Ids
    labels: Floats
    probability: Doubles

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def dense(self) -> Floats:
        """(rows, 13) float32 in [0, 1], 0 for missing values."""
        return scaled(self.counts)

    def best(self) -> Best:
        probability, labels = torch.from_numpy(self.probability), torch.from_numpy(self.labels)
        return Best(auc=auc(probability, labels), log_loss=log_loss(probability, labels))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (ids (rows, 26) int64, dense (rows, 13) float32, labels (rows,) float32), which share the
        memory.
        """
        return torch.from_numpy(self.ids), torch.from_numpy(self.dense), torch.from_numpy(self.labels)


@dataclass(frozen=True, kw_only=True)
class ClickModel:
    """The true distribution. Equal settings give equal distributions, and equal seeds of `draw` give equal
    rows.

    `zipf` is the exponent z of the shares: the k-th most frequent category of a slot has a share proportional
    to k ** -z. `missing` is the share of missing values. `signal` is the mean spread of the slots' weights.
    Together with `bias` it sets the number of clicks and how well they can be predicted.
    """

    seed: int = 7
    vocabularies: tuple[int, ...] = VOCABULARIES
    zipf: float = 1.1
    missing: float = 0.03
    bias: float = -1.2
    signal: float = 0.3

    def __post_init__(self) -> None:
        if len(self.vocabularies) != SLOTS or min(self.vocabularies) < 1:
            raise UsageError(f"ClickModel needs {SLOTS} vocabularies of 1 or more, not {self.vocabularies}")
        if not 0 <= self.missing < 1:
            raise UsageError(f"ClickModel missing is {self.missing}; it must be at least 0 and below 1")

    def draw(self, rows: int, seed: int) -> Clicks:
        """Draw `rows` independent examples. Another `seed` gives other rows of the same distribution (for a
        test split).

        Raises UsageError if `rows` is less than 1.
        """
        if rows < 1:
            raise UsageError(f"ClickModel.draw was given rows={rows}; it must be at least 1")
        random = np.random.default_rng([self.seed, seed])
        counts = np.minimum(random.standard_exponential((rows, DENSE)) / 4, 1) * RANGE + LEAST
        counts = np.floor(counts).astype(np.int32)
        counts[random.random((rows, DENSE)) < self.missing] = MISSING
        weights, spreads = self._coefficients
        logit = self.bias + scaled(counts) @ weights
        categories = np.empty((rows, SLOTS), np.uint32)
        ids = np.empty((rows, SLOTS), np.int64)
        for slot, shares in enumerate(self._shares):
            rank = np.searchsorted(shares, random.random(rows))
            # An unordered number for each rank, unique within a slot. Each step can be undone, because it
            # uses odd multipliers and shifted exclusive ors, modulo 2 ** 32.
            bits = (rank.astype(np.uint64) + np.uint64((slot + 1) * 0x9E3779B1)).astype(np.uint32)
            bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
            bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
            categories[:, slot] = bits ^ (bits >> np.uint32(16))
            ids[:, slot] = feature_signs(slot, categories[:, slot])
            ids[random.random(rows) < self.missing, slot] = 0
            logit += np.where(ids[:, slot] != 0, spreads[slot] * _normal(self.seed, ids[:, slot]), 0)
        probability = 1 / (1 + np.exp(-logit))
        labels = (random.random(rows) < probability).astype(np.float32)
        return Clicks(
            counts=counts, categories=categories, ids=ids, labels=labels, probability=probability
        )  # fmt: skip

    @cached_property
    def _coefficients(self) -> tuple[Doubles, Doubles]:
        """Coefficients v (13,) and spreads of w (26,)."""
        random = np.random.default_rng(self.seed)
        return random.normal(0, 0.8, DENSE), self.signal * random.uniform(0.5, 1.5, SLOTS)

    @cached_property
    def _shares(self) -> list[Doubles]:
        """Cumulative shares of each slot's categories, most frequent first."""
        sums = [
            np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -self.zipf) for size in self.vocabularies
        ]
        return [each[:-1] / each[-1] for each in sums]


def scaled(counts: Ints) -> Floats:
    """Return integer features as (rows, 13) float32 in [0, 1], 0 for MISSING."""
    values = (counts.astype(np.float64) - LEAST) / RANGE
    values[counts == MISSING] = 0
    return values.astype(np.float32)


def feature_signs(slot: int, categories: Categories) -> Ids:
    """Return the ids of a slot's categories, (rows,) int64 from 1 to 2 ** 63 - 1.

    Ids of different slots differ, so one table can hold all slots.
    """
    salted = categories.astype(np.uint64) | np.uint64((slot + 1) << 33)
    signs: Ids = np.maximum(_mixed(salted) >> np.uint64(1), np.uint64(1)).astype(np.int64)
    return signs


def _normal(seed: int, ids: Ids) -> Doubles:
    """Return a standard normal number for each id (Box and Muller's transform of two hashes)."""
    first = _mixed(ids.astype(np.uint64) + np.uint64(_mixed(np.array([seed], np.uint64))[0]))
    second = _mixed(first)
    radius = np.sqrt(-2 * np.log((first >> np.uint64(11)) * 2.0**-53 + 2.0**-54))
    normal: Doubles = radius * np.cos((second >> np.uint64(11)) * (2.0**-52 * np.pi))
    return normal


def _mixed(words: Words) -> Words:
    """Apply the output function of SplitMix64, one to one on 64 bits.

    The source is Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
