"""Embeddings that servers can hold: `SparseEmbedding`, a table without a fixed size, and modules of torch.

Imports neither kernels nor sockets: scripts and inference import it too. ServedEmbedding belongs to
`embedding`.
"""

from __future__ import annotations

import math

import torch
from torch.nn import Module, Parameter

from trainers.checks import is_whole
from trainers.errors import NotSupportedError, UsageError
from trainers.ps.tables.spec import Bound, Entry, EntryKind, Initializer, InitKind, RowOptions, RowType


def Uniform(low: float = -0.01, high: float = 0.01, seed: int = 0) -> Initializer:
    """Values of a new row, each drawn from [low, high) as a function of (seed, key, column)."""
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise UsageError(f"Uniform({low}, {high}): the bounds must be finite and low must not exceed high")
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
    """A new key gets a row with this probability, decided once by (seed, key)."""
    if not 0 < probability <= 1:
        raise UsageError(f"ProbabilityEntry({probability!r}): it must be above 0 and at most 1")
    return Entry(EntryKind.PROBABILITY, float(probability))


def CountFilterEntry(count_filter: int) -> Entry:
    """A new key gets a row once it has been pulled in training this many times."""
    if not is_whole(count_filter) or count_filter < 1:
        raise UsageError(f"CountFilterEntry({count_filter!r}): it must be a whole number of at least 1")
    return Entry(EntryKind.COUNT, float(count_filter))


def ShowClickEntry() -> Entry:
    """Every key gets a row, and rows count shows and clicks: call the embedding with `clicks=`."""
    return Entry(EntryKind.SHOW_CLICK)


_ROW_TYPES = {each.dtype: each for each in RowType}


class SparseEmbedding(Module):
    """Rows of `dim` values for any int64 id. `init` gives their initial values, and the first step that
    trains an id makes its row.

    ids of any shape (...) give (..., dim). `padding_idx` (an id) reads as zeros and is not trained. `entry`
    decides which ids get a row; `low` and `high` bound every value; `statistics` counts shows, clicks and
    unseen days of each row, for `shrink`; `dtype`, float32, bfloat16 or float16, is that of the rows that are
    kept and given. `max_rows` or `max_bytes`: how much the table may have, on all servers; `evict` ("lru",
    "lfu" or "score"): which rows then leave first; `ttl_s`: rows that were not updated for so many seconds
    leave too. A row that left reads as its initial value.

    The rows exist only on parameter servers, between fleet.init_worker() and fleet.stop_worker(): `weight`,
    which an optimizer may be given, has no rows.
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
        dtype: torch.dtype = torch.float32,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        evict: str | None = None,
        ttl_s: float | None = None,
    ) -> None:
        super().__init__()
        if not is_whole(dim) or not 1 <= dim <= 512:
            raise UsageError(f"SparseEmbedding dim is {dim!r}; it must be a whole number from 1 to 512")
        if not low < high:
            raise UsageError(f"SparseEmbedding bounds are {low!r} and {high!r}; low must be below high")
        if dtype not in _ROW_TYPES:
            raise UsageError(f"SparseEmbedding dtype is {dtype}; it must be float32, bfloat16 or float16")
        self.embedding_dim = dim
        self.init = init or Uniform()
        self.padding_idx = padding_idx
        self.entry = entry or Entry()
        self.low, self.high = low, high
        self.statistics = statistics or self.entry.kind is EntryKind.SHOW_CLICK
        self.bound = Bound.of("SparseEmbedding", max_rows, max_bytes, evict, ttl_s)
        self.weight = Parameter(torch.empty(0, dim, dtype=dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise UsageError(
            "SparseEmbedding was called while no server has its rows; pass the model to "
            "fleet.distributed_model() and call it between fleet.init_worker() and fleet.stop_worker()"
        )

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, init={self.init.kind.name.lower()}({self.init.a:g}, {self.init.b:g})"


def _seed(seed: int) -> int:
    if not is_whole(seed) or not 0 <= seed < 2**64:
        raise UsageError(f"the seed is {seed!r}; it must be a whole number from 0 to 2**64 - 1")
    return seed


# ---- Which of a model's modules servers can hold.

EmbeddingModule = torch.nn.Embedding | torch.nn.EmbeddingBag | SparseEmbedding


def find_embeddings(model: Module) -> list[tuple[str, EmbeddingModule]]:
    """The sparse embeddings of a model by name. Raises NotSupportedError for one that cannot be served."""
    found = []
    for name, module in model.named_modules():
        bounded = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        if getattr(module, "max_norm", None) is not None:
            raise NotSupportedError(
                f"module {name!r} has max_norm={module.max_norm}, which servers do not apply; leave it out, "
                "or bound each value by the low and high of a SparseEmbedding"
            )
        if isinstance(module, SparseEmbedding) or bounded:
            _check(model, name, module)
            found.append((name, module))
    return found


def row_limit(module: EmbeddingModule) -> int | None:
    """The number of rows; None where any id has one: SparseEmbedding, and weights on the meta device."""
    if isinstance(module, SparseEmbedding) or module.weight.is_meta:
        return None
    return module.num_embeddings


def weight_of(module: EmbeddingModule) -> Parameter:
    """Its parameter."""
    weight = module.weight
    assert isinstance(weight, Parameter)
    return weight


def embeds(module: EmbeddingModule) -> bool:
    """Whether the module only reads rows: with no sum over bags, and no scaled gradients."""
    return isinstance(module, SparseEmbedding) or (
        isinstance(module, torch.nn.Embedding) and not module.scale_grad_by_freq
    )


def pools(module: EmbeddingModule) -> bool:
    """Whether the module gives sums or means of rows, with gradients that are not scaled."""
    return (
        isinstance(module, torch.nn.EmbeddingBag)
        and module.mode in ("sum", "mean")
        and not module.scale_grad_by_freq
        and module.weight.dtype is torch.float32
    )


def device_of(module: EmbeddingModule) -> torch.device:
    """Where its rows are given."""
    return torch.device("cpu") if module.weight.is_meta else module.weight.device


def rows_of(module: EmbeddingModule) -> RowOptions:
    """How new rows are initialized: those of torch's modules as their reset_parameters does."""
    dtype = _ROW_TYPES[module.weight.dtype]
    if isinstance(module, SparseEmbedding):
        return RowOptions(
            init=module.init,
            entry=module.entry,
            low=module.low,
            high=module.high,
            statistics=module.statistics,
            dtype=dtype,
            bound=module.bound,
        )
    return RowOptions(init=Initializer(InitKind.NORMAL, 0.0, 1.0), dtype=dtype)


def _check(model: Module, name: str, module: EmbeddingModule) -> None:
    forward = type(module).forward
    known = (torch.nn.Embedding.forward, torch.nn.EmbeddingBag.forward)
    if not isinstance(module, SparseEmbedding) and forward not in known:
        raise NotSupportedError(f"embedding {name!r} is a {type(module).__name__} with a forward of its own")
    if module.weight.dtype not in _ROW_TYPES:
        raise NotSupportedError(
            f"embedding {name!r} is {module.weight.dtype}; servers keep float32, bfloat16 or float16"
        )
    users = [
        where
        for where, other in model.named_modules()
        if any(parameter is module.weight for parameter in other.parameters(recurse=False))
    ]
    if len(users) > 1:
        raise NotSupportedError(
            f"embedding {name!r} shares its weight with {', '.join(users)}; use sparse=False there"
        )
