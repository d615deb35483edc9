import torch
from torch.utils.data import TensorDataset

from trainers.data.shard import ShardSampler, shard_loader


def test_shares_are_disjoint_equally_long_and_leave_out_less_than_one_each() -> None:
    shares = [list(ShardSampler(10, rank, 3, seed=5)) for rank in range(3)]
    assert [len(share) for share in shares] == [3, 3, 3]
    assert len(set().union(*shares)) == 9


def test_the_order_changes_with_every_pass_and_repeats_with_the_seed() -> None:
    sampler, twin = ShardSampler(50, 1, 2, seed=1), ShardSampler(50, 1, 2, seed=1)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert [first, second] == [list(twin), list(twin)]


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    assert list(ShardSampler(6, 1, 2, shuffle=False)) == [1, 3, 5]


def test_batches_of_a_share_have_one_size() -> None:
    data = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    loader = shard_loader(data, 2, rank=0, trainers=2, seed=0)
    batches = list(loader)
    assert [len(x) for x, _ in batches] == [2, 2]
    assert all(bool((y == 2 * x).all()) for x, y in batches)
