"""Each trainer's share: nothing twice, nothing lost, and taken up where it was left."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trainers.data.shard import ShardSampler, get_file_shard, shard_loader
from trainers.errors import UsageError


def test_shares_are_disjoint_equally_long_and_leave_out_less_than_one_each() -> None:
    shares = [list(ShardSampler(10, rank, 3, seed=5)) for rank in range(3)]
    assert [len(share) for share in shares] == [3, 3, 3]
    assert len(set().union(*shares)) == 9


def test_the_order_changes_with_every_pass_and_repeats_with_the_seed() -> None:
    sampler, twin = ShardSampler(50, 1, 2, seed=1), ShardSampler(50, 1, 2, seed=1)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert [first, second] == [list(twin), list(twin)]
    assert list(ShardSampler(50, 1, 2, seed=1, epoch=1)) == second
    assert list(ShardSampler(50, 1, 2, seed=2)) != first


def shares_of(loaders: list[DataLoader[list[torch.Tensor]]]) -> list[list[int]]:
    return [[int(index) for (part,) in loader for index in part] for loader in loaders]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("made_by", ["shard_loader", "DataLoader"])
def test_a_look_at_one_batch_on_one_rank_leaves_shares_disjoint(made_by: str, workers: int) -> None:
    """The workers read all of a small share before the look ends."""
    size = 20 if made_by == "shard_loader" else 100
    data = TensorDataset(torch.arange(size))
    loaders: list[DataLoader[list[torch.Tensor]]] = [
        shard_loader(data, 5, rank=rank, trainers=2, seed=3, num_workers=workers)
        if made_by == "shard_loader"
        else DataLoader(data, 5, sampler=ShardSampler(size, rank, 2, seed=3), num_workers=workers)
        for rank in range(2)
    ]
    epochs = []
    for _ in range(3):
        next(iter(loaders[0]))
        one, other = shares_of(loaders)
        assert sorted(one + other) == list(range(size))
        epochs.append(one)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.slow
def test_workers_that_stay_begin_the_next_epoch() -> None:
    data = TensorDataset(torch.arange(40))
    sampler = ShardSampler(40, 0, 1, seed=3)
    loader: DataLoader[list[torch.Tensor]] = DataLoader(
        data, 5, sampler=sampler, num_workers=1, persistent_workers=True
    )
    next(iter(loader))
    assert [shares_of([loader])[0] for _ in range(2)] == [sampler.order(epoch).tolist() for epoch in (0, 1)]


def test_a_loop_over_the_length_of_a_loader_is_a_whole_pass() -> None:
    loader = shard_loader(TensorDataset(torch.arange(11)), 5, rank=0, trainers=1)
    batches = iter(loader)
    for _ in range(len(loader)):
        next(batches)
    assert loader.sampler.order(1)[:5].tolist() == next(iter(loader))[0].tolist()  # type: ignore[attr-defined]


def test_passes_that_are_left_early_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    sampler = ShardSampler(100, 0, 2)
    firsts = {next(iter(sampler)) for _ in range(3)}
    assert len(firsts) == 1
    assert capsys.readouterr().err == ""
    firsts |= {next(iter(sampler)) for _ in range(2)}
    (line,) = capsys.readouterr().err.splitlines()
    assert "ShardSampler: 3 passes were left early" in line
    assert "set_epoch(epoch)" in line
    for epoch in range(9):
        sampler.set_epoch(epoch)
        firsts.add(next(iter(sampler)))
    assert len(firsts) > 1
    assert capsys.readouterr().err == ""


def test_an_epoch_that_is_set_is_the_next() -> None:
    sampler, twin = ShardSampler(50, 1, 2, seed=1), ShardSampler(50, 1, 2, seed=1)
    passes = [list(twin) for _ in range(3)]
    for epoch in (2, 0, 0, 1):
        sampler.set_epoch(epoch)
        assert list(sampler) == passes[epoch]
    assert list(sampler) == passes[2]


def test_the_present_epoch_set_again_keeps_the_place_in_it() -> None:
    before = Team(2)
    expected = list(Team(2).loop())
    done = first_of(before.loop(), 5)
    after = Team(2, before.state())
    for sampler in after.samplers:
        sampler.set_epoch(0)
    assert done + list(after.loop()) == expected


def test_a_look_before_the_loop_that_counts_changes_nothing() -> None:
    team = Team(2)
    expected = [*Team(2).loop(), *Team(2, {**Team(2).state(), "epoch": 1}).loop()]
    for _ in range(2):
        next(iter(team.loaders[1]))
        for place, step in enumerate(team.loop()):
            assert step == expected.pop(0)
            if place == 3:
                next(iter(team.loaders[0]))
    assert expected == []
    assert team.state()["epoch"] == 2


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    assert list(ShardSampler(6, 1, 2, shuffle=False)) == [1, 3, 5]


def test_batches_of_a_share_have_one_size() -> None:
    data = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    loader = shard_loader(data, 2, rank=0, trainers=2, seed=0)
    batches = list(loader)
    assert [len(x) for x, _ in batches] == [2, 2]
    assert all(bool((y == 2 * x).all()) for x, y in batches)


def test_a_loader_begins_with_the_epoch_that_it_is_given() -> None:
    def share(epoch: int) -> DataLoader[list[torch.Tensor]]:
        return shard_loader(TensorDataset(torch.arange(10)), 5, rank=1, trainers=2, epoch=epoch)

    loader = share(0)
    passes = [[x.tolist() for (x,) in loader] for _ in range(2)]
    assert passes[0] != passes[1]
    assert [[x.tolist() for (x,) in share(epoch)] for epoch in (0, 1)] == passes


def test_a_share_that_is_no_batch_is_refused() -> None:
    with pytest.raises(
        UsageError, match="batch_size is 6, but 10 samples for 2 trainers are only 5 for each"
    ):
        shard_loader(TensorDataset(torch.arange(10)), 6, rank=0, trainers=2)


class Team:
    """The samplers of so many trainers, and their loaders."""

    def __init__(self, trainers: int, state: dict[str, int] | None = None, workers: int = 0) -> None:
        self.samplers = [ShardSampler(100, rank, trainers, seed=7) for rank in range(trainers)]
        for sampler in self.samplers if state else ():
            sampler.load_state_dict(state or {})
        data = TensorDataset(torch.arange(100))
        self.loaders = [
            DataLoader(data, batch_size=3, sampler=sampler, drop_last=True, num_workers=workers)
            for sampler in self.samplers
        ]

    def loop(self) -> Iterator[list[int]]:
        """An epoch, or what is left of it: each step's samples, of all trainers."""
        each = [sampler.batches(loader) for sampler, loader in zip(self.samplers, self.loaders, strict=True)]
        for parts in zip(*each, strict=True):
            yield [int(index) for (part,) in parts for index in part]

    def state(self) -> dict[str, int]:
        first, *others = [sampler.state_dict() for sampler in self.samplers]
        assert all(other == first for other in others)
        return first


