"""Embeddings that servers can hold. They are `SparseEmbedding`, a table without a fixed size, and modules of
torch.

This module imports neither kernels nor sockets, because scripts and inference import it too. `embedding`
defines ServedEmbedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import Module, Parameter

from trainers.checks import is_whole
from trainers.errors import NotSupportedError, UsageError
from trainers.ps.tables.spec import Bound, Entry, EntryKind, Initializer, InitKind, RowOptions, RowType
from trainers.ps.trainer.torchrec import collection_tables


def Uniform(low: float = -0.01, high: float = 0.01, seed: int = 0) -> Initializer:
    """Return an initializer that draws each value of a new row from [low, high), as a function of (seed, key,
    column).
    """
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise UsageError(f"Uniform({low}, {high}): the bounds must be finite and low must not exceed high")
    return Initializer(InitKind.UNIFORM, float(low), float(high), _seed(seed))


def Normal(mean: float = 0.0, std: float = 0.01, seed: int = 0) -> Initializer:
    """Return an initializer that draws each value of a new row from a normal distribution, as a function of
    (seed, key, column).
    """
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
        raise UsageError(f"Normal({mean}, {std}): both must be finite, and std must be at least 0")
    return Initializer(InitKind.NORMAL, float(mean), float(std), _seed(seed))


def Constant(value: float = 0.0) -> Initializer:
    """Return an initializer that sets all values of a new row to `value`."""
    return Uniform(value, value)


def ProbabilityEntry(probability: float) -> Entry:
    """Return an entry filter that gives a new key a row with this probability, decided once by (seed,
    key).
    """
    if not 0 < probability <= 1:
        raise UsageError(f"ProbabilityEntry({probability!r}): it must be above 0 and at most 1")
    return Entry(EntryKind.PROBABILITY, float(probability))


def CountFilterEntry(count_filter: int) -> Entry:
    """Return an entry filter that gives a new key a row after this many pulls in training."""
    if not is_whole(count_filter) or count_filter < 1:
        raise UsageError(f"CountFilterEntry({count_filter!r}): it must be a whole number of at least 1")
    return Entry(EntryKind.COUNT, float(count_filter))


def ShowClickEntry() -> Entry:
    """Return an entry filter that gives every key a row, and counts shows and clicks of rows. Call the
    embedding with `clicks=`.
    """
    return Entry(EntryKind.SHOW_CLICK)


_ROW_TYPES = {each.dtype: each for each in RowType}


class SparseEmbedding(Module):
    """Rows of `dim` values for any int64 id. Ids of any shape (...) give (..., dim).

    The first training step with an id makes its row, with initial values from `init`. The rows exist only on
    parameter servers, between fleet.init_worker() and fleet.stop_worker(). You may give `weight` to an
    optimizer, but it has no rows.

    - `padding_idx`: an id that reads as zeros and is not trained.
    - `entry`: the filter that decides which ids get a row.
    - `low`, `high`: the bounds of every value.
    - `statistics`: count shows, clicks and unseen days of each row, for `shrink`.
    - `dtype`: the type of stored and returned rows (float32, bfloat16 or float16).
    - `max_rows` or `max_bytes`: the limit of the table on all servers together.
    - `evict`: the rows that leave first ("lru", "lfu" or "score").
    - `ttl_s`: remove rows without an update for so many seconds.

    A removed row reads as its initial value.
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
            "SparseEmbedding was called, but no server has its rows. Pass the model to "
            "fleet.distributed_model(), and call it between fleet.init_worker() and fleet.stop_worker()."
        )

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, init={self.init.kind.name.lower()}({self.init.a:g}, {self.init.b:g})"


def _seed(seed: int) -> int:
    if not is_whole(seed) or not 0 <= seed < 2**64:
        raise UsageError(f"the seed is {seed!r}; it must be a whole number from 0 to 2**64 - 1")
    return seed


# ---- Find the modules of a model that servers can hold.

EmbeddingModule = torch.nn.Embedding | torch.nn.EmbeddingBag | SparseEmbedding


def find_embeddings(model: Module) -> list[tuple[str, EmbeddingModule]]:
    """Return the sparse embeddings of a model by name, and the tables of TorchRec's collections. Raises
    NotSupportedError for one that cannot be served.
    """
    found, collected = [], collection_tables(model)
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for each in {id(parameter) for parameter in module._parameters.values()}:
            users.setdefault(each, []).append(name)
        bounded = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and (
            module.sparse or module in collected
        )
        if getattr(module, "max_norm", None) is not None:
            raise NotSupportedError(
                f"Module {name!r} has max_norm={module.max_norm}, which servers do not support. Remove it, "
                "or bound each value with low and high of a SparseEmbedding."
            )
        if isinstance(module, SparseEmbedding) or bounded:
            found.append((name, module))
    for name, module in found:
        _check(name, module, users.get(id(module.weight), ()))
    return found


def row_limit(module: EmbeddingModule) -> int | None:
    """Return the number of rows, or None if any id may have a row. The latter holds for SparseEmbedding and
    for weights on the meta device.
    """
    if isinstance(module, SparseEmbedding) or module.weight.is_meta:
        return None
    return module.num_embeddings


def weight_of(module: EmbeddingModule) -> Parameter:
    """Return the weight parameter of the module."""
    weight = module.weight
    assert isinstance(weight, Parameter)
    return weight


def embeds(module: EmbeddingModule) -> bool:
    """Return True if the module only reads rows, without sums over bags and without scaled gradients."""
    return isinstance(module, SparseEmbedding) or (
        isinstance(module, torch.nn.Embedding) and not module.scale_grad_by_freq
    )


def pools(module: EmbeddingModule) -> bool:
    """Return True if the module returns sums or means of rows, with gradients that are not scaled."""
    return (
        isinstance(module, torch.nn.EmbeddingBag)
        and module.mode in ("sum", "mean")
        and not module.scale_grad_by_freq
        and module.weight.dtype is torch.float32
    )


def device_of(module: EmbeddingModule) -> torch.device:
    """Return the device on which the module returns its rows."""
    return torch.device("cpu") if module.weight.is_meta else module.weight.device


def rows_of(module: EmbeddingModule) -> RowOptions:
    """Return the options of new rows. Rows of torch's modules are initialized as in their
    reset_parameters.
    """
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


def _check(name: str, module: EmbeddingModule, users: Sequence[str]) -> None:
    forward = type(module).forward
    known = (torch.nn.Embedding.forward, torch.nn.EmbeddingBag.forward)
    if not isinstance(module, SparseEmbedding) and forward not in known:
        raise NotSupportedError(
            f"Embedding {name!r} is a {type(module).__name__} with its own forward, which servers cannot "
            f"run. Use sparse=False for {name!r}."
        )
    if module.weight.dtype not in _ROW_TYPES:
        raise NotSupportedError(
            f"Embedding {name!r} is {module.weight.dtype}; servers support float32, bfloat16 and float16"
        )
    if len(users) > 1:
        raise NotSupportedError(
            f"Embedding {name!r} shares its weight with {', '.join(users)}. Use sparse=False for {name!r}."
        )
