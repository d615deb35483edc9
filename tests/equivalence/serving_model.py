"""The models of a serving program, and the requests to them.

A model adds up what it makes of its inputs, (n, WIDTH), and changes that by mixes. Some mixes let the rows of
a batch depend on each other: requests to such a model must not be computed together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from tests.equivalence.program import Block, Program, define

WIDTH, IDS, LONG = 4, 60, 3
"""Values of a row inside the model, the range of ids, and steps of a sequence."""
REQUESTS = 18
KINDS_OF_VALUES = ("usual", "negative", "large", "equal", "whole", "zero")

Inputs = dict[str, torch.Tensor]
Read = Callable[..., torch.Tensor]

# ---- Inputs


class _Linear(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.float().reshape(x.shape[0], self.inner.in_features))


class _Rows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(IDS, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).mean(1)


class _Picture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Conv2d(1, WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)).amax((2, 3))


class _Sequence(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        return self.inner(x, x, x, need_weights=False)[0].mean(1)


class _Flags(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x, 0.5, -0.25)


def _mode(rng: random.Random) -> dict[str, Any]:
    return {"mode": rng.choice(("sum", "mean", "max"))}


def _type(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(("float32", "float32", "float64", "int32", "uint8"))}


define("input", "numbers", "(n, 3) numbers", _type, weight=3.0, once=False)
define("input", "one_number", "(n,) numbers", _type, weight=0.7)
define("input", "flags", "(n, 4) booleans", weight=0.5)
define("input", "few_rows_of_ids", "(n, 2) ids of an nn.Embedding", weight=2.0)
define("input", "bag_of_ids", "(n, 3) ids of an nn.EmbeddingBag", _mode)
define("input", "flat_bag", "flat ids and offsets of an nn.EmbeddingBag", _mode)
define("input", "picture", "(n, 1, 4, 4) numbers and Conv2d", weight=0.7)
define("input", "sequence", "(n, 3, 4) numbers and attention", weight=0.7)


def _reader(block: Block) -> torch.nn.Module:
    made: dict[str, Callable[[], torch.nn.Module]] = {
        "numbers": lambda: _Linear(3),
        "one_number": lambda: _Linear(1),
        "flags": _Flags,
        "few_rows_of_ids": _Rows,
        "bag_of_ids": lambda: torch.nn.EmbeddingBag(IDS, WIDTH, mode=block["mode"]),
        "flat_bag": lambda: torch.nn.EmbeddingBag(IDS, WIDTH, mode=block["mode"]),
        "picture": _Picture,
        "sequence": _Sequence,
    }
    return made[block.name]()


_NAMES = ("first", "second", "third", "fourth", "fifth", "sixth")
"""Of inputs, as `forward` has them."""


def values(block: Block, rows: int, kind: str, draw: torch.Generator) -> list[torch.Tensor]:
    """The inputs of one block, for a request with so many rows."""
    if "bag" in block.name or "ids" in block.name:
        shape = (rows, 2 if block.name == "few_rows_of_ids" else 3)
        ids = torch.randint(0, IDS, shape, generator=draw)
        if kind == "whole":
            ids.view(-1)[0], ids.view(-1)[-1] = IDS - 1, 0
        elif kind in ("equal", "zero"):
            ids = torch.full(shape, 0 if kind == "zero" else int(ids[0, 0]))
        return [ids] if block.name != "flat_bag" else _flat(ids, draw)
    if block.name == "flags":
        return [torch.rand((rows, WIDTH), generator=draw) < (1.0 if kind == "equal" else 0.5)]
    shapes = {"numbers": (3,), "one_number": (), "picture": (1, 4, 4), "sequence": (LONG, WIDTH)}
    found = torch.randn((rows, *shapes[block.name]), generator=draw)
    scale = {"large": 3000.0, "zero": 0.0, "whole": 30.0}.get(kind, 1.0)
    found = found * scale
    if kind == "negative":
        found = -found.abs() - 1.0
    if kind == "equal":
        found = found[:1].expand(found.shape).clone()
    dtype = getattr(torch, block.get("type", "float32"))
    if not dtype.is_floating_point:
        found = found.abs().clamp(max=250).round() if dtype is torch.uint8 else found.round()
    return [found.to(dtype)]


def _flat(ids: torch.Tensor, draw: torch.Generator) -> list[torch.Tensor]:
    """Bags of 1 to 3 of the ids."""
    lengths = torch.randint(1, 4, (len(ids),), generator=draw)
    kept = torch.arange(3).expand(ids.shape) < lengths[:, None]
    return [ids[kept], torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])]


# ---- Mixes

Mix = Callable[[Any, torch.Tensor], torch.Tensor]
MIXES: dict[str, Mix] = {}


def mix(name: str, about: str, call: Mix, weight: float = 1.0) -> None:
    define("mix", name, about, weight=weight)
    MIXES[name] = call


_parts: dict[str, Callable[[], torch.nn.Module]] = {
    "dense": lambda: torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()),
    "normed": lambda: torch.nn.LayerNorm(WIDTH, eps=0.1),
    "statistics": lambda: _with_statistics(torch.nn.BatchNorm1d(WIDTH, eps=0.1)),
    "groups_normed": lambda: torch.nn.GroupNorm(2, WIDTH, eps=0.1),
}


def _with_statistics(norm: torch.nn.BatchNorm1d) -> torch.nn.Module:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm


mix("dense", "Linear and tanh", lambda part, h: part(h), 2.0)
mix("normed", "LayerNorm", lambda part, h: part(h))
mix("statistics", "BatchNorm1d, which evaluates", lambda part, h: part(h))
mix("groups_normed", "GroupNorm", lambda part, h: part(h))
mix("softmax_of_row", "a softmax over features", lambda part, h: h.softmax(1))
mix(
    "row_scaled", "divided by the largest feature", lambda part, h: h / h.abs().amax(1, keepdim=True).clamp(1)
)
mix("row_sorted", "features sorted", lambda part, h: h.sort(1).values)
mix("row_cumulated", "cumsum over features", lambda part, h: h.cumsum(1))
mix("chosen", "where() of each value", lambda part, h: torch.where(h > 0.5, h * 2, h - 1))
mix("transposed_twice", "two transpositions", lambda part, h: (h.T * 2).T)
mix("outer", "products of features", lambda part, h: torch.einsum("ni,nj->ni", h, h.abs()))

_RARE = 0.5
"""Of mixes whose rows depend on each other."""
mix("centered", "minus the mean of the batch", lambda part, h: h - h.mean(0), _RARE)
mix("softmax_of_batch", "a softmax over the batch", lambda part, h: h.softmax(0), _RARE)
mix(
    "scaled_if_large",
    "divided by 255 if any value of the batch is large",
    lambda part, h: h / torch.where(h.max() > 100, 255.0, 1.0),
    _RARE,
)
mix(
    "scaled_if_negative",
    "halved if any value of the batch is far below zero",
    lambda part, h: h * torch.where(h.amin() < -100, 0.5, 1.0),
    _RARE,
)
mix("batch_sorted", "sorted over the batch", lambda part, h: h.sort(0).values, _RARE)
mix("batch_cumulated", "cumsum over the batch", lambda part, h: h.cumsum(0), _RARE)
mix("flipped", "rows in reverse", lambda part, h: h + h.flip(0), _RARE)
mix("rolled", "the row before is added", lambda part, h: h + h.roll(1, 0), _RARE)
mix("first_row", "the first row is added", lambda part, h: h + h[:1], _RARE)
mix(
    "batch_norm_of_column", "normalized over the batch", lambda part, h: functional.normalize(h, dim=0), _RARE
)
mix("whole_norm", "divided by the norm of the batch", lambda part, h: h / (h.norm() + 1), _RARE)
mix("sized", "divided by the number of rows", lambda part, h: h / h.shape[0], _RARE)
mix("compared", "how many rows are alike", lambda part, h: h + _alike(h), _RARE)
mix("gram", "products of rows", lambda part, h: h + (h @ h.T).tanh().sum(1, keepdim=True), _RARE)
mix("gathered", "rows chosen by a rank in the batch", lambda part, h: h + h[h[:, 0].argsort()], _RARE)


def _alike(h: torch.Tensor) -> torch.Tensor:
    return (h[:, None] == h[None]).all(2).sum(1, keepdim=True)


# ---- Outputs

Head = Callable[[torch.Tensor], Any]
HEADS: dict[str, Head] = {}


def head(name: str, about: str, call: Head, weight: float = 1.0) -> None:
    define("head", name, about, weight=weight)
    HEADS[name] = call


def _whole(h: torch.Tensor) -> torch.Tensor:
    """Whole numbers, which are exact in all types."""
    return (h * 4).clamp(-100, 100).round()


head("matrix", "(n, 4)", lambda h: h)
head("column", "out[:, 0]", lambda h: h[:, 0], 2.0)
head("last_column", "out[:, -1:]", lambda h: h[:, -1:])
head("every_other", "out[:, ::2]", lambda h: h[:, ::2])
head("turned", "out.T[1]", lambda h: h.T[1])
head("spread", "expand() of a column", lambda h: h[:, :1].expand(-1, 3))
head("pair_of_outputs", "a tuple", lambda h: (h.sum(1), h))
head("by_names", "a dict, one of whose values is a column", lambda h: {"score": h[:, 1], "rows": h * 2})
head("best", "argmax and comparisons", lambda h: {"best": h.argmax(1), "high": h > 0})
head("short_types", "float16, bfloat16, int8 and float64", lambda h: _short(_whole(h)))
head("total", "a sum over the batch, without dimensions", lambda h: {"total": h.sum(), "rows": h}, 0.3)
head("largest", "the largest values of the batch", lambda h: (h, h.amax(0)), 0.3)
head("longer", "two rows for each", lambda h: h.repeat_interleave(2, 0), 0.3)
head("deeper", "(n, 2, 2)", lambda h: h.view(-1, 2, 2).transpose(1, 2))


def _short(h: torch.Tensor) -> dict[str, torch.Tensor]:
    dtypes = {"half": torch.float16, "brain": torch.bfloat16, "byte": torch.int8, "double": torch.float64}
    return {name: h[:, place].to(dtype) for place, (name, dtype) in enumerate(dtypes.items())}


define("request", "example_of_rows", "the example has few rows", lambda rng: {"rows": rng.randint(1, 2)})
define("request", "named_example", "the example is a dict")


class Net(torch.nn.Module):
    """The model of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.blocks = program.family("input") or [Block("numbers", (("type", "float32"),))]
        self.readers = torch.nn.ModuleList(map(_reader, self.blocks))
        self.mixes = [each.name for each in program.family("mix")]
        self.parts = torch.nn.ModuleDict({name: _parts[name]() for name in self.mixes if name in _parts})
        heads = program.family("head")
        self._head = HEADS[heads[0].name if heads else "matrix"]
        self.eval()

    def forward(
        self,
        first: torch.Tensor,
        second: torch.Tensor | None = None,
        third: torch.Tensor | None = None,
        fourth: torch.Tensor | None = None,
    ) -> Any:
        given = [each for each in (first, second, third, fourth) if each is not None]
        total: torch.Tensor | None = None
        for block, reader in zip(self.blocks, self.readers, strict=True):
            mine = [given.pop(0) for _ in range(2 if block.name == "flat_bag" else 1)]
            found = reader(*mine)
            total = found if total is None else total + found
        assert total is not None
        for name in self.mixes:
            part = self.parts[name] if name in _parts else None
            total = MIXES[name](part, total)
        return self._head(total)

    def inputs(self, rows: int, kind: str, number: int) -> Inputs:
        draw = torch.Generator().manual_seed(number)
        found = [each for block in self.blocks for each in values(block, rows, kind, draw)]
        return dict(zip(_NAMES, found, strict=False))


def requests(program: Program, net: Net) -> list[Inputs]:
    """Of all kinds of values, with one row and with several."""
    rng = random.Random(program.seed)
    kinds = (KINDS_OF_VALUES * math.ceil(REQUESTS / len(KINDS_OF_VALUES)))[:REQUESTS]
    return [
        net.inputs(rng.choice((1, 1, 2, 3, 5)), kind, program.seed * 100 + number)
        for number, kind in enumerate(kinds)
    ]


def named(found: Any) -> dict[str, torch.Tensor]:
    """The outputs by the names that the protocol has for them."""
    if isinstance(found, torch.Tensor):
        return {"output": found}
    if isinstance(found, dict):
        return found
    return {f"output_{place}": each for place, each in enumerate(found)}