def first_of(loop: Iterator[list[int]], steps: int) -> list[list[int]]:
    return [next(loop) for _ in range(steps)]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_team_goes_on_in_the_middle_of_an_epoch(workers: int) -> None:
    whole = Team(2)
    expected = [*whole.loop(), *whole.loop()]
    assert len(expected) == 32
    assert expected[:16] != expected[16:]
    before = Team(2, workers=workers)
    done = first_of(before.loop(), 5)  # workers have read on meanwhile
    after = Team(2, before.state(), workers)
    assert done + list(after.loop()) == expected[:16]
    assert list(after.loop()) == expected[16:]
    assert after.state()["epoch"] == 2


@pytest.mark.parametrize("team", [1, 3, 4])
def test_another_number_of_trainers_takes_what_is_left_of_the_epoch(team: int) -> None:
    before = Team(2)
    seen = first_of(before.loop(), 5)
    seen += list(Team(team, before.state()).loop())
    used = [index for step in seen for index in step]
    assert len(used) == len(set(used))
    assert 100 - len(used) < 3 * team


def test_an_epoch_ends_with_its_last_whole_batch() -> None:
    team = Team(2)
    first_of(team.loop(), 15)
    assert team.state() | {"position": 90, "epoch": 0} == team.state()
    team = Team(2)
    first_of(team.loop(), 16)
    assert team.state() | {"position": 0, "epoch": 1} == team.state()


