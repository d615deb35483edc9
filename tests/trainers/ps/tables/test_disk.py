"""A bounded table with a disk has every row of one without a bound, wherever they are at the moment."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.disks import no_file_longer_than
from trainers.errors import UsageError
from trainers.ps.kernels.eviction import FLOORS, TOTAL, find_evicted, pass_until
from trainers.ps.kernels.rows import Fresh
from trainers.ps.tables import disk
from trainers.ps.tables.budget import Budgets
from trainers.ps.tables.disk import TieredCut, checked_folder
from trainers.ps.tables.rules import Adagrad, Adam, AnyRule, RowWiseAdagrad
from trainers.ps.tables.run import NOT_IN, Lines
from trainers.ps.tables.sparse import SparseTable, make_tables
from trainers.ps.tables.spec import (
    Bound,
    EvictionPolicy,
    FullError,
    Initializer,
    InitKind,
    RowOptions,
    RowType,
    TableKind,
    TableSpec,
)
from trainers.ps.tables.storage import Cut, SparseRows, Storage

pytestmark = pytest.mark.slow

ROWS, DIM, IDS = 300, 3, 3000
INIT = Initializer(InitKind.UNIFORM, -1, 1, seed=3)


def spec_of(rule: AnyRule, dtype: RowType, bound: Bound | None, name: str = "ids") -> TableSpec:
    rows = RowOptions(init=INIT, dtype=dtype, bound=bound)
    return TableSpec(kind=TableKind.SPARSE, name=name, size=DIM, rule=rule, rows=rows)


class Pair:
    """A table without a bound, and one with a bound and a disk. What is done is done to both."""

    def __init__(
        self,
        folder: Path,
        rule: AnyRule,
        dtype: RowType,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        rows: int = ROWS,
    ) -> None:
        self.whole = SparseTable(spec_of(rule, dtype, None))
        self.tiered = SparseTable(spec_of(rule, dtype, Bound(rows=rows, policy=policy)), Budgets(folder))
        self.random = np.random.default_rng(1)

    def keys(self, count: int) -> torch.Tensor:
        popular = self.random.integers(0, ROWS // 2, count // 2)
        return torch.from_numpy(np.unique([*popular, *self.random.integers(0, IDS, count - count // 2)]))

    def step(self, count: int = 40) -> None:
        self.push(self.keys(count))
        some = self.keys(count)
        assert torch.equal(self.tiered.pull(some), self.whole.pull(some, insert=False))

    def push(self, keys: torch.Tensor) -> None:
        grad = torch.from_numpy(self.random.normal(size=(len(keys), DIM)).astype(np.float32))
        for table in (self.whole, self.tiered):
            table.apply(keys, grad, 0.1)

    def waiting(self) -> np.ndarray:
        """Keys of rows that were evicted and are in memory still."""
        storage = self.tiered._storage
        keys, stamps = storage.keys(0, len(storage)), storage.records(0, len(storage))[:, -1].copy()
        evicted = np.zeros(len(keys), np.bool_)
        find_evicted(keys, stamps, storage.uses.clock[FLOORS:], evicted)
        return keys[evicted]

    def same(self) -> None:
        assert content(self.tiered) == content(self.whole)
        assert len(self.tiered) == len(self.whole)

    def memory_is_bounded(self) -> None:
        assert len(self.tiered._storage) <= ROWS + 200 < len(self.tiered)


def content(table: SparseTable) -> dict[int, list[float]]:
    with table.cut() as cut:
        return as_dict(read(cut))


def read(cut: Cut | TieredCut, step: int = 70) -> list[SparseRows]:
    return [cut.read(start, min(start + step, cut.rows)) for start in range(0, cut.rows, step)]


def as_dict(chunks: list[SparseRows]) -> dict[int, list[float]]:
    """Values and state by key. Stamps say only how long a row may stay in memory."""
    found: dict[int, list[float]] = {}
    for chunk in chunks:
        columns = torch.cat([chunk.values.float(), *chunk.state], 1)
        assert not found.keys() & set(chunk.keys.tolist())
        found |= dict(zip(chunk.keys.tolist(), columns.tolist(), strict=True))
    return found


KINDS = [
    (Adagrad(), RowType.FLOAT32, EvictionPolicy.LRU),
    (Adam(amsgrad=1.0), RowType.FLOAT32, EvictionPolicy.LFU),
    (RowWiseAdagrad(), RowType.BFLOAT16, EvictionPolicy.LRU),
]


@pytest.mark.parametrize(("rule", "dtype", "policy"), KINDS)
def test_every_row_is_as_without_a_bound(
    tmp_path: Path, rule: AnyRule, dtype: RowType, policy: EvictionPolicy
) -> None:
    pair = Pair(tmp_path, rule, dtype, policy)
    for step in range(300):
        pair.step()
        if step % 60 == 59:
            pair.same()
            pair.memory_is_bounded()
    keys = torch.arange(0, IDS, 7)
    for table in (pair.whole, pair.tiered):
        table.revise(keys, torch.ones(len(keys), DIM))
        table.remove(keys[::2])
        table.assign(keys[::4], torch.zeros(len(keys[::4]), DIM))
    pair.same()
    assert not list(tmp_path.iterdir()), "a file without a name is gone with its process"


def test_a_save_is_of_one_moment_while_rows_come_and_go(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Adagrad(), RowType.FLOAT32)
    for _ in range(100):
        pair.step()
    cut, wanted = pair.tiered.cut(), content(pair.whole)
    chunks = []
    for start in range(0, cut.rows, 50):
        chunks.append(cut.read(start, min(start + 50, cut.rows)))
        pair.step()
    cut.close()
    assert as_dict(chunks) == wanted
    pair.same()


@pytest.mark.parametrize("dtype", [RowType.FLOAT32, RowType.BFLOAT16])
def test_deltas_have_all_that_changed(tmp_path: Path, dtype: RowType) -> None:
    pair = Pair(tmp_path, Adagrad(), dtype)
    copy = SparseTable(pair.tiered.spec, Budgets(tmp_path))
    for number in range(4):
        for _ in range(40):
            pair.step()
        with pair.tiered.cut(changed_only=number > 0, mark=True) as cut:
            chunks = read(cut)
        if number:
            assert sum(len(chunk.keys) for chunk in chunks) < len(pair.tiered)
        for chunk in chunks:
            copy.load(chunk)
        assert content(copy) == content(pair.whole)
        assert len(copy._storage) <= 2 * ROWS
    with pair.tiered.cut(changed_only=True, mark=True) as cut:
        assert not as_dict(read(cut)), "nothing has changed"


@pytest.mark.parametrize("ring", [9000, 1 << 32])
def test_abandoned_records_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ring: int) -> None:
    """Also where the file begins again at its beginning; but none while there is a cut, which needs them."""
    monkeypatch.setattr(disk, "_SPARE", 100)
    monkeypatch.setattr(disk, "_LONGEST", 4 * (2 + 2 * DIM + 1) * ring)
    pair = Pair(tmp_path, Adagrad(), RowType.FLOAT32)
    rows = pair.tiered._disk
    assert rows is not None
    for _ in range(500):
        pair.step(80)
    assert rows._tail > 2 * 9000, "a ring of 9000 has begun again"
    assert os.fstat(rows._file.fileno()).st_blocks * 512 < 3 * rows.away * rows._size + 100_000
    with pair.tiered.cut() as cut:
        wanted = content(pair.whole)
        for _ in range(60):
            pair.step(80)
        assert as_dict(read(cut)) == wanted
    pair.same()


def test_rows_that_are_to_leave_are_still_there(tmp_path: Path) -> None:
    """More are evicted at once than are written to the disk with one request."""
    pair = Pair(tmp_path, Adagrad(), RowType.FLOAT32, rows=10_000)
    storage = pair.tiered._storage
    for start in range(0, 20_000, 500):
        pair.push(torch.arange(start, start + 500))
    new = 20_000
    while not len(waiting := pair.waiting()):
        pair.push(torch.arange(new, new + 20))
        new += 20
        assert new < 40_000
    pair.same()
    pair.push(torch.from_numpy(waiting[:50]))
    assert pair.tiered.budget is not None
    counted = storage.uses.clock[TOTAL]
    assert counted == storage.uses.cells.sum() == len(storage) - len(pair.waiting())
    pair.same()


def test_a_table_that_recovers_has_no_more_in_memory(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Adagrad(), RowType.FLOAT32)
    for _ in range(150):
        pair.step()
    back = SparseTable(pair.tiered.spec, Budgets(tmp_path))
    rows, _ = pair.tiered.clocks()
    back.restore_clocks([rows], [])
    with pair.tiered.cut() as cut:
        back.expect(cut.rows)
        for start in range(0, cut.rows, 600):
            back.load(cut.read(start, min(start + 600, cut.rows)))
            assert len(back._storage) <= ROWS + 100
    pair.tiered = back
    pair.same()
    for _ in range(50):
        pair.step()
    pair.same()
    pair.memory_is_bounded()


def test_reading_brings_rows_back_and_moves_others(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Adagrad(), RowType.FLOAT32)
    for _ in range(150):
        pair.step()
    for start in range(0, IDS, 60):
        keys = torch.arange(start, start + 60)
        assert torch.equal(pair.tiered.pull(keys, insert=False), pair.whole.pull(keys, insert=False))
    pair.memory_is_bounded()
    pair.same()


def test_room_made_ahead_makes_no_row_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where address space is limited, the rows of a push are made before it is recorded."""
    pair = Pair(tmp_path, Adagrad(), RowType.FLOAT32)
    for _ in range(100):
        pair.step()
    monkeypatch.setattr(Storage, "has_room", lambda storage, rows: False)
    for _ in range(50):
        keys = pair.keys(40)
        pair.tiered.make_room([keys], filtered=True)
        pair.push(keys)
    pair.same()


