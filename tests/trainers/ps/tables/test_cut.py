"""Cuts: the values as of one moment, read while training goes on."""

import threading

import pytest
import torch

from tests.support.memory import no_more_memory_than
from trainers.ps.kernels.rows import NOT_IN_SNAPSHOT, UNSAVED
from trainers.ps.tables.rules import FTRL, SGD, Adagrad, Adam, AnyRule, RMSprop, SparseAdam
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import (
    FullError,
    Initializer,
    InitKind,
    RowOptions,
    TableError,
    TableKind,
    TableSpec,
)
from trainers.ps.tables.storage import Cut, SparseRows

pytestmark = pytest.mark.slow

ROWS = RowOptions(init=Initializer(InitKind.UNIFORM, -1, 1, seed=1), statistics=True)


def sparse(dim: int = 9) -> SparseTable:
    return SparseTable(TableSpec(kind=TableKind.SPARSE, name="t", size=dim, rule=SparseAdam(), rows=ROWS))


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ones(table: SparseTable, keys: torch.Tensor) -> None:
    table.apply(keys, torch.ones(len(keys), table.spec.size), 0.1, torch.ones(len(keys), 2))


def read_all(cut: Cut, step: int = 100) -> SparseRows:
    parts = [cut.read(start, min(start + step, cut.rows)) for start in range(0, cut.rows, step)]
    counts = [part.statistics for part in parts if part.statistics is not None]
    state = zip(*(part.state for part in parts), strict=True)
    return SparseRows(
        torch.cat([part.keys for part in parts]),
        torch.cat([part.values for part in parts]),
        tuple(torch.cat(each) for each in state),
        torch.cat(counts),
    )


def same(left: SparseRows, right: SparseRows) -> bool:
    assert left.statistics is not None
    assert right.statistics is not None
    pairs = [(left.keys, right.keys), (left.values, right.values), (left.statistics, right.statistics)]
    return all(torch.equal(a, b) for a, b in [*pairs, *zip(left.state, right.state, strict=True)])


def test_a_reader_thread_sees_the_table_as_of_the_cut() -> None:
    """Thousands of pushes, new rows and assignments while another thread reads."""
    table, random = sparse(), torch.Generator().manual_seed(0)
    pool = torch.arange(60_000) * 7919
    ones(table, pool)
    for _ in range(5):  # cut after cut: what one leaves behind must not disturb the next
        with table.cut() as cut:
            wanted = read_all(cut, 10_000)
        before = cut.rows
        cut = table.cut()
        got: list[SparseRows] = []
        reader = threading.Thread(target=lambda cut=cut, got=got: got.append(read_all(cut, 37)))
        reader.start()
        pushes = 0
        while reader.is_alive() or pushes < 400:
            some = pool[torch.randint(len(pool), (300,), generator=random)]
            table.apply(some, torch.randn(300, 9, generator=random), 0.1, torch.ones(300, 2))
            table.assign(some[:5], torch.zeros(5, 9))
            ones(table, numbers(-1 - len(table), -2 - len(table)))
            pushes += 1
        reader.join()
        cut.close()
        assert same(got[0], wanted)
        assert (len(got[0].keys), len(table) > before) == (before, True)


def test_rows_are_kept_only_until_they_are_read() -> None:
    table = sparse()
    ones(table, torch.arange(1000))
    cut = table.cut()
    first = cut.read(0, 600)
    ones(table, torch.arange(1000))
    ones(table, torch.arange(1000))
    rest = cut.read(600, 1000)
    assert int(table._storage.rows.cut[3]) == 400  # images: of rows that were not read, and once
    cut.close()
    assert first.statistics is not None
    assert rest.statistics is not None
    assert first.statistics[:, 0].tolist() == [1] * 600
    assert rest.statistics[:, 0].tolist() == [1] * 400
    assert len(table._storage.rows.images) == 0


