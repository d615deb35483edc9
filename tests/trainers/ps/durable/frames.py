"""A small server's state and its requests, each a pure function of its number."""

from __future__ import annotations

import struct

import torch
import xxhash

from trainers.ps.durable.durable import DurableFolder
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.rules import Adagrad, Adam
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import Bound, RowOptions, TableKind, TableSpec

SPECS = [
    TableSpec(kind=TableKind.SPARSE, name="words", size=4, rule=Adagrad()),
    TableSpec(kind=TableKind.DENSE, name="fc.bias[0:8]", size=8, rule=Adam()),
    TableSpec(
        kind=TableKind.SPARSE, name="few", size=4, rule=Adagrad(), rows=RowOptions(bound=Bound(rows=640))
    ),
]
NEW = 100
"""Rows of the bounded table that each push has for the first and only time."""


def request(number: int) -> list[bytes]:
    """The frames of push `number`: its number, keys, and gradients for both tables."""
    random = torch.Generator().manual_seed(number)
    count = 1 + number % 5
    keys = torch.randint(0, 200, (count,), generator=random).unique()
    rows = torch.randn(len(keys), 4, generator=random)
    block = torch.randn(8, generator=random)
    return [struct.pack("<Q", number), *(tensor.numpy().tobytes() for tensor in (keys, rows, block))]


class State:
    """Tables and a count of pushes."""

    def __init__(self) -> None:
        self.sparse, self.dense, self.bounded = (
            SparseTable(SPECS[0]), DenseTable(SPECS[1]), SparseTable(SPECS[2])
        )  # fmt: skip
        self.count = 0

    @property
    def tables(self) -> list[SparseTable | DenseTable]:
        return [self.sparse, self.dense, self.bounded]

    @property
    def blob(self) -> bytes:
        return struct.pack("<Q", self.count)

    def apply(self, frames: list[bytes] | list[memoryview]) -> None:
        """Raises AssertionError for any push but the next."""
        number, *tensors = (bytearray(frame) for frame in frames)
        assert struct.unpack("<Q", number)[0] == self.count
        keys = torch.frombuffer(tensors[0], dtype=torch.int64)
        self.sparse.apply(keys, torch.frombuffer(tensors[1], dtype=torch.float32).view(-1, 4), 0.1)
        self.dense.apply(torch.frombuffer(tensors[2], dtype=torch.float32), 0.1)
        often = torch.cat([keys, torch.arange(NEW * self.count, NEW * (self.count + 1)) + 1000])
        self.bounded.apply(often, torch.ones(len(often), 4), 0.1)
        self.count += 1

    def up_to(self, count: int) -> State:
        while self.count < count:
            self.apply(request(self.count))
        return self

    def digest(self) -> str:
        """Of every value and state, to the bit, whatever the order of rows."""
        dense, (clock, _) = self.dense.cut().rows, self.bounded.clocks()
        digest = xxhash.xxh3_64(struct.pack("<3Q", self.count, self.sparse.step, self.dense.step))
        digest.update(struct.pack(f"<{len(clock)}d", *clock))
        for tensor in [*_sorted(self.sparse), *_sorted(self.bounded), dense.values, *dense.state]:
            digest.update(tensor.contiguous().numpy())
        return digest.hexdigest()


def _sorted(table: SparseTable) -> list[torch.Tensor]:
    with table.cut() as cut:
        rows = cut.read(0, cut.rows)
    statistics = [] if rows.statistics is None else [rows.statistics]
    order = rows.keys.argsort()
    return [each[order] for each in (rows.keys, rows.values, *rows.state, *statistics)]


def recovered(durable: DurableFolder) -> State:
    """The state that a folder holds; afterwards the folder can be appended to."""
    state = State()
    if durable.snapshot is not None:
        durable.snapshot.load(state.tables)
        (state.count,) = struct.unpack("<Q", durable.snapshot.blob)
    for frames in durable.records():
        state.apply(frames)
    return state
