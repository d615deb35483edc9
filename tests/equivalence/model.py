"""The model of a program: tables, how they are called, and dense layers.

The served model and its plain twin are made by the same code. Only a SparseEmbedding, which has no rows
without servers, is an nn.Embedding in the twin.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.equivalence.program import COLUMNS, DIM, NUMBERS, ROWS, Block, Program, define, some_steps
from trainers.ps import Constant, SparseEmbedding

_START = 0.25
"""Values of a new row of a SparseEmbedding."""


def _table(rng: random.Random) -> dict[str, Any]:
    return {"table": rng.randrange(3)}


def _table_at(rng: random.Random) -> dict[str, Any]:
    return {"table": rng.randrange(3), "at": some_steps(rng)}


def _padding(rng: random.Random) -> dict[str, Any]:
    return {"padding": rng.choice((None, None, 0, 3))}


def _mode(rng: random.Random) -> dict[str, Any]:
    return {"mode": rng.choice(("sum", "mean")), **_padding(rng)}


define("table", "embedding", "nn.Embedding", _padding, weight=3.0, once=False, merged=True)
define("table", "bag", "nn.EmbeddingBag, called with a matrix", _mode, weight=2.0, once=False, merged=True)
define("table", "max_bag", "nn.EmbeddingBag of mode max", weight=0.3)
define("table", "ragged_bag", "nn.EmbeddingBag with offsets, some bags empty", _mode, weight=1.5, merged=True)
define(
    "table",
    "weighted_bag",
    "nn.EmbeddingBag with per_sample_weights",
    lambda rng: {"offsets": rng.random() < 0.5, "learned": rng.random() < 0.3},
    weight=1.5,
)
define("table", "last_offset_bag", "nn.EmbeddingBag(include_last_offset=True)", _mode, merged=True)
define("table", "sparse_embedding", "SparseEmbedding; a constant nn.Embedding in the twin", weight=1.5)
define("table", "dense_embedding", "nn.Embedding(sparse=False), a dense parameter", _padding, merged=True)
define("table", "scaled_embedding", "the same with scale_grad_by_freq", _padding, weight=0.5, alone=True)


def _collection(rng: random.Random) -> dict[str, Any]:
    return {"kind": rng.choice(("bags", "weighted", "rows")), "mode": rng.choice(("sum", "mean"))}


define("collected", "collection", "two tables in a collection of TorchRec", _collection, merged=True)

define("use", "called_twice", "the table is called twice in a step", _table, weight=2.0, merged=True)
define("use", "frozen", "requires_grad_(False), and in no optimizer", _table)
define("use", "frozen_listed", "requires_grad_(False), but in the optimizer", _table)
define("use", "unlisted", "the table is in no optimizer", _table)
define("use", "untouched", "steps whose batch does not call the table", _table_at, weight=2.0, merged=True)
define("use", "no_ids", "steps in which the table is called with no ids", _table_at, merged=True)
define("use", "alias", "the module has a second name in the model", _table, merged=True)
define("use", "detached_output", "steps in which the table's output is detached", _table_at, weight=1.5)
define("use", "rows_squared", "a penalty on the rows that were looked up", _table)
define("use", "through_sequential", "the table is called through nn.Sequential", _table, merged=True)

define("layer", "tanh_layer", "Linear and tanh", weight=2.0)
define("layer", "layer_norm", "LayerNorm")
define("layer", "batch_norm", "BatchNorm1d", alone=True, weight=2.0)
define("layer", "group_norm", "GroupNorm")
define("layer", "dropout", "Dropout with torch's generator", alone=True)
define("layer", "weight_norm", "Linear with torch's weight_norm parametrization", weight=0.5)
define("layer", "twice_layer", "the same Linear twice")
define("layer", "frozen_layer", "a Linear without gradients")
define("layer", "prelu", "PReLU")
define("layer", "recomputed", "torch.utils.checkpoint around lookups and layers", weight=0.7)
define("layer", "scale", "a parameter of one value, in no module of torch")


class _Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([0.8]))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale


class _Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(DIM, DIM)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(torch.tanh(self.inner(hidden))))


def _frozen() -> torch.nn.Module:
    return torch.nn.Linear(DIM, DIM).requires_grad_(False)


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "tanh_layer": lambda: torch.nn.Sequential(torch.nn.Linear(DIM, DIM), torch.nn.Tanh()),
    "layer_norm": lambda: torch.nn.LayerNorm(DIM, eps=0.1),
    "batch_norm": lambda: torch.nn.BatchNorm1d(DIM, eps=0.1),
    "group_norm": lambda: torch.nn.GroupNorm(2, DIM, eps=0.1),
    "dropout": lambda: torch.nn.Dropout(0.4),
    "weight_norm": lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(DIM, DIM)),
    "twice_layer": _Twice,
    "frozen_layer": _frozen,
    "prelu": torch.nn.PReLU,
    "scale": _Scale,
}


def _make_table(block: Block, served: bool) -> torch.nn.Module:
    padding = block.get("padding")
    if block.name == "sparse_embedding":
        if served:
            return SparseEmbedding(DIM, init=Constant(_START))
        return torch.nn.Embedding.from_pretrained(torch.full((ROWS, DIM), _START), freeze=False, sparse=True)
    if "embedding" in block.name:
        scaled = block.name == "scaled_embedding"
        sparse = block.name == "embedding"
        return torch.nn.Embedding(ROWS, DIM, padding_idx=padding, sparse=sparse, scale_grad_by_freq=scaled)
    mode = {"max_bag": "max", "weighted_bag": "sum"}.get(block.name) or block["mode"]
    return torch.nn.EmbeddingBag(
        ROWS,
        DIM,
        mode=mode,
        sparse=mode != "max",
        padding_idx=padding,
        include_last_offset=block.name == "last_offset_bag",
    )


class Collection(torch.nn.Module):
    """Two tables in a collection of TorchRec, the first with two features. In the twin they have sparse
    gradients. Without torchrec, the tables are called one by one.
    """

    def __init__(self, kind: str, mode: str, served: bool) -> None:
        super().__init__()
        self.kind, self.rec = kind, find_spec("torchrec") is not None
        mode = "sum" if kind == "weighted" else mode
        self.made: Any = self._made(mode) if self.rec else _Alone(kind, mode)
        self.inner = list((self.made.embeddings if kind == "rows" else self.made.embedding_bags).values())
        for each in self.inner:
            each.sparse = not (served and self.rec)

    def _made(self, mode: str) -> Any:
        import torchrec as rec

        options: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": DIM}
        of = {"t0": ["f0", "again"], "t1": ["f1"]}
        if self.kind == "rows":
            tables = [
                rec.EmbeddingConfig(name=name, feature_names=some, **options) for name, some in of.items()
            ]
            return rec.EmbeddingCollection(tables=tables)
        options["pooling"] = rec.PoolingType[mode.upper()]
        bags = [rec.EmbeddingBagConfig(name=name, feature_names=some, **options) for name, some in of.items()]
        return rec.EmbeddingBagCollection(tables=bags, is_weighted=self.kind == "weighted")

    def forward(self, ids: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """(n, k) ids of each table, or (n, 0), to (n, DIM) values."""
        some = [ids[0], ids[0].flip(1), ids[1]]
        lengths = [_lengths(each, full=self.kind == "rows") for each in some]
        kept = [
            each[torch.arange(each.shape[1]).expand(each.shape) < length[:, None]]
            for each, length in zip(some, lengths, strict=True)
        ]
        weights = [each % 3 + 0.5 for each in kept] if self.kind == "weighted" else None
        found = self._called(kept, lengths, weights)
        if self.kind == "rows":
            shaped = zip(found, some, strict=True)
            found = [rows.view(*each.shape, DIM).sum(1) for rows, each in shaped]
        return [found[0] + 0.5 * found[1], found[2]]

    def _called(self, ids: Any, lengths: Any, weights: Any) -> list[torch.Tensor]:
        if not self.rec:
            return self.made(ids, lengths, weights)
        from torchrec import KeyedJaggedTensor

        joined = None if weights is None else torch.cat(weights)
        names = ["f0", "again", "f1"]
        features = KeyedJaggedTensor(names, torch.cat(ids), joined, lengths=torch.cat(lengths).int())
        found = self.made(features)
        if self.kind == "rows":
            return [found[name].values() for name in names]
        return [found[name] for name in names]


class _Alone(torch.nn.Module):
    """The same tables without torchrec."""

    def __init__(self, kind: str, mode: str) -> None:
        super().__init__()
        made: dict[str, torch.nn.Module] = {}
        for name in ("t0", "t1"):
            made[name] = torch.nn.Embedding(ROWS, DIM)
            if kind != "rows":
                made[name] = torch.nn.EmbeddingBag(ROWS, DIM, mode=mode)
        self.kind, self.embeddings = kind, torch.nn.ModuleDict(made)

    @property
    def embedding_bags(self) -> torch.nn.ModuleDict:
        return self.embeddings

    def forward(self, ids: Any, lengths: Any, weights: Any) -> list[torch.Tensor]:
        tables = [self.embeddings["t0"], self.embeddings["t0"], self.embeddings["t1"]]
        if self.kind == "rows":
            return [table(each) for table, each in zip(tables, ids, strict=True)]
        offsets = [(each.cumsum(0) - each).to(some.dtype) for each, some in zip(lengths, ids, strict=True)]
        return [
            table(some, each, weight)
            for table, some, each, weight in zip(tables, ids, offsets, weights or [None] * 3, strict=True)
        ]


def _lengths(ids: torch.Tensor, *, full: bool) -> torch.Tensor:
    """How many of the ids of each example are kept."""
    if full or not ids.shape[1]:
        return torch.full((len(ids),), ids.shape[1])
    return ids[:, 0].long() % (ids.shape[1] + 1)


class Net(torch.nn.Module):
    """Tables, whose outputs are added up, dense layers, and a number for each example."""

    def __init__(self, program: Program, served: bool) -> None:
        super().__init__()
        self.program = program
        self.linear_loss = program.merged
        self.blocks = program.family("table") or [Block("embedding")]
        self.tables = torch.nn.ModuleList(_make_table(block, served) for block in self.blocks)
        self.collection = None
        collected = program.first("collection")
        if collected is not None:
            self.collection = Collection(collected["kind"], collected["mode"], served)
            self.tables.extend(self.collection.inner)
            self.blocks = [*self.blocks, *[Block("collected")] * 2]
        for each in program.all("alias"):
            self.other_name = self.table_of(each)
        self.through = {
            self.place(each): torch.nn.Sequential(self.table_of(each))
            for each in program.all("through_sequential")
        }
        self.x = torch.nn.Linear(NUMBERS, DIM)
        self.layers = torch.nn.Sequential(
            *(LAYERS[each.name]() for each in program.family("layer") if each.name in LAYERS)
        )
        self.out = torch.nn.Linear(DIM, 1)
        learned = [place for place, block in enumerate(self.blocks) if block.get("learned")]
        self.weights = torch.nn.ParameterDict({str(place): torch.rand(COLUMNS) + 0.5 for place in learned})
        self.twice = {self.place(each) for each in program.all("called_twice")}
        self.recomputed = program.has("recomputed")
        for each in (*program.all("frozen"), *program.all("frozen_listed")):
            self.table_of(each).weight.requires_grad_(False)

    def place(self, block: Block) -> int:
        """The number of the table that a block is about."""
        return int(block["table"]) % len(self.blocks)

    def table_of(self, block: Block) -> Any:
        return self.tables[self.place(block)]

    def served_tables(self) -> list[int]:
        """The tables that servers hold by rows, which have sparse gradients in torch."""
        return [
            place
            for place, each in enumerate(self.tables)
            if isinstance(each, SparseEmbedding)
            or bool(getattr(each, "sparse", False))
            or self.blocks[place].name == "collected"
        ]

    def table_weights(self) -> list[torch.nn.Parameter]:
        return [self.tables[place].weight for place in self.served_tables()]

    def dense(self) -> list[torch.nn.Parameter]:
        """All parameters that are not in such a table."""
        taken = {id(each) for each in self.table_weights()}
        return [each for each in self.parameters() if id(each) not in taken]

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of its state, without a second name and without tables of no known size."""
        names = [
            f"tables.{place}." for place, each in enumerate(self.blocks) if each.name == "sparse_embedding"
        ]
        left_out = ("other_name.", *names)
        state = self.state_dict()
        return {name: each.clone() for name, each in state.items() if not name.startswith(left_out)}

    # ---- Calls

    def lookup(self, place: int, ids: torch.Tensor) -> torch.Tensor:
        """(n, k) ids to (n, DIM) values."""
        block: Block = self.blocks[place]
        if block.name == "collected":
            return self.collected({place: ids}, ids)[place]
        table: Any = self.through.get(place, self.tables[place])
        if "bag" not in block.name:
            return table(ids).mean(1)
        if block.name in ("bag", "max_bag"):
            return table(ids)
        table = self.tables[place]
        weights = self._weights_of(place, ids) if block.name == "weighted_bag" else None
        if weights is not None and not block["offsets"]:
            return table(ids, per_sample_weights=weights.contiguous())
        lengths = ids[:, 0].long() % (ids.shape[1] + 1)
        kept = torch.arange(ids.shape[1]).expand(ids.shape) < lengths[:, None]
        ends = lengths.cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends])
        if block.name != "last_offset_bag":
            offsets = offsets[:-1]
        offsets = offsets.to(ids.dtype)
        if weights is None:
            return table(ids[kept], offsets)
        return table(ids[kept], offsets, per_sample_weights=weights[kept])

    def collected(self, ids: dict[int, torch.Tensor], like: torch.Tensor) -> dict[int, torch.Tensor]:
        """The same for tables of the collection in one call."""
        assert self.collection is not None
        places = [place for place, block in enumerate(self.blocks) if block.name == "collected"]
        if not len(like):  # TorchRec's own modules do not take it
            return {place: torch.zeros(0, DIM) for place in ids}
        found = self.collection([ids.get(place, like[:, :0]) for place in places])
        return {place: values for place, values in zip(places, found, strict=True) if place in ids}

    def _weights_of(self, place: int, ids: torch.Tensor) -> torch.Tensor:
        if str(place) in self.weights:
            return self.weights[str(place)][: ids.shape[1]].expand(ids.shape)
        return (torch.arange(ids.shape[1]) + 1.0).expand(ids.shape) * 0.3

    def features(self, batch: dict[str, torch.Tensor], step: int | None) -> torch.Tensor:
        """`step`: None in an evaluation, which calls every table."""
        total = self.x(batch["x"])
        together: dict[int, torch.Tensor] = {}
        if self.collection is not None:
            places = [place for place, block in enumerate(self.blocks) if block.name == "collected"]
            left = [place for place in places if not self._left_out(place, step)]
            columns = {place: (2 * place) % COLUMNS for place in left}
            ids = {place: batch["ids"][:, first : first + 2] for place, first in columns.items()}
            together = self.collected(ids, batch["ids"])
        for place in range(len(self.blocks)):
            if self._is("untouched", place, step):
                continue
            if self._is("no_ids", place, step):
                if "bag" not in self.blocks[place].name and self.blocks[place].name != "collected":
                    self.tables[place](batch["ids"][:0, 0])
                continue
            first = (2 * place) % COLUMNS
            found = together.get(place)
            if found is None:
                found = self.lookup(place, batch["ids"][:, first : first + 2])
            if self._is("detached_output", place, step):
                found = found.detach()
            total = total + found
            if place in self.twice:
                first = (first + 3) % (COLUMNS - 2)
                total = total + self.lookup(place, batch["ids"][:, first : first + 2]) * 0.5
        return total

    def _left_out(self, place: int, step: int | None) -> bool:
        return self._is("untouched", place, step) or self._is("no_ids", place, step)

    def _is(self, name: str, place: int, step: int | None) -> bool:
        return any(self.place(each) == place and step in each["at"] for each in self.program.all(name))

    def forward(self, batch: dict[str, torch.Tensor], step: int | None = None) -> torch.Tensor:
        """(n,)."""
        if self.recomputed and torch.is_grad_enabled():
            return checkpoint(self._compute, batch, step, use_reentrant=False)
        return self._compute(batch, step)

    def _compute(self, batch: dict[str, torch.Tensor], step: int | None) -> torch.Tensor:
        hidden = self.features(batch, step)
        if self.linear_loss:
            return hidden.sum(1)
        return self.out(torch.tanh(self.layers(hidden)))[:, 0]

    def losses(self, batch: dict[str, torch.Tensor], out: torch.Tensor, step: int) -> torch.Tensor:
        """(n,): of each example."""
        if self.linear_loss:
            return out * batch["y"]
        found = functional.mse_loss(out, batch["y"], reduction="none")
        for block in self.program.all("rows_squared"):
            if not self._is("untouched", self.place(block), step):
                found = found + 0.05 * self.lookup(self.place(block), batch["ids"][:, :2]).square().sum(1)
        return found
