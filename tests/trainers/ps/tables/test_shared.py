"""Tables for serving: every version that a reader may be told of reads as it was written, while later ones
are written.
"""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from trainers.ps import Normal, Uniform
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.shared import SharedRows, SharedTable
from trainers.ps.tables.spec import RowOptions, RowType, TableKind, TableSpec
from trainers.ps.trainer.stand_ins import initial_rows
from trainers.storage.errors import LoadError


class Files:
    """In memory. `space`: bytes that can be reserved."""

    def __init__(self, space: int = 1 << 30) -> None:
        self.made: dict[str, NDArray[np.uint8]] = {}
        self.space = space

    def make(self, size: int) -> tuple[str, NDArray[np.uint8]]:
        name = f"file-{len(self.made)}"
        self.made[name] = np.zeros(size, np.uint8)
        return name, self.made[name]

    def reserve(self, name: str, stop: int) -> None:
        assert stop <= len(self.made[name])
        if stop > self.space:
            raise LoadError("no room")


def table_spec(dim: int = 3, dtype: RowType = RowType.FLOAT32) -> TableSpec:
    rows = RowOptions(init=Normal(0.0, 0.1, seed=3), dtype=dtype)
    return TableSpec(kind=TableKind.SPARSE, name="t", size=dim, rule=SGD(), rows=rows)


def rows_for(spec: TableSpec, keys: torch.Tensor, version: int) -> torch.Tensor:
    columns = torch.arange(spec.size)
    return ((keys % 97)[:, None] + 100 * version + columns).to(spec.rows.dtype.dtype)


@pytest.mark.slow  # compiles kernels
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(3, RowType.FLOAT32), (4, RowType.FLOAT32), (5, RowType.BFLOAT16)],
)
def test_readers_of_each_version_find_its_rows_through_growth_removal_and_reuse(
    dim: int, dtype: RowType
) -> None:
    spec, files, chance = table_spec(dim, dtype), Files(), random.Random(dim)
    table = SharedTable(spec, 0, files)
    rows: dict[int, torch.Tensor] = {}
    pool = [key * 0x9E3779B97F4A7C15 % (1 << 64) - (1 << 63) for key in range(9000)]
    places = {key: place for place, key in enumerate(pool)}
    readers: list[tuple[SharedRows, dict[int, torch.Tensor]]] = []
    for version in range(1, 40):
        gone = torch.tensor(chance.sample(pool, 200))
        table.remove(version, gone)
        for key in gone.tolist():
            rows.pop(key, None)
        keys = torch.tensor(chance.sample(pool, 150) + chance.sample(gone.tolist(), 30))
        table.put(version, keys, values := rows_for(spec, keys, version))
        rows |= zip(keys.tolist(), values, strict=True)
        if version % 10 == 0:  # many at once: the files have to grow
            keys = torch.tensor(chance.sample(pool, 4000))
            table.put(version, keys, values := rows_for(spec, keys, version))
            rows |= zip(keys.tolist(), values, strict=True)
        readers.append((SharedRows(table.version(version), files.made.__getitem__), dict(rows)))
        if len(readers) > 3:
            del readers[0]
            table.forget(version - 2)
        for reader, wanted in readers:
            ids = torch.tensor(pool)
            found = reader.rows(ids)
            expected = initial_rows(spec.rows, ids, dim).to(dtype.dtype)
            expected[[places[key] for key in wanted]] = torch.stack(list(wanted.values()))
            assert torch.equal(found, expected), (version, reader)
    last, _ = readers[-1]
    other = SharedRows(table.version(39), files.made.__getitem__, readers[0][0])
    assert torch.equal(other.rows(torch.tensor(pool)), last.rows(torch.tensor(pool)))
    assert last.rows(torch.empty(0, dtype=torch.int64)).shape == (0, dim)


@pytest.mark.slow
def test_rows_that_change_again_and_again_take_no_more_space() -> None:
    spec, files = table_spec(), Files()
    table = SharedTable(spec, 1000, files)
    keys = torch.arange(1000)
    for version in range(1, 50):
        table.put(version, keys, rows_for(spec, keys, version))
        table.forget(version - 1)
    assert len(files.made) == 2
    assert table.slots <= 3000


@pytest.mark.slow
def test_without_space_nothing_is_lost() -> None:
    spec, files = table_spec(), Files()
    table = SharedTable(spec, 10, files)
    keys = torch.arange(100)
    table.put(1, keys, rows_for(spec, keys, 1))
    reader = SharedRows(table.version(1), files.made.__getitem__)
    files.space = 0
    many = torch.arange(50_000)
    with pytest.raises(LoadError, match="no room"):
        table.put(2, many, rows_for(spec, many, 2))
    assert torch.equal(reader.rows(keys), rows_for(spec, keys, 1))
    files.space = 1 << 30
    table.put(2, many, rows_for(spec, many, 2))
    reader = SharedRows(table.version(2), files.made.__getitem__, reader)
    assert torch.equal(reader.rows(many), rows_for(spec, many, 2))


@pytest.mark.slow
def test_a_reader_sees_whole_rows_of_its_version_while_others_are_written() -> None:
    spec = TableSpec(kind=TableKind.SPARSE, name="t", size=8, rule=SGD(), rows=RowOptions(init=Uniform()))
    files, keys = Files(), torch.arange(2000)
    table = SharedTable(spec, len(keys), files)
    over = threading.Event()
    table.put(1, keys, torch.full((len(keys), 8), 1.0))
    current, read = table.version(1), 1
    wrong: list[str] = []

    def follow() -> None:
        nonlocal read
        reader = None
        while not over.is_set():
            version = current
            reader = SharedRows(version, files.made.__getitem__, reader)
            read = version.number
            found = reader.rows(keys)
            if not bool((found == version.number).all()):
                wrong.append(f"version {version.number} has {found.unique().tolist()}")

    thread = threading.Thread(target=follow)
    thread.start()
    for version in range(2, 400):
        table.put(version, keys, torch.full((len(keys), 8), float(version)))
        current = table.version(version)
        if version % 20 == 0:  # until then, rows need more space than the first files have
            table.forget(read)
    over.set()
    thread.join()
    assert not wrong
    assert read > 1
    assert len(files.made) > 2
