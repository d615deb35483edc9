"""Versions of real tables in a folder: what each has, what merging changes, and who may write there."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from trainers.ps.kernels.rows import UNPUBLISHED
from trainers.ps.saves import inspection, publication
from trainers.ps.saves.manifest import Save, SaveMode, new_id
from trainers.ps.saves.publication import (
    OthersError,
    Published,
    buffer_cuts,
    merge_part,
    published_buffers,
)
from trainers.ps.saves.read import LoadError, ModelValues, open_saves, read_values
from trainers.ps.saves.write import SaveSpec, SaveTask, close_cuts, cut_tables
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.rules import SGD, Adagrad
from trainers.ps.tables.sparse import SparseTable, make_table
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.storage.errors import SaveError
from trainers.storage.manifest import FileRecord

WORDS = TableSpec(kind=TableKind.SPARSE, name="words", size=4, rule=Adagrad())
USERS = TableSpec(kind=TableKind.SPARSE, name="users", size=2, rule=SGD())


class Servers:
    """Two, each with two sparse tables and half of a dense parameter; and what they publish."""

    def __init__(self, folder: Path, row_type: str = "") -> None:
        self.where, self.row_type = str(folder), row_type
        self.tables = [[make_table(spec) for spec in (WORDS, USERS, self.block(server))] for server in (0, 1)]
        self.published = Published.open(self.where)
        self.seed = 0
        self.buffers: dict[str, torch.Tensor] = {}

    def block(self, server: int) -> TableSpec:
        return TableSpec(kind=TableKind.DENSE, name=f"fc[{4 * server}:{4 * server + 4}]", size=4, rule=SGD())

    def change(self, *keys: int, removed: tuple[int, ...] = ()) -> None:
        """Other random values for these keys, even ones on server 0, and for the dense parameter."""
        for server, tables in enumerate(self.tables):
            for table in tables:
                self.seed += 1
                random = torch.Generator().manual_seed(self.seed)
                if isinstance(table, DenseTable):
                    table.assign(None, torch.randn(4, generator=random))
                    continue
                mine = torch.tensor([key for key in keys if key % 2 == server], dtype=torch.int64)
                table.assign(mine, torch.randn(len(mine), table.spec.size, generator=random))
                gone = [key for key in removed if key % 2 == server]
                table.remove(torch.tensor(gone, dtype=torch.int64))

    def publish(self, mode: SaveMode = SaveMode.INCREMENT) -> None:
        save = Save(new_id(3), mode, 3, (), time=time.time())
        parts = []
        for server, tables in enumerate(self.tables):
            cuts = cut_tables(tables, mode, of=UNPUBLISHED)
            cuts += buffer_cuts(self.buffers if not server else {})
            spec = SaveSpec(
                id=save.id,
                mode=mode,
                server=server,
                servers=2,
                shard_bytes=4000,
                row_type=self.row_type,
            )
            parts.append(SaveTask(self.where, spec, cuts).result(30))
            close_cuts(cuts, saved=True)
        self.published = self.published.follow(save, parts)

    def merge(self) -> tuple[Save, list[FileRecord], list[str]]:
        """The parts of a base, which is not committed."""
        merged, id = self.published.ids, self.published.merged_id
        specs = [SaveSpec(id=id, mode=SaveMode.VALUES, server=s, servers=2) for s in (0, 1)]
        parts = [merge_part(self.where, spec, merged) for spec in specs]
        return Save(id, SaveMode.VALUES, 0, ()), parts, merged

    def expect(self) -> ModelValues:
        """That the folder has what the tables have, as far as its type of rows can."""
        found = read_values(self.where)
        for number, spec in enumerate((WORDS, USERS)):
            rows = found.sparse[spec.name]
            mine = [tables[number] for tables in self.tables]
            assert len(rows.keys) == sum(map(len, mine))
            tables = [mine[key % 2] for key in rows.keys.tolist()]
            wanted = torch.cat(
                [table.pull(key[None], insert=False) for table, key in zip(tables, rows.keys, strict=True)]
            )
            if self.row_type == "int8":
                errors = {
                    table.error
                    for save in open_saves(self.where).saves
                    for part in save.parts
                    for table in part.tables
                    if table.spec.name == spec.name
                }
                assert 0 < float((rows.values - wanted).abs().max()) <= max(errors) < 0.02
            else:
                kind = torch.bfloat16 if self.row_type else torch.float32
                assert torch.equal(rows.values, wanted.to(kind).float())
        blocks = [tables[2].cut().rows.values for tables in self.tables if isinstance(tables[2], DenseTable)]
        assert torch.equal(found.dense["fc"], torch.cat(blocks))
        return found


@pytest.mark.parametrize("row_type", ["", "bfloat16", "int8"])
def test_a_merged_base_and_later_increments_are_the_chain_that_they_replace(
    tmp_path: Path, row_type: str
) -> None:
    servers = Servers(tmp_path, row_type)
    servers.change(*range(100))
    servers.publish(SaveMode.VALUES)
    servers.expect()
    servers.change(*range(20, 30), 200, removed=(5, 6, 7, 25))
    servers.publish()
    servers.expect()
    servers.change(7, 21, 300, removed=(200, 50, 99))
    servers.buffers = {"norm.mean": torch.tensor([0.5, 1.5])}
    servers.publish()
    before = servers.expect()
    base, parts, merged = servers.merge()
    servers.change(8, 50, removed=(9, 7))
    servers.publish()  # while the base is merged
    chain = servers.expect()
    servers.published = servers.published.merge(base, parts, merged)

    opened = open_saves(tmp_path)
    assert [(save.number, save.mode) for save in opened.saves] == [
        (3, SaveMode.VALUES), (4, SaveMode.INCREMENT)
    ]  # fmt: skip
    alone = read_values(type(opened)(opened.folder, opened.saves[:1], opened.stream))
    for found, wanted in ((alone, before), (servers.expect(), chain)):
        for name, rows in wanted.sparse.items():
            assert torch.equal(found.sparse[name].keys, rows.keys)
            assert torch.equal(found.sparse[name].values, rows.values)
    assert torch.equal(alone.dense["norm.mean"], servers.buffers["norm.mean"])
    assert published_buffers(servers.where).keys() == {"norm.mean"}
    counts = [
        sum(t.rows for p in opened.saves[0].parts for t in p.tables if t.spec.name == n) for n in ("words",)
    ]
    assert counts == [len(before.sparse["words"].keys)]


def test_an_increment_has_only_what_changed_and_former_files_stay_for_one_base(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    servers.change(*range(1000))
    servers.publish(SaveMode.VALUES)
    first = servers.published.ids
    assert not servers.published.long
    servers.change(1, 2)
    servers.publish()
    base, increment = servers.published.manifest.saves if servers.published.manifest else ()
    assert increment.size < base.size / 4
    opened = open_saves(tmp_path)
    rows = [
        [table.rows for table in part.tables if table.spec.name == "words"] for part in opened.saves[1].parts
    ]
    assert rows == [[1], [1]]

    servers.published = servers.published.merge(*servers.merge())
    found = inspection.listed(servers.where)
    assert (found["version"], found["mode"], found["deltas"]) == (2, "values", 0)
    assert 0 <= time.time() - found["time"] < 60
    read_values(opened)  # a reader that has read the former manifest
    servers.publish()
    assert not servers.published.long
    servers.publish()
    assert not set(first) & set(servers.published.ids)
    servers.published = servers.published.merge(*servers.merge())
    with pytest.raises(LoadError):
        read_values(opened)
    servers.expect()


def test_increments_do_not_grow_beyond_their_base_or_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "MOST_INCREMENTS", 4)
    servers = Servers(tmp_path)
    servers.change(*range(40))
    servers.publish(SaveMode.VALUES)
    servers.change(*range(40))
    servers.publish()
    assert not servers.published.long, "merging one increment is no gain"
    servers.publish()
    assert servers.published.long
    servers = Servers(tmp_path / "many")
    servers.change(*range(2000))
    servers.publish(SaveMode.VALUES)
    for _ in range(4):
        assert not servers.published.long
        servers.publish()
    assert servers.published.long


def test_of_two_jobs_in_one_folder_the_second_to_publish_is_told(tmp_path: Path) -> None:
    mine = Servers(tmp_path)
    mine.change(1)
    mine.publish(SaveMode.VALUES)
    theirs = Servers(tmp_path)
    theirs.change(2)
    theirs.publish(SaveMode.VALUES)
    mine.change(3)
    with pytest.raises(OthersError, match="this job stopped publishing"):
        mine.publish()
    theirs.expect()
    assert theirs.published.number == 2


def test_versions_with_other_rows_are_not_merged(tmp_path: Path) -> None:
    servers = Servers(tmp_path)
    servers.change(1, 2)
    servers.publish(SaveMode.VALUES)
    servers.row_type = "float16"
    servers.change(1)
    servers.publish()
    with pytest.raises(SaveError, match="other tables or row types"):
        servers.merge()
    assert not list(tmp_path.glob("*-base/server-*")), "nothing of it stays"


def test_rows_that_are_not_finite_or_equal_survive_eight_bits(tmp_path: Path) -> None:
    servers = Servers(tmp_path, "int8")
    table = servers.tables[0][0]
    assert isinstance(table, SparseTable)
    values = torch.tensor([[1.0, 2.0, torch.nan, 4.0], [3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, -1e-40]])
    table.assign(torch.tensor([2, 4, 6]), values)
    servers.change()
    servers.publish(SaveMode.VALUES)
    found = read_values(tmp_path).sparse["words"].values
    assert found[0].isnan().all()
    assert torch.equal(found[1], values[1])
    assert float((found[2] - values[2]).abs().max()) <= 1e-40


def test_values_too_large_for_16_bits_are_the_largest_and_the_error_says_so(tmp_path: Path) -> None:
    servers = Servers(tmp_path, "float16")
    table = servers.tables[0][0]
    assert isinstance(table, SparseTable)
    table.assign(torch.tensor([2]), torch.tensor([[70_000.0, -70_000.0, torch.inf, torch.nan]]))
    servers.change()
    servers.publish(SaveMode.VALUES)
    found = read_values(tmp_path).sparse["words"].values[0]
    assert found[:3].tolist() == [65504.0, -65504.0, torch.inf]
    assert found[3].isnan()
    errors = [table.error for table in open_saves(tmp_path).saves[0].parts[0].tables]
    assert max(errors) == 70_000 - 65504
