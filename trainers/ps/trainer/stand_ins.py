"""Ordinary modules in place of embeddings whose rows are on parameter servers, for a program that runs
without servers.

The servers save their values, and this process reads them. `serving.program` handles programs.
"""

from __future__ import annotations

import copy
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, functional

from fleetrun.aliases import Document, ShowText
from trainers.process.log import glog
from trainers.ps.saves.read import SparseValues, read_values
from trainers.ps.saves.write import codes_of
from trainers.ps.tables.spec import Initializer, InitKind, RowOptions
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.trainer.modules import EmbeddingModule, row_limit
from trainers.ps.trainer.torchrec import TENSORS, defined, find_collections, tables_of
from trainers.serving.lookup import RowsElsewhere
from trainers.serving.program import Bags
from trainers.storage.folder import Where, open_folder

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 1 << 64
_LAST_KEY = (1 << 63) - 1


class Int8Rows(Module):
    """Rows (n, dim) in 8 bits by position, as `saves.write.codes_of` makes them."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._dtype = rows.dtype
        codes, scales = codes_of(rows.float())
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales[:, :1].contiguous())
        self.register_buffer("offsets", scales[:, 1:].contiguous())

    @property
    def largest_error(self) -> float:
        """The largest difference between a value and its 8 bits."""
        return float(self.scales.max()) / 2 if len(self.scales) else 0.0

    def forward(self, place: Tensor) -> Tensor:
        place = place.to(torch.int64)
        scales, offsets = self.scales[place], self.offsets[place]
        return (offsets + scales * self.codes[place].float()).to(self._dtype)


class SavedRows(Module):
    """Maps any int64 ids (...) to rows (..., dim) float32.

    `keys` (n + 1,) are int64 and ascending, and `rows` are (n + 1, dim). The last ones are placeholders, so
    that every search has a result. An id without a row reads as its initial value, as in evaluation with
    servers. `padding_idx` reads as zeros. With `int8`, rows are kept as Int8Rows.
    """

    keys: Tensor
    rows: Tensor | Int8Rows

    def __init__(
        self,
        keys: Tensor,
        rows: Tensor,
        options: RowOptions,
        padding_idx: int | None,
        *,
        int8: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("keys", torch.cat([keys, torch.tensor([_LAST_KEY])]))
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        rows[self.keys == padding_idx] = 0.0  # a counted id may have a row, which nobody reads
        if int8:
            self.rows = Int8Rows(rows)
        else:
            self.register_buffer("rows", rows)
        self._options = options
        self._padding = padding_idx

    def forward(self, ids: Tensor, clicks: Tensor | None = None) -> Tensor:
        ids = ids.to(torch.int64).contiguous()
        place = torch.searchsorted(self.keys, ids)
        known = (self.keys[place] == ids) & (place < self.keys.shape[0] - 1)
        rows = self.rows(place) if isinstance(self.rows, Int8Rows) else functional.embedding(place, self.rows)
        initial = initial_rows(self._options, ids, rows.shape[-1]).to(rows.dtype)
        rows = torch.where(known[..., None], rows, initial)
        if self._padding is not None:
            rows = torch.where((ids == self._padding)[..., None], 0.0, rows)
        return rows


def initial_rows(options: RowOptions, ids: Tensor, dim: int) -> Tensor:
    """Return the initial values of these keys, (..., dim) float32, as a row of their type stores them. The
    type's largest value replaces infinity.
    """
    kept, largest = options.dtype.dtype, torch.finfo(options.dtype.dtype).max
    return _drawn(options.init, ids, dim).clamp(-largest, largest).to(kept).float()


def _drawn(init: Initializer, ids: Tensor, dim: int) -> Tensor:
    """Return (..., dim) float32, by the formula of `ps.kernels.rows.fill_values` in torch's operations."""
    start = _finalized(ids ^ _signed(_finalized_int((init.seed + _GOLDEN) % _WORD)))
    a, b = float(torch.tensor(init.a)), float(torch.tensor(init.b))  # as float32
    if init.kind is InitKind.UNIFORM:
        words = _finalized(start[..., None] + _steps(dim, ids.device))
        width = float(torch.tensor(b) - torch.tensor(a))
        return (_shifted(words, 40).to(torch.float32) * 2.0**-24) * width + a
    pairs = -(-dim // 2)
    words = _finalized(start[..., None] + _steps(2 * pairs, ids.device)).reshape(*ids.shape, pairs, 2)
    shares = _shifted(words, 11).to(torch.float64)
    radius = torch.sqrt(-2.0 * torch.log((shares[..., 0] + 1.0) * 2.0**-53))
    angle = 2.0 * math.pi * (shares[..., 1] * 2.0**-53)
    both = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1).flatten(-2)
    return both[..., :dim].to(torch.float32) * b + a


def _steps(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device) * _signed(_GOLDEN)


def _finalized(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 30)) * _signed(_FIRST)
    words = (words ^ _shifted(words, 27)) * _signed(_SECOND)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right logically, because torch's shift keeps the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _finalized_int(word: int) -> int:
    word = (word ^ (word >> 30)) * _FIRST % _WORD
    word = (word ^ (word >> 27)) * _SECOND % _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    """Read the bits of the value as an int64."""
    return word - _WORD if word >> 63 else word


_TEMPORARY = re.compile(r"tables-[0-9a-f]{8}")