def test_loading_into_a_table_that_is_being_saved() -> None:
    table, other = sparse(2), sparse(2)
    ones(table, torch.arange(50))
    ones(other, torch.arange(50))
    ones(other, torch.arange(50))
    with other.cut() as theirs:
        newer = read_all(theirs)
    with table.cut() as cut:
        table.load(newer)
        older = read_all(cut)
    with table.cut() as cut:
        assert same(read_all(cut), newer)
    assert not same(older, newer)


def test_many_rows_are_loaded_as_they_were_saved() -> None:
    table, other, random = sparse(), sparse(), torch.Generator().manual_seed(0)
    keys = torch.randperm(20_000, generator=random) * 7919
    for some in (keys, keys[::2], keys[::3]):
        grad = torch.randn(len(some), 9, generator=random)
        table.apply(some, grad, 0.1, torch.rand(len(some), 2, generator=random))
    with table.cut() as cut:
        saved = cut.read(0, cut.rows)
    other.load(saved)
    with other.cut() as cut:
        assert same(cut.read(0, cut.rows), saved)


def test_the_order_of_reads_and_the_end() -> None:
    table = sparse()
    ones(table, torch.arange(10))
    cut = table.cut()
    cut.read(2, 5)
    for start, stop in ((0, 1), (4, 6), (5, 11), (7, 6)):
        with pytest.raises(TableError, match=f"{start} to {stop}"):
            cut.read(start, stop)
    with pytest.raises(TableError, match="close that cut"):
        table.cut()
    cut.close()
    cut.close()
    with pytest.raises(TableError, match="closed"):
        cut.read(5, 6)
    table.cut().close()


def test_an_empty_table() -> None:
    with sparse().cut() as cut:
        assert (cut.rows, len(cut.read(0, 0).keys)) == (0, 0)


# ---- only what has changed


def changed(table: SparseTable, *, mark: bool = False, of: int = UNSAVED) -> list[int]:
    with table.cut(changed_only=True, mark=mark, of=of) as cut:
        return sorted(read_all(cut).keys.tolist()) if cut.rows else []


def test_changes_since_the_last_cut_with_mark() -> None:
    table = sparse()
    ones(table, torch.arange(10))
    assert changed(table) == list(range(10)) == changed(table)
    with table.cut(mark=True) as cut:
        ones(table, numbers(3))  # while it is saved: belongs to the next
        read_all(cut)
    assert changed(table) == [3]
    ones(table, numbers(5, 77))
    ones(table, numbers(88))
    table.pull(numbers(6, 99))  # they were only read
    table.assign(numbers(7), torch.zeros(1, 9))
    assert changed(table) == [3, 5, 7, 77, 88]
    assert changed(table, mark=True) == [3, 5, 7, 77, 88]
    assert changed(table) == []


def test_saves_and_snapshots_do_not_know_of_each_other() -> None:
    table = sparse()
    ones(table, torch.arange(10))
    assert changed(table, mark=True) == list(range(10))
    ones(table, numbers(3))
    with table.cut(mark=True, of=NOT_IN_SNAPSHOT) as cut:
        ones(table, numbers(4))
        table.remove(numbers(5))  # 9 takes its place
        assert len(read_all(cut).keys) == 10
    table.remove(numbers(6))
    assert changed(table, of=NOT_IN_SNAPSHOT) == [4, 9]
    assert changed(table) == [3, 4, 9]
    for of in (NOT_IN_SNAPSHOT, UNSAVED):
        with table.cut(changed_only=True, mark=True, of=of) as cut:
            assert cut.removed.tolist() == [5, 6]
            ones(table, numbers(7 if of == UNSAVED else 8))
            read_all(cut)
    assert changed(table) == [7]
    assert changed(table, of=NOT_IN_SNAPSHOT) == [7, 8]
    cut = table.cut(mark=True, of=NOT_IN_SNAPSHOT)
    read_all(cut)
    cut.close(saved=False)
    assert changed(table, of=NOT_IN_SNAPSHOT) == [7, 8]


