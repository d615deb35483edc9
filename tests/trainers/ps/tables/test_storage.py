"""Rows and their index: growth, removal, any key; against a plain dict."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.isolated import in_fork
from tests.support.memory import no_more_memory_than
from trainers.kernels.compiled import Keys
from trainers.ps.kernels.index import DEEPEST, FULL, PLENTY, SEGMENT, SEGMENTS, laid_out
from trainers.ps.kernels.rows import COUNT, UNIFORM, Fresh, pull, remove_keys
from trainers.ps.kernels.runs import NEEDS_ROOM, RECORD_PLACES
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.sparse import make_table
from trainers.ps.tables.spec import (
    Entry,
    EntryKind,
    FullError,
    RowOptions,
    TableKind,
    TableSpec,
    torch_memory,
)
from trainers.ps.tables.storage import MAX_ROWS, Arena, Storage, reservation, touch_in_background

pytestmark = pytest.mark.slow

FRESH = Fresh(UNIFORM, np.float32(-1), np.float32(1), np.uint64(7), np.float32(0))
LARGE = 1 << 34


def found(storage: Storage, keys: Keys) -> tuple[np.ndarray, Keys]:
    """(rows of the keys, positions of those that have none)."""
    out, missing = np.zeros((len(keys), storage.dim), np.float32), np.empty(len(keys), np.int64)
    count = pull(storage.index, storage.rows, keys, out, missing)
    return out, missing[:count]


def check_against(storage: Storage, model: dict[int, float]) -> None:
    """Every key of the model, and no other, with its value; and every record is found."""
    assert len(storage) == len(model)
    keys = np.array(list(model), np.int64)
    rows, missing = found(storage, keys)
    assert not len(missing)
    assert rows[:, 0].tolist() == list(model.values())
    assert set(storage.keys(0, len(storage)).tolist()) == model.keys()
    assert int(storage.index.fill.sum()) == len(model)


def write(storage: Storage, model: dict[int, float], keys: Keys, value: float) -> None:
    slots = storage.insert(keys, FRESH)
    storage.column(0)[slots] = value
    model.update(dict.fromkeys(keys.tolist(), value))


@pytest.mark.parametrize("reserve", [LARGE, 0])
@pytest.mark.parametrize("kind", ["random", "low bits equal", "small", "extreme"])
def test_random_insertions_and_removals(kind: str, reserve: int) -> None:
    random = np.random.default_rng(0)
    pools = {
        "random": random.integers(-(2**63), 2**63 - 1, 40_000),
        "low bits equal": np.arange(-20_000, 20_000) << 44,
        "small": np.arange(-20_000, 20_000),
        "extreme": np.array([0, -1, 1, 2**63 - 1, -(2**63), 2**62]),
    }
    pool = pools[kind]
    storage, model = Storage(1, 0, 0, reserve), {}
    for step in range(30):
        some = random.choice(pool, random.integers(1, min(3000, len(pool))))
        if step % 3 == 2:
            remove_keys(storage.index, storage.rows, some)
            for key in some.tolist():
                model.pop(key, None)
        else:
            write(storage, model, some, float(step))
        if step % 5:
            continue
        check_against(storage, model)
        absent = np.setdiff1d(pool, np.array(list(model), np.int64))
        assert len(found(storage, absent)[1]) == len(absent)


def test_an_index_can_be_emptied_and_filled_again() -> None:
    storage, model = Storage(1, 0, 0, LARGE), {}
    keys = np.arange(20_000)
    for value in range(3):
        write(storage, model, keys, float(value))
        check_against(storage, model)
        remove_keys(storage.index, storage.rows, keys)
        assert not storage.index.entries[: storage.index.numbers[SEGMENTS] * SEGMENT].any()
        model.clear()


def test_slots_are_numbered_in_the_order_of_insertion() -> None:
    storage = Storage(2, 0, 0, LARGE)
    assert storage.insert(np.array([5, 9, 5]), FRESH).tolist() == [0, 1, 0]
    assert storage.insert(np.array([9, -(2**63)]), FRESH).tolist() == [1, 2]
    assert int(storage.rows.numbers[COUNT]) == 3


def test_a_row_that_takes_the_place_of_another_keeps_its_flag() -> None:
    storage = Storage(1, 0, 0, LARGE)
    storage.insert(np.arange(3), FRESH)
    storage.rows.flags[:3] = [0, 0, 1]
    remove_keys(storage.index, storage.rows, np.array([0]))
    assert storage.rows.flags[:2].tolist() == [1, 0]


def test_no_request_splits_many_segments() -> None:
    """Else growth would stop the world: with 100,000 rows more, only few of the segments are full."""
    storage = Storage(1, 0, 0, LARGE)
    random, most = np.random.default_rng(0), 0.0
    for step in range(40):
        before = int(storage.index.numbers[SEGMENTS])
        storage.insert(random.integers(-(2**63), 2**63 - 1, 25_000), FRESH)
        share = (int(storage.index.numbers[SEGMENTS]) - before) / before
        if step >= 10:  # 10 % more rows at first, 2.5 % at the end
            most = max(most, share * step)
    assert most < 4  # the mean is 1: as many segments more as rows


@pytest.mark.parametrize("reserve", [LARGE, 0])
@pytest.mark.parametrize("come", [0, 1000, 100_000, 300_000])
@pytest.mark.parametrize("expected", [0, 1, 2500, 100_000])
def test_an_index_that_was_laid_out_finds_everything(expected: int, come: int, reserve: int) -> None:
    """Whether as many rows come as expected, fewer or more."""
    storage, model = Storage(1, 0, 0, reserve), {}
    storage.expect(expected)
    segments = int(storage.index.numbers[SEGMENTS])
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, come)
    write(storage, model, keys, 1.0)
    check_against(storage, model)
    if come <= expected:
        assert int(storage.index.numbers[SEGMENTS]) == segments <= max(2, expected / 1400)
    storage.expect(come + expected)  # of rows that are there already
    check_against(storage, model)


@pytest.mark.parametrize("rows", [1, 2000, 2001, 3001, 12_345, 10**6, 10**8, MAX_ROWS])
def test_segments_are_laid_out_for_equal_shares(rows: int) -> None:
    index = laid_out(Storage(1, 0, 0, LARGE).index, rows)
    depth, segments = index.numbers.tolist()
    begin = np.searchsorted(index.directory, np.arange(segments))
    width = np.bincount(index.directory)
    assert (width == 1 << (depth - index.depths[:segments])).all()
    assert not (begin % width).any()
    share = np.sqrt(1 + 3 * (begin + width) / 2**depth) - np.sqrt(1 + 3 * begin / 2**depth)
    assert (share * rows <= PLENTY).all()
    assert segments == 1 or rows / segments > 0.3 * PLENTY


def test_no_secret_fills_a_segment_that_cannot_be_split() -> None:
    """Else a table with as many rows as are allowed might be too full for the hashes of the next process."""
    largest = 1.5 * MAX_ROWS / 2**DEEPEST  # rows of the fullest segment of the deepest directory, on average
    assert (FULL - largest) / largest**0.5 > 7  # standard deviations, of a Poisson distribution


def test_rows_over_the_limit_are_refused_before_any_is_made() -> None:
    storage = Storage(1, 0, 0, LARGE)
    storage.insert(np.arange(3), FRESH)
    storage.rows.numbers[COUNT] = MAX_ROWS - 1  # as if they were there
    with pytest.raises(FullError, match=f"at most {MAX_ROWS:,}"):
        storage.insert(np.arange(2, 5), FRESH)
    assert int(storage.rows.numbers[COUNT]) == MAX_ROWS - 1


def test_millions_of_keys() -> None:
    storage = Storage(1, 0, 0, LARGE)
    keys = np.arange(3_000_000) * 0x1234567
    for start in range(0, len(keys), 500_000):
        storage.insert(keys[start : start + 500_000], FRESH)
    slots = storage.insert(keys, FRESH)
    assert np.array_equal(slots, np.arange(len(keys)))
    segments = int(storage.index.numbers[SEGMENTS])
    assert 0.4 < len(keys) / (segments * SEGMENT) < 0.8
    assert storage.index.fill[:segments].max() <= 0.81 * SEGMENT


# ---- arenas


def test_an_arena_without_reservation_grows_by_copying() -> None:
    arena = Arena(0)
    arena.words[:3] = [1, 2, 3]
    old = arena.words
    arena.grow(64 << 20)
    assert arena.size >= 64 << 20
    assert arena.words[:4].tolist() == [1, 2, 3, 0]
    assert old[:3].tolist() == [1, 2, 3]


def test_an_arena_with_reservation_does_not_move() -> None:
    arena = Arena(1 << 34)
    words = arena.words
    arena.grow(1 << 33)
    assert arena.words is words


def test_a_reservation_that_is_refused_is_done_without() -> None:
    arena = Arena(1 << 62)
    arena.words[0] = 5
    arena.grow(8 << 20)
    assert (arena.words[0], arena.size >= 8 << 20) == (5, True)


def test_memory_that_is_given_back_reads_as_zeros() -> None:
    arena = Arena(1 << 30)
    arena.words[: 1 << 20] = 1
    arena.give_back(4096)
    assert arena.words[:513].tolist() == [1] * 512 + [0]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_large_arena_finds_its_memory_there() -> None:
    arena, used = Arena(LARGE), 64 << 20
    arena.words[: used // 8] = 7
    arena.expect(used)
    touch_in_background(np.zeros(512, np.int64), 0, 8).result()  # one thread for all: the memory is there too
    before = resident()
    arena.words[used // 8 : (used + (6 << 20)) // 8] = 7
    assert resident() - before < 1 << 20
    assert (arena.words[: used // 8] == 7).all()
    assert not arena.words[(used + (6 << 20)) // 8 : (used + (10 << 20)) // 8].any()


def test_an_arena_gets_little_more_than_it_needs() -> None:
    before, arena = resident(), Arena(LARGE)
    for used in range(1 << 20, 65 << 20, 1 << 20):
        arena.expect(used)
        touch_in_background(np.zeros(512, np.int64), 0, 8).result()
    assert resident() - before < 74 << 20


def test_touched_memory_may_change_meanwhile() -> None:
    words = np.zeros(512 * 64, np.int64)
    touching = [touch_in_background(words, 0, words.nbytes) for _ in range(2000)]
    for _ in range(2000):
        words[::512] += 1
    for each in touching:
        each.result()
    assert (words[::512] == 2000).all()


def limited() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, ((300 << 20) + 4096 * pages,) * 2)
    reservation.cache_clear()
    assert reservation() == 0
    table = make_table(TableSpec(kind=TableKind.SPARSE, name="t", size=64, rule=SGD()))
    table.pull(torch.arange(2))
    counting = RowOptions(entry=Entry(EntryKind.COUNT, 2))
    counted = make_table(TableSpec(kind=TableKind.SPARSE, name="c", size=1, rule=SGD(), rows=counting))
    for _ in range(2):
        counted.pull(torch.arange(200_000))
    table.apply(torch.arange(2), torch.ones(2, 64), 1.0)
    assert len(counted) == 200_000
    assert not len(counted.candidates().keys)
    nothing = torch.zeros(50_000, 64)

    def fill() -> None:
        for start in range(0, 10_000_000, 50_000):
            keys = torch.arange(start, start + 50_000)
            table.make_room([keys], filtered=True)
            table.apply(keys, nothing, 0.0)

    with pytest.raises(FullError, match="Start more servers"):
        fill()
    assert len(table) >= 50_000
    assert table.pull(torch.tensor([1]))[0, :2].tolist() == [-1.0, -1.0]


def test_a_limit_on_address_space_is_respected_and_told() -> None:
    in_fork(limited)


def test_torch_without_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="tried to allocate"), torch_memory():
        torch.empty(1 << 45)
    with pytest.raises(RuntimeError, match="shape"), torch_memory():
        torch.ones(2).reshape(3)


def test_memory_that_grew_in_part_is_used_as_it_is() -> None:
    """There is memory for the records and none for their flags, or none for the index."""
    storage = Storage(1, 0, 0, reserve=0)
    rows = 3_000_000
    with no_more_memory_than(4 * storage.stride * rows + (1 << 20)), pytest.raises(FullError):
        storage.expect(rows)
    assert len(storage.index.entries) >= int(storage.index.numbers[SEGMENTS]) * SEGMENT
    with no_more_memory_than(4 * storage.stride * rows + (1 << 20)), pytest.raises(FullError):
        storage.grow(NEEDS_ROOM, rows)
    assert len(storage.rows.floats) * 4 == storage._records.size > 4 * storage.stride * rows - 1
    assert len(storage.rows.flags) == storage._flags.size
    assert storage._line[RECORD_PLACES] == len(storage.rows.floats)
