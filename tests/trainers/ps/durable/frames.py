"""A small server's state and its requests, each a pure function of its number."""

from __future__ import annotations

import struct

import torch
import xxhash

from trainers.ps.durable.durable import DurableFolder
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.rules import Adagrad, Adam
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import TableKind, TableSpec

SPECS = [
    TableSpec(kind=TableKind.SPARSE, name="words", size=4, rule=Adagrad()),
    TableSpec(kind=TableKind.DENSE, name="fc.bias[0:8]", size=8, rule=Adam()),
]


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
        self.sparse, self.dense = SparseTable(SPECS[0]), DenseTable(SPECS[1])
        self.count = 0

    @property
    def tables(self) -> list[SparseTable | DenseTable]:
        return [self.sparse, self.dense]

    @property
    def blob(self) -> bytes:
        return struct.pack("<Q", self.count)

    def apply(self, frames: list[bytes] | list[memoryview]) -> None:
        """Raises AssertionError for any push but the next."""
        number, *tensors = (bytearray(frame) for frame in frames)
        assert struct.unpack("<Q", number)[0] == self.count
        keys = torch.frombuffer(tensors[0], dtype=torch.int64)
        self.sparse.apply(keys, torch.frombuffer(tensors[1], dtype=torch.float32).view(-1, 4), 0.1)
        self.dense.apply(None, torch.frombuffer(tensors[2], dtype=torch.float32), 0.1)
        self.count += 1

    def up_to(self, count: int) -> State:
        while self.count < count:
            self.apply(request(self.count))
        return self

    def digest(self) -> str:
        """Of every value and state, to the bit, whatever the order of rows."""
        cut = self.sparse.cut()
        rows = cut.read(0, cut.rows)
        cut.close(saved=False)
        order = rows.keys.argsort()
        dense = self.dense.cut().rows
        sparse = [rows.keys, rows.values, *rows.state]
        digest = xxhash.xxh3_64(struct.pack("<3Q", self.count, self.sparse.step, self.dense.step))
        for tensor in [*(each[order] for each in sparse), dense.values, *dense.state]:
            digest.update(tensor.contiguous().numpy())
        return digest.hexdigest()


def recovered(durable: DurableFolder) -> State:
    """The state that a folder holds; afterwards the folder can be appended to."""
    state = State()
    if durable.snapshot is not None:
        durable.snapshot.load(state.tables)
        (state.count,) = struct.unpack("<Q", durable.snapshot.blob)
    for frames in durable.records():
        state.apply(frames)
    return state
