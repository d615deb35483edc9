"""What a follower reads of a folder of saves: chains that go on, others, and what is damaged."""

from __future__ import annotations

import copy
import errno
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.forking import Forker
from tests.support.inference import not_served
from tests.trainers.inference_server.test_server import save as save_bundle
from tests.trainers.ps.saved.tables import LEAN, WORDS, MemoryTable, dense_spec, save
from trainers.export import save_program
from trainers.inference_server.files import Cache, CacheFile, map_file, no_room
from trainers.inference_server.follow import Followed, Follower
from trainers.inference_server.model import ModelVersion, ServedModel
from trainers.ps.saves.manifest import SaveMode
from trainers.ps.tables.shared import SharedRows
from trainers.ps.trainer.stand_ins import initial_rows
from trainers.serving.bundle import read_bundle
from trainers.serving.lookup import RowsElsewhere
from trainers.storage.errors import LoadError

pytestmark = pytest.mark.slow  # compiles kernels

KEYS = torch.arange(-50, 300)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    found = Cache(str(tmp_path / "cache"))
    yield found
    found.close()


class Source:
    """Tables of two servers, and saves of them."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.words = [MemoryTable(WORDS), MemoryTable(WORDS)]
        self.lean = [MemoryTable(LEAN), MemoryTable(LEAN)]
        self.dense = [MemoryTable(dense_spec(0, 60)), MemoryTable(dense_spec(60, 100))]
        self._last: str | None = None

    def train(self, seed: int) -> Source:
        for server, tables in enumerate(zip(self.words, self.lean, self.dense, strict=True)):
            tables[0].put(range(server + seed % 7, 200, 3), seed + server)
            tables[1].put(range(server - 20, 50, 2), seed + server + 5)
            tables[2].put([None], seed + server)
        return self

    def save(self, mode: SaveMode = SaveMode.ALL) -> None:
        servers = list(zip(self.words, self.lean, self.dense, strict=True))
        self._last = save(self.where, servers, mode, after=self._last).saves[-1].id

    def is_in(self, found: Followed) -> bool:
        """Whether this version has exactly the values that the tables have now."""
        for name, tables in (("words", self.words), ("lean", self.lean)):
            spec = tables[0].spec
            wanted = initial_rows(spec.rows, KEYS, spec.size).to(spec.rows.dtype.dtype)
            for table in tables:
                for key, (row, *_) in table.rows.items():
                    assert key is not None
                    wanted[key + 50] = row
            reader = SharedRows(found.tables[name], map_file)
            if not torch.equal(reader.rows(KEYS), wanted):
                return False
        dense = found.dense.tensors()
        return torch.equal(dense["fc.weight"], torch.cat([each.rows[None][0] for each in self.dense]))


def test_a_chain_is_continued_and_another_one_is_read_as_a_whole(tmp_path: Path, cache: Cache) -> None:
    source = Source(tmp_path / "saved")
    follower = Follower(str(source.where), cache)
    with pytest.raises(LoadError, match="no save"):
        follower.look(0)
    source.train(1).save()
    first = follower.look(0)
    assert first is not None
    assert source.is_in(first)
    assert follower.look(first.number) is None, "nothing new"
    source.train(2).save(SaveMode.DELTA)
    second = follower.look(first.number)
    assert second is not None
    assert source.is_in(second)
    assert not source.is_in(first), "whoever reads that one sees it as it was"
    assert second.tables["words"].records == first.tables["words"].records, "the same file"
    source.train(3).save(SaveMode.DELTA)
    source.train(4).save(SaveMode.DELTA)
    third = follower.look(second.number)
    assert third is not None
    assert source.is_in(third)
    source.train(5).save()
    fourth = follower.look(third.number)
    assert fourth is not None
    assert source.is_in(fourth)
    assert fourth.tables["words"].records != first.tables["words"].records
    assert follower.look(third.number) is None
    assert Path(third.tables["words"].records).exists(), "a worker may still read it"
    assert follower.look(fourth.number) is None
    left = set(cache.path.iterdir()) - {cache.path / "lock"}
    assert len(left) == 5, "two tables of two files, and dense values"


def test_a_version_without_all_rows_of_its_servers_is_not_served(tmp_path: Path, cache: Cache) -> None:
    """As after an increment that lacks a row, or the key of a removed one."""
    source = Source(tmp_path / "saved")
    follower = Follower(str(source.where), cache)
    table = source.words[0]
    source.words[1].alive = 0
    source.words = [table, source.words[1]]

    def save_with(more: int, mode: SaveMode = SaveMode.DELTA) -> None:
        table.alive = len(table.rows) + more
        source.save(mode)

    source.lean[0].put([1], 1)
    source.lean[1].put([2], 1)
    for dense in source.dense:
        dense.put([None], 1)
    table.put(range(100), 1)
    save_with(0, SaveMode.ALL)
    first = follower.look(0)
    table.put(range(90, 120), 2)
    save_with(0)
    assert first is not None
    second = follower.look(first.number)
    assert second is not None
    table.put(range(5), 3)
    save_with(1)
    with pytest.raises(LoadError, match=r"'words' of .* has 120 rows after save-\S+ but had 121 when"):
        follower.look(second.number)
    table.put(range(5), 4)
    save_with(0)
    third = follower.look(second.number)
    assert third is not None
    assert source.is_in(third)


def test_what_is_damaged_is_not_served_and_leaves_nothing_behind(tmp_path: Path, cache: Cache) -> None:
    source = Source(tmp_path / "saved")
    follower = Follower(str(source.where), cache)
    source.train(1).save()
    good = follower.look(0)
    assert good is not None
    source.train(2).save()
    shards = sorted(source.where.glob("save-*/*.safetensors"))
    content = shards[-1].read_bytes()
    shards[-1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    before = set(cache.path.iterdir())
    for _ in range(3):
        with pytest.raises(LoadError, match="damaged"):
            follower.look(good.number)
    assert set(cache.path.iterdir()) <= before
    assert not source.is_in(good)
    assert Path(good.tables["words"].records).exists()
    shards[-1].write_bytes(content)
    mended = follower.look(good.number)
    assert mended is not None
    assert source.is_in(mended)


def test_a_delta_that_was_read_half_is_not_continued_with_another(tmp_path: Path, cache: Cache) -> None:
    source = Source(tmp_path / "saved")
    follower = Follower(str(source.where), cache)
    source.train(1).save()
    good = follower.look(0)
    assert good is not None
    shutil.copytree(source.where, tmp_path / "kept")
    other = copy.deepcopy(source)
    source.train(12).save(SaveMode.DELTA)
    assert source._last is not None
    last = sorted((source.where / source._last).glob("*.safetensors"))[-1]
    content = last.read_bytes()
    last.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(LoadError, match="damaged"):
        follower.look(good.number)
    shutil.rmtree(source.where)
    (tmp_path / "kept").rename(source.where)
    other.train(3).save(SaveMode.DELTA)
    found = follower.look(good.number)
    assert found is not None
    assert other.is_in(found)


class SmallCache(Cache):
    """On a disk where a file may have so many bytes."""

    space = 0

    def reserve(self, file: CacheFile, stop: int) -> None:
        if stop > self.space:
            raise no_room(OSError(errno.ENOSPC, "full"), self.path, stop)
        super().reserve(file, stop)


@pytest.mark.parametrize("whole", [False, True])
def test_a_full_disk_keeps_no_file_of_what_did_not_fit(tmp_path: Path, whole: bool) -> None:
    source = Source(tmp_path / "saved")
    cache = SmallCache(str(tmp_path / "cache"))
    cache.space = 1 << 30
    follower = Follower(str(source.where), cache)
    source.train(1).save()
    good = follower.look(0)
    assert good is not None
    source.words[0].put(range(1000, 3000), 5)  # the files have to grow
    source.save(SaveMode.ALL if whole else SaveMode.DELTA)
    before = set(cache.path.iterdir())
    found, failures = None, 0
    while found is None:
        cache.space = 1 << (8 + failures)
        try:
            found = follower.look(good.number)
        except LoadError:
            failures += 1
            assert set(cache.path.iterdir()) == before, cache.space
    assert failures > 5, "it has failed at the first file, and at later ones"
    served_now = SharedRows(found.tables["words"], map_file)
    assert torch.equal(served_now.rows(torch.tensor([2999]))[0], source.words[0].rows[2999][0])
    cache.close()


class Rows(torch.nn.Module):
    """The rows of both tables."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(1, WORDS.size)
        self.lean = torch.nn.Embedding(1, LEAN.size)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"words": self.words(ids), "lean": self.lean(ids).float()}

    def elsewhere(self) -> dict[torch.nn.Module, torch.nn.Module]:
        """What stands for its embeddings in a program without rows."""
        return {
            module: RowsElsewhere(spec.name, spec.size, spec.rows.dtype.dtype, None, None)
            for module, spec in ((self.words, WORDS), (self.lean, LEAN))
        }