@pytest.mark.parametrize(
    "rule",
    [SGD(), SGD(momentum=0.9), Adagrad(), Adam(amsgrad=1.0), SparseAdam(), RMSprop(centered=1.0), FTRL()],
)
def test_a_pull_changes_nothing_and_a_push_what_it_says(rule: AnyRule) -> None:
    """Whatever of a record is values: with SGD, all of it."""
    table = SparseTable(TableSpec(kind=TableKind.SPARSE, name="t", size=9, rule=rule))
    table.assign(torch.arange(100), torch.zeros(100, 9))
    with table.cut(mark=True) as cut:
        read = cut.read(0, cut.rows)
    with table.cut() as cut:
        table.pull(torch.arange(100))
        assert int(table._storage.rows.cut[3]) == 0
        table.apply(torch.arange(40, 60), torch.ones(20, 9), 0.1)
        assert int(table._storage.rows.cut[3]) == 20
        assert torch.equal(cut.read(0, cut.rows).values, read.values)
    table.pull(torch.arange(100))
    with table.cut(changed_only=True) as cut:
        assert sorted(cut.read(0, cut.rows).keys.tolist()) == list(range(40, 60))


def test_a_cut_that_was_not_saved_marks_nothing() -> None:
    table = sparse()
    ones(table, torch.arange(10))
    table.cut(mark=True).close()  # not read
    assert changed(table) == list(range(10))
    cut = table.cut(mark=True)
    cut.read(0, cut.rows)
    ones(table, numbers(3))
    cut.close(saved=False)
    assert changed(table) == list(range(10))
    with pytest.raises(OSError, match="disk full"):
        save_to_a_full_disk(table)
    assert changed(table) == list(range(10))


def test_what_changes_during_a_cut_without_mark_is_not_forgotten() -> None:
    table = sparse()
    ones(table, torch.arange(10))
    assert changed(table, mark=True) == list(range(10))
    with table.cut() as cut:
        ones(table, numbers(3))
        read_all(cut)
    cut = table.cut(mark=True)
    ones(table, numbers(4))
    cut.close(saved=False)
    assert changed(table) == [3, 4]


def save_to_a_full_disk(table: SparseTable) -> None:
    with table.cut(mark=True) as cut:
        cut.read(0, cut.rows)
        raise OSError("disk full")


def test_changed_rows_are_given_as_of_the_cut_too() -> None:
    table = sparse()
    ones(table, torch.arange(10))
    with table.cut(mark=True) as cut:
        read_all(cut)
    ones(table, numbers(4, 5))
    wanted = table.pull(numbers(4, 5))
    with table.cut(changed_only=True) as cut:
        ones(table, torch.arange(10))
        rows = cut.read(0, cut.rows)
    assert rows.keys.tolist() == [4, 5]
    assert torch.equal(rows.values, wanted)


def test_without_statistics_there_are_none() -> None:
    table = SparseTable(TableSpec(kind=TableKind.SPARSE, name="t", size=2, rule=Adagrad()))
    table.apply(numbers(1), torch.ones(1, 2), 1.0)
    with table.cut() as cut:
        rows = cut.read(0, 1)
    assert (rows.statistics, len(rows.state)) == (None, 1)


def test_a_cut_without_memory_loses_no_removed_key() -> None:
    """The images of its rows may need as much memory as the rows."""
    table = SparseTable(TableSpec(kind=TableKind.SPARSE, name="t", size=512, rule=SGD()))
    table.assign(torch.arange(20_000), torch.zeros(20_000, 512))
    with table.cut(mark=True) as cut:
        for start in range(0, cut.rows, 5000):
            cut.read(start, start + 5000)
    table.remove(numbers(1, 2))
    with no_more_memory_than(16 << 20), pytest.raises(FullError, match="not enough memory"):
        table.cut(changed_only=True, mark=True)
    table.remove(numbers(3))
    assert not table.is_cut
    for _ in range(2):
        with table.cut(changed_only=True) as cut:
            assert sorted(cut.removed.tolist()) == [1, 2, 3]
