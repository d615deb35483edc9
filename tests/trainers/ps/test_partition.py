import numpy as np
import pytest
import torch

from trainers.ps.kernels import batch
from trainers.ps.tables import spec


@pytest.mark.parametrize(
    ("elements", "row", "servers", "cuts"),
    [
        (8192, 1, 4, [(0, 8192)]),  # not above 8192: whole
        (8193, 1, 4, [(0, 8193)]),  # half of it would be too small
        (16384, 1, 4, [(0, 8192), (8192, 16384)]),
        (100_000, 1, 2, [(0, 50_000), (50_000, 100_000)]),
        (16800, 8, 2, [(0, 8400), (8400, 16800)]),
        (30_000, 7_000, 3, [(0, 14_000), (14_000, 28_000), (28_000, 30_000)]),  # between rows
        (0, 1, 2, []),
    ],
)
def test_slices(elements: int, row: int, servers: int, cuts: list[tuple[int, int]]) -> None:
    assert spec.block_slices(elements, row, servers, slice_up=True, largest=1 << 24) == cuts


def test_no_slices_when_they_are_not_wanted() -> None:
    assert spec.block_slices(100_000, 1, 4, slice_up=False, largest=1 << 24) == [(0, 100_000)]


def test_no_block_exceeds_the_largest() -> None:
    cuts = spec.block_slices(1000, 1, 1, slice_up=False, largest=300)
    assert [stop - start for start, stop in cuts] == [300, 300, 300, 100]


def test_slices_cover_everything_once() -> None:
    for elements in (1, 8191, 20_000, 99_991, 1_000_003):
        for servers in (1, 2, 3, 7):
            cuts = spec.block_slices(elements, 13, servers, slice_up=True, largest=1 << 24)
            assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
            assert cuts[-1][1] == elements


def test_round_robin_takes_turns_and_hash_name_does_not_depend_on_order() -> None:
    names = ["a", "b", "c", "d", "e"]
    assert spec.place_blocks(names, 2, "RoundRobin") == [0, 1, 0, 1, 0]
    homes = dict(zip(names, spec.place_blocks(names, 3, "HashName"), strict=True))
    backwards = dict(zip(names[::-1], spec.place_blocks(names[::-1], 3, "HashName"), strict=True))
    assert homes == backwards
    assert set(homes.values()) <= {0, 1, 2}


@pytest.mark.parametrize("stride", [1, 2, 3, 64, 1 << 40])
def test_keys_spread_evenly_whatever_their_stride(stride: int) -> None:
    keys = (torch.arange(-3000, 3000) * stride).to(torch.int64)
    counts = torch.bincount(batch.owners(keys, np.arange(3)), minlength=3)
    assert counts.sum() == 6000
    assert int(counts.min()) > 1800


def test_extreme_keys_have_an_owner() -> None:
    homes = batch.owners(torch.tensor([-(2**63), -1, 0, 2**63 - 1]), np.arange(5))
    assert bool(((homes >= 0) & (homes < 5)).all())