def test_larger_batches_than_are_left_of_an_epoch_begin_the_next() -> None:
    sampler = ShardSampler(100, 0, 1)
    sampler.load_state_dict(sampler.state_dict() | {"position": 93})
    loader = DataLoader(TensorDataset(torch.arange(100)), batch_size=10, sampler=sampler, drop_last=True)
    assert len(list(sampler.batches(loader))) == 10
    assert (sampler.epoch, sampler.position) == (2, 0)


def test_the_last_short_batch_counts_where_it_is_not_dropped() -> None:
    sampler = ShardSampler(10, 0, 2)
    loader = DataLoader(TensorDataset(torch.arange(10)), batch_size=2, sampler=sampler)
    loop = sampler.batches(loader)
    sizes = [len(next(loop)[0]) for _ in range(2)]
    assert (sampler.epoch, sampler.position) == (0, 8)
    sizes += [len(batch) for (batch,) in loop]
    assert sizes == [2, 2, 1]
    assert (sampler.epoch, sampler.position) == (1, 0)


def test_batches_that_nobody_counted_are_no_state() -> None:
    sampler = ShardSampler(10, 0, 1)
    list(sampler)
    with pytest.raises(UsageError, match=r"Loop over sampler\.batches\(loader\)"):
        sampler.state_dict()


def test_a_loop_that_ends_before_its_first_batch_has_used_nothing() -> None:
    def broken(indices: list[torch.Tensor]) -> torch.Tensor:
        raise ValueError("unreadable")

    sampler, data = ShardSampler(10, 0, 1), TensorDataset(torch.arange(10))
    loader = DataLoader(data, batch_size=2, sampler=sampler, collate_fn=broken)
    with pytest.raises(ValueError, match="unreadable"):
        next(sampler.batches(loader))
    assert sampler.state_dict() == ShardSampler(10, 0, 1).state_dict()
    assert list(sampler) == list(ShardSampler(10, 0, 1))


def test_the_state_of_another_order_is_refused() -> None:
    state = ShardSampler(10, 0, 1).state_dict()
    with pytest.raises(UsageError, match="length 10, now 11; seed 0, now 1"):
        ShardSampler(11, 0, 1, seed=1).load_state_dict(state)


def test_a_loader_of_other_samples_is_refused() -> None:
    sampler, data = ShardSampler(10, 0, 1), TensorDataset(torch.arange(10))
    for loader in (DataLoader(data, batch_size=2), DataLoader(data, batch_size=None, sampler=sampler)):
        with pytest.raises(UsageError, match="needs a DataLoader"):
            next(sampler.batches(loader))


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_that_cannot_be(rank: int) -> None:
    with pytest.raises(UsageError, match=f"rank is {rank} of 2 trainers"):
        ShardSampler(10, rank, 2)
    with pytest.raises(UsageError, match=f"rank is {rank} of 2 trainers"):
        get_file_shard(["a", "b"], rank, 2)


@pytest.mark.parametrize(
    ("trainers", "shares"),
    [
        (1, ["abcde"]),
        (2, ["abc", "de"]),
        (3, ["ab", "cd", "e"]),
        (5, ["a", "b", "c", "d", "e"]),
        (7, ["a", "b", "c", "d", "e", "", ""]),
    ],
)
def test_files_come_in_blocks_the_first_ones_longer(trainers: int, shares: list[str]) -> None:
    """Paddle's documents: 5 files for 2 trainers are [a, b, c] and [d, e]."""
    assert [get_file_shard(list("abcde"), rank, trainers) for rank in range(trainers)] == [*map(list, shares)]


def test_one_file_is_not_its_letters() -> None:
    with pytest.raises(UsageError, match="was given 'part-0'; it must be a list of files"):
        get_file_shard("part-0", 0, 1)


@pytest.mark.parametrize("look", [1, 3, 4])
def test_a_look_in_a_pass_also_at_its_last_batch_changes_nothing(look: int) -> None:
    loader = shard_loader(TensorDataset(torch.arange(41)), 5, rank=0, trainers=2, seed=3)
    twin = shard_loader(TensorDataset(torch.arange(41)), 5, rank=0, trainers=2, seed=3)
    passes = []
    for _ in range(3):
        found: list[int] = []
        for number, (part,) in enumerate(loader, 1):
            found += part.tolist()
            if number == look:
                next(iter(loader))
        passes.append(found)
    assert passes == [shares_of([twin])[0] for _ in range(3)]
