"""Saves of the real tables, while they are trained."""

import dataclasses

import pytest
import torch

from tests.support.owners import owners
from tests.support.shrinking import shrink
from trainers.ps.saves.manifest import (
    Manifest,
    Piece,
    PieceKind,
    SavedPart,
    SavedTable,
    SaveMode,
    Shard,
    commit_save,
    current_manifest,
    new_id,
)
from trainers.ps.saves.read import RowOwner, ShardToRead, chunk_of, load_tables, read_values
from trainers.ps.saves.write import SaveSpec, SaveTask, cut_tables
from trainers.ps.tables.dense import DenseTable
from trainers.ps.tables.rules import Adagrad, Adam, SparseAdam
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import Bound, Entry, EntryKind, RowOptions, ShrinkPolicy, TableKind, TableSpec
from trainers.storage.folder import open_folder
from trainers.storage.manifest import FileRecord

pytestmark = pytest.mark.slow

SEEN = TableSpec(
    kind=TableKind.SPARSE,
    name="seen",
    size=8,
    rule=Adagrad(),
    rows=RowOptions(entry=Entry(EntryKind.SHOW_CLICK)),
)
RARE = TableSpec(
    kind=TableKind.SPARSE,
    name="rare",
    size=4,
    rule=SparseAdam(),
    rows=RowOptions(entry=Entry(EntryKind.COUNT, 3)),
)
BIAS = TableSpec(kind=TableKind.DENSE, name="bias", size=10, rule=Adam())


def tables() -> tuple[SparseTable, SparseTable, DenseTable]:
    return SparseTable(SEEN), SparseTable(RARE), DenseTable(BIAS)


def train(seen: SparseTable, rare: SparseTable, bias: DenseTable, seed: int, keys: int = 3000) -> None:
    random = torch.Generator().manual_seed(seed)
    some = torch.randint(-keys, keys, (500,), generator=random).unique()
    seen.apply(some, torch.randn(len(some), 8, generator=random), 0.1, torch.ones(len(some), 2))
    few = torch.randint(0, 60, (20,), generator=random).unique()
    rare.pull(few)
    rare.apply(few, torch.randn(len(few), 4, generator=random), 0.1)
    bias.apply(torch.randn(10, generator=random), 0.1)


def content(table: SparseTable) -> list[torch.Tensor]:
    """Everything, in the order of keys."""
    cut = table.cut()
    rows = cut.read(0, cut.rows)
    cut.close(saved=False)
    order = rows.keys.argsort()
    columns = [rows.keys, rows.values, *rows.state]
    if rows.statistics is not None:
        columns.append(rows.statistics)
    waiting = table.candidates().columns
    by_key = waiting[0].argsort()
    return [*(column[order] for column in columns), *(column[by_key] for column in waiting)]


def equal(ours: SparseTable, theirs: SparseTable) -> bool:
    pairs = zip(content(ours), content(theirs), strict=True)
    return ours.step == theirs.step and all(torch.equal(a, b) for a, b in pairs)


def order(id: str, mode: SaveMode, shard_bytes: int = 20_000) -> SaveSpec:
    return SaveSpec(id=id, mode=mode, server=0, servers=1, shard_bytes=shard_bytes)


def saved(where, mine, mode=SaveMode.ALL, after=None, *, lost: bool = False) -> Manifest | None:
    id = new_id(mine[0].step)
    task = SaveTask(where, order(id, mode), cut_tables(mine, mode))
    task.wait()
    if not lost:
        assert commit_save(where, id, mode, mine[0].step, [task.result()], after=after)
    task.close(saved=not lost)
    return None if lost else current_manifest(where)


def test_real_tables_come_back(tmp_path):
    mine = tables()
    for seed in range(10):
        train(*mine, seed)
        if seed == 8:
            shrink(mine[1], ShrinkPolicy())
    assert len(mine[1].candidates().keys), "some keys have a row, others wait"
    assert set(mine[1].candidates().days.tolist()) == {0.0, 1.0}, "some since yesterday"
    assert len(mine[1])
    saved(tmp_path, mine)
    found = tables()
    assert load_tables(tmp_path, found, RowOwner(0, 1)) == 10
    assert equal(found[0], mine[0])
    assert equal(found[1], mine[1])
    for seed in range(10, 15):  # and they go on alike
        train(*mine, seed)
        train(*found, seed)
    assert equal(found[0], mine[0])
    assert equal(found[1], mine[1])
    assert torch.equal(found[2].values, mine[2].values)


def test_a_save_is_of_one_moment_while_training_goes_on(tmp_path):
    mine, twin = tables(), tables()
    for seed in range(20):
        train(*mine, seed, keys=20_000)
        train(*twin, seed, keys=20_000)
    id = new_id(20)
    task = SaveTask(tmp_path, order(id, SaveMode.ALL, 5000), cut_tables(mine, SaveMode.ALL))
    batches = 0
    while not batches or not task.ended:
        train(*mine, 100 + batches, keys=20_000)
        batches += 1
    commit_save(tmp_path, id, SaveMode.ALL, 20, [task.result()])
    task.close(saved=True)
    found = tables()
    load_tables(tmp_path, found, RowOwner(0, 1))
    assert equal(found[0], twin[0])
    assert equal(found[1], twin[1])
    assert torch.equal(found[2].values, twin[2].values)