@pytest.mark.parametrize("lost", ["words", "lean"])
def test_a_version_that_cannot_be_mapped_as_a_whole_is_not_mapped_at_all(
    tmp_path: Path, cache: Cache, lost: str
) -> None:
    source = Source(tmp_path / "saved")
    follower = Follower(str(source.where), cache)
    source.train(1).save()
    first = follower.look(0)
    source.train(2).save()
    second = follower.look(0)
    assert first is not None
    assert second is not None
    net = Rows().eval()
    save_program(tmp_path / "bundle", net, torch.zeros(2, dtype=torch.long), None, net.elsewhere())
    bundle = read_bundle(tmp_path / "bundle", "inference", ("program", "weights"))
    files = {part: cache.write(f"{part}.pt2", [content.numpy()]) for part, content in bundle.contents.items()}
    version = ModelVersion(sequence=1, version="1", about=bundle.about, values=first, **files)
    model = ServedModel(version)
    _, (before,) = model.compute([(KEYS,)])
    records = Path(second.tables[lost].records)
    records.rename(tmp_path / "away")
    other = replace(version, sequence=2, version="2", values=second)
    with pytest.raises(FileNotFoundError):
        model.successor(other)
    served, (after,) = model.compute([(KEYS,)])
    assert isinstance(before, dict)
    assert isinstance(after, dict), after
    assert served is version
    assert all(torch.equal(before[name], after[name]) for name in before)
    (tmp_path / "away").rename(records)
    successor = model.successor(other)
    _, (kept,) = model.compute([(KEYS,)])
    assert isinstance(kept, dict), kept
    assert all(torch.equal(before[name], kept[name]) for name in before)
    served, (after,) = successor.compute([(KEYS,)])
    assert isinstance(after, dict)
    assert served is other
    assert not any(torch.equal(before[name], after[name]) for name in before)


def test_a_bundle_that_does_not_fit_what_it_should_follow(forker: Forker, tmp_path: Path) -> None:
    Source(tmp_path / "saved").train(1).save()
    save_bundle(tmp_path / "bundle")
    said = not_served(forker, tmp_path, "bundle", "--follow=saved")
    assert re.search(r"contains its own rows of this table.*rows=False", said)
