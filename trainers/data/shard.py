"""Shards: each trainer's share of a data set. Pure but for the loader; the same on every trainer, so
that shares are disjoint and equally long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset


class ShardSampler(Sampler[int]):
    """Indices of trainer `rank` of `trainers`: every trainers-th of one shuffled order, cut to equal
    lengths.

    Equal lengths, because in synchronous training a trainer with a batch more would wait for the others
    for ever. The order changes with every pass; `seed` makes it repeatable.
    """

    def __init__(self, length: int, rank: int, trainers: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self._length = length
        self._rank = rank
        self._trainers = trainers
        self._shuffle = shuffle
        self._seed = seed
        self._passes = 0

    def __len__(self) -> int:
        return self._length // self._trainers

    def __iter__(self) -> Iterator[int]:
        order = torch.arange(self._length)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._passes)
            order = torch.randperm(self._length, generator=generator)
        self._passes += 1
        return iter(order[self._rank :: self._trainers][: len(self)].tolist())


def shard_loader(
    dataset: TensorDataset, batch_size: int, *, rank: int, trainers: int, seed: int = 0, shuffle: bool = True
) -> DataLoader[Any]:
    """Batches of this trainer's share; the last, short one is dropped."""
    sampler = ShardSampler(len(dataset), rank, trainers, shuffle=shuffle, seed=seed)
    return DataLoader(_sized(dataset), batch_size=batch_size, sampler=sampler, drop_last=True)


def _sized(dataset: TensorDataset) -> Dataset[Any]:
    return dataset