def test_deltas_of_real_tables(tmp_path):
    mine = tables()
    for seed in range(5):
        train(*mine, seed)
    last = saved(tmp_path, mine)
    for seed in range(5, 8):
        train(*mine, seed)
        assert last is not None
        last = saved(tmp_path, mine, SaveMode.DELTA, last.saves[-1].id)
    found = tables()
    load_tables(tmp_path, found, RowOwner(0, 1))
    assert equal(found[0], mine[0])
    assert equal(found[1], mine[1])


@pytest.mark.parametrize("servers", [1, 3])
def test_a_delta_has_the_rows_that_were_removed(tmp_path, servers):
    spec = dataclasses.replace(SEEN, name="bounded", rows=RowOptions(bound=Bound(rows=900)))
    bounded = SparseTable(spec)
    mine, last = [bounded, SparseTable(SEEN)], None
    for seed in range(9):
        random = torch.Generator().manual_seed(seed)
        some = torch.randint(200 * seed, 200 * seed + 600, (400,), generator=random).unique()
        bounded.apply(some, torch.ones(len(some), 8), 0.1)
        mine[1].apply(some, torch.ones(len(some), 8), 0.1, torch.ones(len(some), 2))
        if seed == 6:
            assert shrink(mine[1], ShrinkPolicy(delete_threshold=1.1)) > 100
        if seed % 2 == 0:
            mode, after = (SaveMode.DELTA, last.saves[-1].id) if last else (SaveMode.ALL, None)
            last = saved(tmp_path, mine, mode, after)
    values = read_values(tmp_path)
    assert torch.equal(values.sparse["seen"].keys, content(mine[1])[0])
    assert torch.equal(values.sparse["seen"].values, content(mine[1])[1])
    for server in range(servers):
        found = [SparseTable(bounded.spec), SparseTable(SEEN)]
        load_tables(tmp_path, found, RowOwner(server, servers))
        for ours, theirs in zip(found, mine, strict=True):
            columns = content(theirs)
            own = owners(columns[0], servers) == server
            pairs = zip(content(ours), columns, strict=True)
            assert all(torch.equal(one, other[own]) for one, other in pairs if len(other))


def test_evicted_rows_whose_records_are_still_there_are_in_no_save(tmp_path):
    rows = RowOptions(bound=Bound(rows=40_000))
    mine = [SparseTable(TableSpec(kind=TableKind.SPARSE, name="bounded", size=1, rule=Adagrad(), rows=rows))]

    def push(start, stop):
        mine[0].apply(torch.arange(start, stop), torch.ones(stop - start, 1), 0.1)

    push(0, 38_700)
    first = saved(tmp_path, mine)
    push(38_700, 38_800)
    left = content(mine[0])[0]
    assert len(left) < len(mine[0]) - 500
    saved(tmp_path, mine, SaveMode.DELTA, first.saves[-1].id)
    found = [SparseTable(mine[0].spec)]
    load_tables(tmp_path, found, RowOwner(0, 1))
    assert torch.equal(content(found[0])[0], left)
    assert len(found[0]) == len(left)
    assert torch.equal(read_values(tmp_path).sparse["bounded"].keys, left)


def test_a_save_fits_a_table_with_another_bound(tmp_path):
    mine = [SparseTable(SEEN)]
    keys = torch.arange(1000)
    mine[0].apply(keys, torch.ones(1000, 8), 0.1, torch.ones(1000, 2))
    saved(tmp_path / "unbounded", mine)
    rows = RowOptions(entry=SEEN.rows.entry, bound=Bound(rows=600))
    bounded = [SparseTable(dataclasses.replace(SEEN, rows=rows))]
    load_tables(tmp_path / "unbounded", bounded, RowOwner(0, 1))
    assert 500 < len(content(bounded[0])[0]) <= 600
    saved(tmp_path / "bounded", bounded)
    again = [SparseTable(SEEN)]
    load_tables(tmp_path / "bounded", again, RowOwner(0, 1))
    assert torch.equal(content(again[0])[0], content(bounded[0])[0])
    assert content(again[0])[3].shape[1] == 3


def saved_of_servers(where, servers: list[SparseTable]) -> None:
    id, parts = new_id(1), []
    for number, table in enumerate(servers):
        spec = dataclasses.replace(order(id, SaveMode.ALL), server=number, servers=len(servers))
        task = SaveTask(where, spec, cut_tables([table], SaveMode.ALL))
        task.wait()
        parts.append(task.result())
        task.close(saved=True)
    commit_save(where, id, SaveMode.ALL, 1, parts, after=None)