StandIns = dict[Module, Module]


def stand_ins_of(
    tables: Sequence[SparseParameter],
    where: Where,
    save: ShowText,
    *,
    int8: bool,
) -> StandIns:
    """Return a module for each table's module, with its rows, all as of one moment.

    `save(folder)` makes the servers save their values into a temporary directory inside `where`. All rows
    must fit into this process's memory. With `int8`, rows are kept as Int8Rows, and the largest error is
    logged. Raises the errors of `save`, and LoadError.
    """
    if not tables:
        return {}
    folder = open_folder(where)
    for left in filter(_TEMPORARY.fullmatch, folder.names()):  # left by a trainer that was killed here
        folder.remove(left)
    name = f"tables-{secrets.token_hex(4)}"
    try:
        save(folder.path(name))
        values = read_values(folder.path(name)).sparse
    finally:
        folder.remove(name)
    found: StandIns = {each.module: _stand_in(each, values[each.name], int8=int8) for each in tables}
    if int8:
        errors = [
            each.largest_error
            for stand_in in found.values()
            for each in stand_in.modules()
            if isinstance(each, Int8Rows)
        ]
        glog(f"rows of {len(found)} tables in int8: the largest error of a value is {max(errors):.3g}")
    return found


class _PlainFeatures:
    """A KeyedJaggedTensor that operations of torch divide, instead of operations of FBGEMM."""

    def __init__(self, features: Any) -> None:
        self._features = features

    def inverse_indices_or_none(self) -> None:
        """Return None. See `KeyedJaggedTensor`."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JaggedTensor for each key."""
        keys, weights = self._features.keys(), self._features.weights_or_none()
        lengths = self._features.lengths().view(len(keys), -1)
        sizes = lengths.sum(1).tolist()
        ids = self._features.values().split(sizes)
        parts = [None] * len(keys) if weights is None else weights.split(sizes)
        ends = functional.pad(lengths.to(torch.int64).cumsum(1), (1, 0))
        make = defined(TENSORS, "JaggedTensor")
        return {key: make(*each) for key, *each in zip(keys, ids, parts, lengths, ends, strict=True)}


class _Named(Module):
    """Rows, with the name that torch.nn.Embedding gives to its ids."""

    def __init__(self, rows: Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.rows(input)
        return found


def collection_programs(model: Module, stand_ins: Mapping[Module, Module]) -> StandIns:
    """Return a module for each collection of TorchRec that computes the same with these tables, in operations
    of torch alone.
    """
    found: StandIns = {}
    for _, collection in find_collections(model):
        plain = copy.copy(collection)
        (name,) = plain._modules
        tables = torch.nn.ModuleDict()
        for config, module in tables_of(collection):
            table: Any = stand_ins.get(module, module)
            if type(table).forward is torch.nn.EmbeddingBag.forward:
                table = Bags(table)
            elif isinstance(table, SavedRows | Int8Rows | RowsElsewhere):
                table = _Named(table)
            tables[config.name] = table
        plain._modules = {name: tables}
        plain.__dict__["forward"] = partial(_forward, plain)
        found[collection] = plain
    return found


def _forward(collection: Module, features: object) -> object:
    return type(collection).forward(collection, _PlainFeatures(features))


def outside_of(tables: Sequence[SparseParameter]) -> StandIns:
    """Return a module for each table's module that reads its rows from a table outside of the program."""
    found: StandIns = {}
    for each in tables:
        module = each.module
        rows = RowsElsewhere(each.name, each.spec.size, module.weight.dtype, each.limit, each.zeros)
        found[module] = Bags(module, rows) if isinstance(module, torch.nn.EmbeddingBag) else rows
    return found


def _stand_in(each: SparseParameter, saved: SparseValues, *, int8: bool) -> Module:
    module, options = each.module, each.spec.rows
    total = row_limit(module)
    if total is None:
        dtype = module.weight.dtype
        rows = SavedRows(saved.keys, saved.values.to(dtype), options, module.padding_idx, int8=int8)
        return Bags(module, rows) if isinstance(module, torch.nn.EmbeddingBag) else rows
    table: Any = torch.nn.Embedding if isinstance(module, torch.nn.Embedding) else torch.nn.EmbeddingBag
    weight = _whole(total, saved, options, each.zeros).to(module.weight.dtype)
    if int8:
        quantized = Int8Rows(weight)
        return Bags(module, quantized) if isinstance(module, torch.nn.EmbeddingBag) else quantized
    own: Module = table(*weight.shape, _weight=weight, padding_idx=module.padding_idx, **_options(module))
    return own


def _options(module: EmbeddingModule) -> Document:
    if not isinstance(module, torch.nn.EmbeddingBag):
        return {}
    return {"mode": module.mode, "include_last_offset": module.include_last_offset}


def _whole(total: int, saved: SparseValues, options: RowOptions, zeros: int | None) -> Tensor:
    """Return (total, dim) values. Removed rows read as on the servers, and the id `zeros` reads as zeros."""
    weight = torch.empty(total, saved.values.shape[1])
    weight[saved.keys] = saved.values
    if len(saved.keys) < total:
        missing = torch.ones(total, dtype=torch.bool).index_fill_(0, saved.keys, False).nonzero()[:, 0]
        weight[missing] = initial_rows(options, missing, weight.shape[1])
    if zeros is not None:
        weight[zeros] = 0.0
    return weight