def test_tables_of_a_run_share_a_bound(tmp_path: Path) -> None:
    shared = Bound(rows=ROWS, shared=True)
    specs = {number: spec_of(Adagrad(), RowType.FLOAT32, shared, f"t{number}") for number in range(3)}
    whole = {number: spec_of(Adagrad(), RowType.FLOAT32, None, f"t{number}") for number in range(3)}
    sides = [make_tables(specs, tmp_path), make_tables(whole)]
    runs = [Lines(tables).run(0, 3) for tables in sides]  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    for step in range(300):
        keys = [np.unique(random.integers(0, 1000, 30)) for _ in range(3)]
        spans = np.array([len(each) for each in keys])
        if step % 3 == 0:
            keys[1], spans[1] = keys[1][:0], NOT_IN
        together = torch.from_numpy(np.concatenate(keys))
        grad = torch.from_numpy(random.normal(size=(len(together), DIM)).astype(np.float32))
        for run in runs:
            run.make_room([(spans, together)])
            run.apply(spans, together, grad, 0.1)
        some = torch.from_numpy(random.integers(0, 1000, 60))
        one, other = (run.pull(np.array([20, 20, 20]), some, insert=False) for run in runs)
        assert torch.equal(one, other)
    for one_table, other_table in zip(sides[0].values(), sides[1].values(), strict=True):
        assert content(one_table) == content(other_table)  # type: ignore[arg-type]
    assert sum(len(table._storage) for table in sides[0].values()) <= ROWS + 200  # type: ignore[union-attr]