@pytest.mark.parametrize("candidates", [False, True])
def test_rows_keep_their_ages_where_the_clocks_of_servers_differ(tmp_path, candidates):
    """The rows of a server that was idle are not the oldest where those of two servers come together."""
    entry = Entry(EntryKind.COUNT, 999) if candidates else Entry()
    spec = dataclasses.replace(SEEN, rows=RowOptions(bound=Bound(rows=100), entry=entry))

    def use(table: SparseTable, keys: torch.Tensor) -> None:
        if candidates:
            table.pull(keys)
        else:
            table.apply(keys, torch.ones(len(keys), 8), 0.1)

    def there(table: SparseTable) -> set[int]:
        return set((table.candidates().keys if candidates else content(table)[0]).tolist())

    busy, idle = SparseTable(spec), SparseTable(spec)
    both = torch.arange(1000), owners(torch.arange(1000), 2)
    mine, others = both[0][both[1] == 0][:40], both[0][both[1] == 1][:40]
    use(busy, mine)
    for _ in range(300):
        use(busy, mine[:20])
    use(idle, others)
    saved_of_servers(tmp_path, [busy, idle])
    joined = SparseTable(spec)
    load_tables(tmp_path, [joined], RowOwner(0, 1))
    assert there(joined) == {*mine.tolist(), *others.tolist()}
    use(joined, torch.arange(5000, 5018))
    assert set(others.tolist()) <= there(joined), "they were used when their server was saved"
    assert not set(mine[20:].tolist()) <= there(joined)


def test_rows_of_several_servers_live_for_their_time(tmp_path):
    """One server looked at the time more often than the other."""
    spec = dataclasses.replace(SEEN, rows=RowOptions(bound=Bound(ttl_s=480.0)))
    often, seldom = SparseTable(spec), SparseTable(spec)
    keys = torch.arange(100)
    for table, number, step in ((often, 0, 2), (seldom, 1, 40)):
        own = keys[owners(keys, 2) == number]
        for second in range(0, 401, step):
            table.budgets[0].tick(float(second))
            if second in (0, 400):
                some = own[:5] if second else own
                table.apply(some, torch.ones(len(some), 8), 0.1)
    saved_of_servers(tmp_path, [often, seldom])
    joined = SparseTable(spec)
    load_tables(tmp_path, [joined], RowOwner(0, 1))
    joined.budgets[0].tick(470.0)
    assert len(content(joined)[0]) == 100, "none is older than 470 seconds"
    for second in range(472, 880, 2):
        joined.budgets[0].tick(float(second))
    assert {*owners(content(joined)[0], 2).tolist()} == {0, 1}, "five of each were used 400 seconds later"
    for second in range(880, 1400, 2):
        joined.budgets[0].tick(float(second))
    assert not len(content(joined)[0])


def test_a_delta_that_was_not_committed_is_in_the_next(tmp_path):
    mine = tables()
    train(*mine, 1)
    first = saved(tmp_path, mine)
    assert first is not None
    train(*mine, 2)
    saved(tmp_path, mine, SaveMode.DELTA, lost=True)
    train(*mine, 3)
    saved(tmp_path, mine, SaveMode.DELTA, first.saves[-1].id)
    found = tables()
    load_tables(tmp_path, found, RowOwner(0, 1))
    assert equal(found[0], mine[0])


def test_a_save_of_values_does_not_end_a_delta(tmp_path):
    mine = tables()
    train(*mine, 1)
    first = saved(tmp_path / "train", mine)
    assert first is not None
    train(*mine, 2)
    saved(tmp_path / "serve", mine, SaveMode.VALUES)
    saved(tmp_path / "train", mine, SaveMode.DELTA, first.saves[-1].id)
    found = tables()
    load_tables(tmp_path / "train", found, RowOwner(0, 1))
    assert equal(found[0], mine[0])
    values = read_values(tmp_path / "serve")
    assert torch.equal(values.sparse["seen"].values, content(mine[0])[1])
    assert torch.equal(values.dense["bias"], mine[2].values)


def test_one_server_becomes_three(tmp_path):
    mine = tables()
    for seed in range(10):
        train(*mine, seed)
    saved(tmp_path, mine)
    keys, values = content(mine[0])[:2]
    for server in range(3):
        found = SparseTable(SEEN), SparseTable(RARE)
        load_tables(tmp_path, found, RowOwner(server, 3))
        own = owners(keys, 3) == server
        assert torch.equal(content(found[0])[0], keys[own])
        assert torch.equal(content(found[0])[1], values[own])
        waiting = mine[1].candidates().keys
        assert set(found[1].candidates().keys.tolist()) == set(waiting[owners(waiting, 3) == server].tolist())


def test_candidates_of_an_earlier_version_have_no_days(tmp_path):
    piece = Piece("rare", PieceKind.CANDIDATES, 0, 2)
    shard = Shard(FileRecord("server-0-00000.safetensors", 0, ""), (piece,))
    part = SavedPart(0, 1, (SavedTable(RARE, 1, 0),), (shard,))
    tensors = {"keys": torch.tensor([5, 6]), "counts": torch.tensor([2.0, 1.0])}
    read = chunk_of(
        open_folder(tmp_path),
        ShardToRead("save-1", part, shard),
        piece,
        {piece.prefix + name: each for name, each in tensors.items()},
    )
    table = SparseTable(RARE)
    table.load_candidates(read)
    assert [each.tolist() for each in table.candidates().columns] == [[5, 6], [2, 1], [0, 0]]
