"""Every sample once, whoever comes and goes."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainers.data.sampler import ElasticBatchSampler
from trainers.errors import UsageError


def samplers(
    trainers: int, batch_size: int = 12, length: int = 100, seed: int = 5
) -> list[ElasticBatchSampler]:
    return [
        ElasticBatchSampler(length, batch_size, rank=rank, trainers=trainers, seed=seed)
        for rank in range(trainers)
    ]


def train(team: list[ElasticBatchSampler], batches: int) -> list[list[int]]:
    """So many batches of the job, each of all trainers' parts, over as many epochs as it takes."""
    done: list[list[int]] = []
    while len(done) < batches:
        parts = [each.batches(list(each)) for each in team]
        for step in zip(*parts, strict=True):
            done.append(sorted(index for part in step for index in part))
            if len(done) == batches:
                break
    return done


def test_an_epoch_has_each_sample_at_most_once_and_leaves_out_less_than_a_batch() -> None:
    epoch = train(samplers(3), 8)
    seen = [index for batch in epoch for index in batch]
    assert len(seen) == len(set(seen)) == 96


def test_batches_are_the_same_for_any_number_of_trainers() -> None:
    alone = train(samplers(1), 20)
    assert alone[:8] != alone[8:16]
    for trainers in (2, 3, 5, 12):
        assert train(samplers(trainers), 20) == alone


@pytest.mark.parametrize("stops", [(3, 5), (8, 1), (7, 9), (1, 15)])
def test_a_team_of_another_size_goes_on_where_the_last_one_was(stops: tuple[int, int]) -> None:
    alone, done = train(samplers(1), 20), []
    state = samplers(1)[0].state_dict()
    for trainers, count in zip((2, 5, 3), (*stops, 20 - sum(stops)), strict=True):
        team = samplers(trainers)
        for each in team:
            each.load_state_dict(state)
        done += train(team, count)
        states = [each.state_dict() for each in team]
        assert states == [states[0]] * trainers
        state = states[0]
    assert done == alone


def test_another_batch_size_neither_loses_nor_repeats_a_sample() -> None:
    (before,) = samplers(1, batch_size=12)
    seen = train([before], 3)
    (after,) = samplers(1, batch_size=32)
    after.load_state_dict(before.state_dict())
    seen += train([after], 2)
    used = [index for batch in seen for index in batch]
    assert len(used) == len(set(used)) == 100
    assert (after.epoch, after.position) == (1, 0)


def test_parts_of_one_batch_differ_by_one_sample_at_most() -> None:
    for parts in zip(*map(list, samplers(5)), strict=True):
        assert sorted({len(part) for part in parts}) == [2, 3]


@pytest.mark.parametrize("trainers", [1, 2, 3, 4])
def test_parts_have_about_equally_many_tokens_and_the_samples_of_the_batch_stay(trainers: int) -> None:
    lengths = torch.empty(1000).log_normal_(3, 1.0, generator=torch.Generator().manual_seed(1)).round()
    plain = samplers(trainers, batch_size=50, length=1000)
    even = [
        ElasticBatchSampler(1000, 50, rank=rank, trainers=trainers, seed=5, lengths=lengths.tolist())
        for rank in range(trainers)
    ]
    worst = []
    for apart, together in zip(zip(*plain, strict=True), zip(*even, strict=True), strict=True):
        assert sorted(chain(*apart)) == sorted(chain(*together))
        assert [len(part) for part in together] == [len(part) for part in apart]
        for parts, found in ((apart, 0), (together, 1)):
            tokens = torch.tensor([lengths[part].sum() for part in parts])
            worst.append((found, float(tokens.max() / tokens.mean())))
    mean = [sum(each for one, each in worst if one is found) for found in (0, 1)]
    assert trainers == 1 or mean[1] - 20 < 0.2 * (mean[0] - 20)


def test_the_order_is_the_same_for_ever() -> None:
    """Written down: a run of years ago may go on today."""
    sampler = ElasticBatchSampler(8, 4, rank=0, trainers=1, seed=1)
    assert [sampler.order(epoch).tolist() for epoch in (0, 1)] == ORDERS
    other = ElasticBatchSampler(8, 4, rank=0, trainers=1, seed=1 << 32)
    assert other.order(0).tolist() != ElasticBatchSampler(8, 4, rank=0, trainers=1).order(0).tolist()


ORDERS = [[6, 2, 3, 7, 1, 4, 5, 0], [2, 0, 3, 4, 1, 6, 7, 5]]


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    sampler = ElasticBatchSampler(5, 2, rank=1, trainers=2, shuffle=False)
    assert list(sampler) == [[1], [3]]


def test_whole_passes_are_epochs_and_a_look_is_none() -> None:
    (sampler,) = samplers(1)
    next(iter(sampler))
    expected = [
        [sampler.order(epoch)[start : start + 12].tolist() for start in range(0, 96, 12)] for epoch in (0, 1)
    ]
    assert [list(sampler), list(sampler)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_is_ahead_counts_what_was_given_out(workers: int) -> None:
    data = TensorDataset(torch.arange(100))
    sampler = ElasticBatchSampler(100, 10, rank=0, trainers=1)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    loop = sampler.batches(loader)
    for _ in range(4):
        next(loop)
    assert sampler.state_dict()["position"] == 40
    del loop


def test_going_on_in_the_middle_of_an_epoch_draws_no_random_number() -> None:
    data = TensorDataset(torch.arange(100))
    sampler = ElasticBatchSampler(100, 10, rank=0, trainers=1)
    torch.manual_seed(0)
    loop = sampler.batches(DataLoader(data, batch_sampler=sampler))
    next(loop)
    there = torch.get_rng_state()
    again = ElasticBatchSampler(100, 10, rank=0, trainers=1)
    again.load_state_dict(sampler.state_dict())
    next(again.batches(DataLoader(data, batch_sampler=again)))
    assert torch.equal(torch.get_rng_state(), there)


def test_batches_that_nobody_counted_are_no_state() -> None:
    (sampler,) = samplers(1)
    next(iter(sampler))
    with pytest.raises(UsageError, match=r"Loop over sampler\.batches\(loader\)"):
        sampler.state_dict()


@pytest.mark.parametrize(
    ("length", "seed", "words"), [(99, 5, "length 100, now 99"), (100, 6, "seed 5, now 6")]
)
def test_the_state_of_another_order_is_refused(length: int, seed: int, words: str) -> None:
    (sampler,), (other,) = samplers(1), samplers(1, length=length, seed=seed)
    with pytest.raises(UsageError, match=words):
        other.load_state_dict(sampler.state_dict())


@pytest.mark.parametrize(
    ("rank", "trainers", "batch_size", "words"),
    [
        (2, 2, 4, "rank is 2 of 2"),
        (0, 5, 4, "batch_size is 4 for all trainers together; it must be from 5"),
        (0, 1, 101, "to 100 .the number of samples"),
    ],
)
def test_what_cannot_be(rank: int, trainers: int, batch_size: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ElasticBatchSampler(100, batch_size, rank=rank, trainers=trainers)


def test_lengths_of_other_data_are_refused() -> None:
    with pytest.raises(UsageError, match="lengths has 3 numbers for 100 samples"):
        ElasticBatchSampler(100, 10, rank=0, trainers=2, lengths=[1, 2, 3])
