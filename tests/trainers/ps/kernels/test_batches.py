"""The kernels that work on the ids of a batch: against plain Python."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support import owners as reference
from trainers.ps.kernels.batch import all_finite, arrange_run, merge_runs, owners, unique_kernel
from trainers.ps.kernels.index import SECRET

EXTREMES = [0, -1, 1, -(2**63), 2**63 - 1, 7 << 40, 7 << 41]


def some_ids(count: int, different: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randint(-(2**63), 2**63 - 1, (different,), generator=generator)
    pool[: len(EXTREMES)] = torch.tensor(EXTREMES)[:different]
    return pool[torch.randint(0, different, (count,), generator=generator)]


def unique(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The distinct ids, the place of each id among them, and how often each occurs."""
    keys, place, counts = (np.empty(len(ids), np.int64) for _ in range(3))
    found = unique_kernel(ids.numpy(), SECRET, keys, place, counts)
    return torch.from_numpy(keys[:found]), torch.from_numpy(place), torch.from_numpy(counts[:found])


@pytest.mark.parametrize(("count", "different"), [(1, 1), (2, 1), (100, 7), (1000, 1000), (20_000, 3000)])
def test_unique_ids_in_the_order_of_their_first_appearance(count: int, different: int) -> None:
    ids = some_ids(count, different)
    keys, place, counts = unique(ids)
    wanted = dict.fromkeys(ids.tolist(), 0)
    for number in ids.tolist():
        wanted[number] += 1
    assert keys.tolist() == list(wanted)
    assert counts.tolist() == list(wanted.values())
    assert torch.equal(keys[place], ids)


def test_no_ids() -> None:
    keys, place, counts = unique(torch.empty(0, dtype=torch.int64))
    assert len(keys) == len(place) == len(counts) == 0
    assert keys.dtype == place.dtype == counts.dtype == torch.int64


@pytest.mark.parametrize("step", [1 << 12, 1 << 20, 1 << 32, 1 << 44])
def test_ids_that_differ_in_high_bits_only(step: int) -> None:
    ids = torch.arange(1 << 12) * step
    assert len(unique(ids)[0]) == len(ids)


def merge_rows(pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one table."""
    _, keys, rows = merge_runs([(np.array([len(keys)]), keys, rows) for keys, rows in pieces])
    return keys, rows


def test_rows_are_merged_table_by_table() -> None:
    """-1: a table that is in no push; 0: one without keys in a push that it is in."""
    first = (np.array([2, 0, -1, -1]), torch.tensor([7, 8]), torch.ones(2, 1))
    second = (np.array([1, -1, -1, 2]), torch.tensor([8, 7, 7]), torch.full((3, 1), 10.0))
    spans, keys, rows = merge_runs([first, second])
    assert spans.tolist() == [2, 0, -1, 1]
    assert keys.tolist() == [7, 8, 7]
    assert rows.flatten().tolist() == [1, 11, 20]


def test_rows_of_equal_keys_are_added_in_the_order_given() -> None:
    pieces = [(some_ids(200, 60, seed), torch.randn(200, 3) * 1e6) for seed in range(3)]
    keys, rows = merge_rows(pieces)
    wanted: dict[int, torch.Tensor] = {}
    for piece_keys, piece_rows in pieces:
        for key, row in zip(piece_keys.tolist(), piece_rows, strict=True):
            wanted[key] = wanted[key] + row if key in wanted else row
    assert keys.tolist() == list(wanted)
    assert torch.equal(rows, torch.stack(list(wanted.values())))  # bit for bit: so the order is the same


def test_merged_rows_share_no_memory_with_what_came_in() -> None:
    mine = torch.ones(1, 2)
    _, rows = merge_rows([(torch.tensor([5]), mine)])
    rows.zero_()
    assert mine.tolist() == [[1, 1]]


def test_merging_nothing() -> None:
    keys, rows = merge_rows([(torch.empty(0, dtype=torch.int64), torch.empty(0, 4))])
    assert (len(keys), rows.shape) == (0, (0, 4))


@pytest.mark.parametrize("servers", [1, 2, 3, 7, 1000])
def test_owners_are_those_of_the_partition(servers: int) -> None:
    keys = some_ids(5000, 3000)
    assert torch.equal(owners(keys, np.arange(servers)), reference.owners(keys, servers))


@pytest.mark.parametrize("holders", [[0], [3], [0, 1], [1, 4, 7], list(range(100))])
def test_keys_are_ordered_by_the_server_that_holds_them(holders: list[int]) -> None:
    keys = some_ids(500, 400)
    home = np.array(holders)[reference.owners(keys, len(holders))]
    moved, sent, spans = np.empty(500, np.int64), np.empty(500, np.int64), np.zeros((100, 1), np.int64)
    ends, shares = np.array([0, 500]), np.array([0, len(holders)])
    arrange_run(keys.numpy(), ends, np.full(1, -1), np.array(holders), shares, moved, spans, sent)
    assert np.array_equal(sent[moved], keys.numpy())
    cuts = np.concatenate([[0], spans[:, 0].cumsum()]).tolist()
    assert [sent[start:stop].tolist() for start, stop in pairwise(cuts)] == [
        keys.numpy()[home == server].tolist() for server in range(100)
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1, 31, 99])
def test_one_bad_number_is_seen(bad: float, place: int) -> None:
    grad = torch.full((10, 10), 3e38)
    grad[0] = 1e-45
    assert all_finite(grad)
    grad.view(-1)[place] = bad
    assert not all_finite(grad)
