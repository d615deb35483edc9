"""SparseEmbedding: a table without a size. Knows what a script says about it; leaves its rows to the
servers, and serving to `embedding`.
"""

from __future__ import annotations

import math

import torch

from trainers.errors import UsageError
from trainers.ps.tables.spec import Entry, EntryKind, Initializer, InitKind


def Uniform(low: float = -0.01, high: float = 0.01, seed: int = 0) -> Initializer:
    """Values of a new row, each drawn from [low, high) as a function of (seed, key, column)."""
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise UsageError(f"Uniform({low}, {high}): the bounds must be finite, the lower one first")
    return Initializer(InitKind.UNIFORM, float(low), float(high), _seed(seed))


def Normal(mean: float = 0.0, std: float = 0.01, seed: int = 0) -> Initializer:
    """Values of a new row, each drawn from a normal distribution as a function of (seed, key, column)."""
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
        raise UsageError(f"Normal({mean}, {std}): both must be finite, and std not negative")
    return Initializer(InitKind.NORMAL, float(mean), float(std), _seed(seed))


def Constant(value: float = 0.0) -> Initializer:
    """The same value everywhere."""
    return Uniform(value, value)


def ProbabilityEntry(probability: float) -> Entry:
    """A new key gets a row with this probability, decided once and for all by (seed, key)."""
    if not 0 < probability <= 1:
        raise UsageError(f"ProbabilityEntry({probability!r}): it must be above 0 and at most 1")
    return Entry(EntryKind.PROBABILITY, float(probability))


def CountFilterEntry(count_filter: int) -> Entry:
    """A new key gets a row once it has been pulled in training this many times."""
    if isinstance(count_filter, bool) or not isinstance(count_filter, int) or count_filter < 1:
        raise UsageError(f"CountFilterEntry({count_filter!r}): it must be a whole number of at least 1")
    return Entry(EntryKind.COUNT, float(count_filter))


def ShowClickEntry() -> Entry:
    """Every key gets a row, and rows count shows and clicks: call the embedding with `clicks=`."""
    return Entry(EntryKind.SHOW_CLICK)


class SparseEmbedding(torch.nn.Module):
    """Rows of `dim` float32 for any int64 id, made by `init` when training first asks for them.

    ids of any shape (...) give (..., dim). `padding_idx` (an id) reads as zeros and is not trained.
    `entry` decides which ids get a row; `low` and `high` bound every value; `statistics` counts shows,
    clicks and unseen days of each row, for `shrink`. The rows live on parameter servers between
    fleet.init_worker() and fleet.stop_worker(), and nowhere else: `weight`, which an optimizer may be given,
    has no rows.
    """

    def __init__(
        self,
        dim: int,
        *,
        init: Initializer | None = None,
        padding_idx: int | None = None,
        entry: Entry | None = None,
        low: float = -math.inf,
        high: float = math.inf,
        statistics: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= 512:
            raise UsageError(f"SparseEmbedding dim is {dim!r}; it must be a whole number from 1 to 512")
        if not low < high:
            raise UsageError(f"SparseEmbedding bounds are {low!r} and {high!r}; the lower one comes first")
        self.embedding_dim = dim
        self.init = init or Uniform()
        self.padding_idx = padding_idx
        self.entry = entry or Entry()
        self.low, self.high = low, high
        self.statistics = statistics or self.entry.kind is EntryKind.SHOW_CLICK
        self.weight = torch.nn.Parameter(torch.empty(0, dim))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise UsageError(
            "SparseEmbedding was called while no servers have its rows; give the model to "
            "fleet.distributed_model() and call it between fleet.init_worker() and fleet.stop_worker()"
        )

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, init={self.init.kind.name.lower()}({self.init.a:g}, {self.init.b:g})"


def _seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise UsageError(f"the seed is {seed!r}; it must be a whole number from 0 to 2**64 - 1")
    return seed