def test_a_full_disk_keeps_rows_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair(tmp_path, Adagrad(), RowType.FLOAT32)
    for _ in range(40):  # kernels are compiled, and cached in files
        pair.step()
    with no_file_longer_than(8 << 10):
        for _ in range(200):
            pair.step()
        pair.same()
        assert len(pair.tiered._storage) > ROWS + 200
    assert capsys.readouterr().err.count("Rows cannot move to disk_dir") == 1


def test_an_update_that_cannot_read_its_rows_is_no_step(tmp_path: Path) -> None:
    pair = Pair(tmp_path, Adagrad(), RowType.FLOAT32)
    for start in range(0, IDS, 50):
        pair.push(torch.arange(start, start + 50))
    table, step = pair.tiered, pair.tiered.step
    assert table.on_disk
    assert isinstance(table.bounded, disk.RowsOnDisk)
    keys = torch.arange(50)
    run = Lines({0: table}).run(0, 1)
    os.ftruncate(table.bounded._file.fileno(), 0)
    with pytest.raises(OSError, match="can no longer be read"):
        table.apply(keys, torch.ones(50, DIM), 0.1)
    with pytest.raises(OSError, match="can no longer be read"):
        run.apply(np.array([50]), keys, torch.ones(50, DIM), 0.1)
    assert table.step == step


@pytest.mark.parametrize(("rule", "dtype", "policy"), KINDS)
def test_rows_are_the_same_after_the_clock_of_their_budget_restarts(
    tmp_path: Path, rule: AnyRule, dtype: RowType, policy: EvictionPolicy
) -> None:
    pair = Pair(tmp_path, rule, dtype, policy)
    for step in range(200):
        pair.step()
        budget = pair.tiered.budget
        assert budget is not None
        if step % 40 == 39:
            passed = budget.passed
            pass_until(budget.uses, 65_536.0)
            budget.settle()
            assert budget.passed > passed
            pair.same()
        in_memory = len(pair.tiered._storage) - len(pair.waiting())
        assert budget.uses.clock[TOTAL] == in_memory
    pair.memory_is_bounded()


def test_memory_without_room_for_another_place_keeps_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path, Adagrad(), RowType.FLOAT32)
    for _ in range(50):
        pair.step()
    insert, calls = Storage.insert, [0]

    def sometimes(storage: Storage, keys: np.ndarray, fresh: Fresh) -> np.ndarray:
        calls[0] += 1
        if storage.stride == 3 and calls[0] % 2:
            insert(storage, keys[: len(keys) // 2], fresh)
            raise FullError("no memory")
        return insert(storage, keys, fresh)

    monkeypatch.setattr(Storage, "insert", sometimes)
    for _ in range(100):
        pair.step()
    assert calls[0] > 100
    pair.same()


@pytest.mark.parametrize("path", ["/does/not/exist", "/dev/null", "/proc"])
def test_a_folder_that_is_none_is_named(path: str) -> None:
    with pytest.raises(UsageError, match=f"disk_dir is '{path}'"):
        checked_folder(path)
