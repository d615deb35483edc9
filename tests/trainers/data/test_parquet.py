"""Parquet files as a stream: columns as slots, row groups among trainers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.trainers.data.test_stream import Servers
from trainers.data.parquet import ParquetFiles
from trainers.data.slots import Slot
from trainers.data.stream import Stream
from trainers.errors import DataError, UsageError

SLOTS = [
    Slot("price", "float32"),
    Slot("id"),
    Slot("pair", "float32", 2),
    Slot("bag", length=None),
    Slot("weights", "float32", None),
    Slot("more", length=None),
    Slot("three", length=3),
]


def table(start: int, stop: int, **others: object) -> pa.Table:
    numbers = list(range(start, stop))
    columns = {
        "unused": pa.array([str(number) for number in numbers]),
        "id": pa.array(numbers, pa.int32()),
        "price": pa.array([number / 4 for number in numbers], pa.float64()),
        "pair": pa.array([[number, -number] for number in numbers], pa.list_(pa.float32(), 2)),
        "bag": pa.array([[7] * (number % 3) for number in numbers], pa.list_(pa.int64())),
        "w": pa.array([[number / 2] * (number % 2) for number in numbers], pa.large_list(pa.float32())),
        "more": pa.array([[number, 2**64 - 1] for number in numbers], pa.list_(pa.uint64())),
        "three": pa.array([[number] * 3 for number in numbers], pa.list_(pa.int64())),
    }
    return pa.table(columns | others)


def write(path: Path, start: int, stop: int, group: int) -> Path:
    pq.write_table(table(start, stop), path, row_group_size=group)
    return path


def made(where: Path | list[Path], servers: Servers, **settings: object) -> Stream:
    source = ParquetFiles(where, use_var=SLOTS, columns={"weights": "w"}, name="test")
    return Stream(source, lambda: servers, **{"batch_size": 4, "poll_s": 0.001, **settings})  # type: ignore[arg-type]


def ids(stream: Stream) -> list[list[int]]:
    return [batch.tensor("id")[:, 0].tolist() for batch in stream]


def test_columns_are_slots(tmp_path: Path) -> None:
    batches = list(made(write(tmp_path / "a.parquet", 0, 9, 100), Servers()))
    assert [len(batch) for batch in batches] == [4, 4, 1]
    batch = batches[1]
    assert batch.dense.dtype == torch.float32
    assert batch.ids.dtype == torch.int64
    assert batch.tensor("id")[:, 0].tolist() == [4, 5, 6, 7]
    assert batch.tensor("price")[:, 0].tolist() == [1, 1.25, 1.5, 1.75]
    assert batch.tensor("pair").tolist() == [[number, -number] for number in range(4, 8)]
    assert batch.tensor("three").tolist() == [[number] * 3 for number in range(4, 8)]
    assert batch.bag("bag").offsets.tolist() == [0, 1, 3, 3, 4]
    assert batch.bag("bag").values.tolist() == [7] * 4
    assert batch.bag("more").values.tolist() == [4, -1, 5, -1, 6, -1, 7, -1], "as in text: the same 64 bits"
    weights = batch.bag("weights")
    assert (weights.values.tolist(), weights.offsets.tolist()) == ([2.5, 3.5], [0, 0, 1, 1, 2])
    assert weights.values.dtype == torch.float32
    assert batch.bag("more").offsets.tolist() == [0, 2, 4, 6, 8]


def test_row_groups_are_divided_and_what_servers_have_is_not_read_again(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.parquet", 100 * number, 100 * number + 25, 6) for number in range(3)]
    for where in (tmp_path, paths):
        shares = [ids(made(where, Servers(rank=rank, trainers=2))) for rank in range(2)]
        found = sorted(number for share in shares for batch in share for number in batch)
        assert found == [100 * file + number for file in range(3) for number in range(25)]
        assert all(len(share) > 6 for share in shares)
    servers = Servers({"0.parquet": [0, 7, 20, 25]}, {"0.parquet": [0, 9, 20, 25]})
    assert ids(made(paths[0].parent, servers))[:4] == [[7, 8], [9, 10, 11], [12, 13, 14, 15], [16, 17]]
    assert servers.have == [{f"{number}.parquet": [0, 25] for number in range(3)}] * 2


def test_a_new_file_comes_by_its_name(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, 3, 10)
    hidden = write(tmp_path / ".b", 3, 5, 10)
    rounds = iter([False, False, True])

    def until() -> bool:
        last = next(rounds)
        if last:
            hidden.rename(tmp_path / "b")
        return last

    assert ids(made(tmp_path, Servers(), follow=True, until=until)) == [[0, 1, 2], [3, 4]]


def test_columns_that_are_not_slots(tmp_path: Path) -> None:
    path = tmp_path / "a"
    numbers = list(range(3))
    cases: list[tuple[dict[str, object], str]] = [
        (
            {"id": pa.array(["a"] * 3)},
            "column 'id' of {path} has the type string, but slot 'id' needs whole numbers",
        ),
        ({"id": pa.array([1.0] * 3)}, "has the type double, but slot 'id' needs whole numbers"),
        ({"bag": pa.array(numbers)}, "has the type int64, but slot 'bag' needs lists of whole numbers"),
        (
            {"price": pa.array([[1.0]] * 3)},
            "has the type list<element: double>, but slot 'price' needs numbers",
        ),
        (
            {"id": pa.array([1, None, 2])},
            "column 'id' of {path}, row group 0 has 1 nulls, but slot 'id' needs",
        ),
        ({"bag": pa.array([[1], [None], []], pa.list_(pa.int64()))}, "has lists with 1 nulls"),
        (
            {"three": pa.array([[1] * 3, [2], [3] * 3])},
            "has a list of 1 values, but slot 'three' has length 3",
        ),
        ({"price": pa.array([1.0, np.inf, 2.0])}, "column 'price' of {path}, row group 0 has numbers that"),
        ({"price": pa.array([1.0, np.nan, 2.0])}, "has numbers that are not finite"),
        ({"price": pa.array([1.0, -1e300, 2.0])}, "has numbers that are not finite as float32"),
        (
            {"w": pa.array([[1e39], [], []], pa.list_(pa.float64()))},
            "column 'w' of {path}, row group 0 has num",
        ),
    ]
    for others, message in cases:
        pq.write_table(table(0, 3, **others), path)
        with pytest.raises(DataError, match=re.escape(message.format(path=path))):
            ids(made(path, Servers()))
    whole = table(0, 3)
    pq.write_table(whole.append_column("id", whole["id"]), path)
    with pytest.raises(DataError, match=re.escape(f"{path} has several columns 'id'. Rename all but one")):
        ids(made(path, Servers()))
    pq.write_table(table(0, 3).drop(["more"]), path)
    with pytest.raises(DataError, match=re.escape(f"{path} has no column 'more'; it has unused, id, price")):
        ids(made(path, Servers()))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=re.escape(f"{path} is not a complete Parquet file:")):
        ids(made(path, Servers()))
    with pytest.raises(UsageError, match="columns contains 'x', which is not one of the slots"):
        ParquetFiles(path, use_var=SLOTS, columns={"x": "id"})


def test_a_file_that_was_replaced_while_it_was_known_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, 8, 4)
    source = ParquetFiles(tmp_path, use_var=SLOTS, columns={"weights": "w"}, name="test")
    splits = list(source.splits(source.shards(), 0, 1))
    write(tmp_path / "a.parquet", 100, 104, 4)
    source._open = None  # another file was read in between
    with pytest.raises(DataError, match=r"now has 4 rows, but had 8\. It was replaced"):
        list(source.read("a.parquet", splits[1].start, splits[1].stop, 4, grows=False))


def test_a_file_that_is_removed_while_it_is_looked_for(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, 0, 4, 4)
    source = ParquetFiles(tmp_path, use_var=SLOTS, columns={"weights": "w"}, name="test")
    shards = source.shards()
    (tmp_path / "a").unlink()
    assert [split.shard for split in source.splits(shards, 0, 1)] == ["b"]
    (tmp_path / "b").unlink()
    source._open = None
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / 'b'} cannot be read: [Errno 2] ")):
        list(source.read("b", 0, 4, 4, grows=False))
