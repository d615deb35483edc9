"""Where the batches of a program come from: lists, loaders, workers, and data sets with a state.

A batch is a dict of `ids` (n, COLUMNS) int64, `x` (n, NUMBERS) and `y` (n,). It depends only on the seed, its
number and a rank, so that one process can have the batches of all trainers, joined.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset

from tests.equivalence.program import BATCH, COLUMNS, NUMBERS, ROWS, STEPS, Block, Program, define

Batch = dict[str, torch.Tensor]
LENGTH = STEPS + 3
"""Batches of a source: more than steps, so that reading ahead has something to read."""


def _number(rng: random.Random) -> dict[str, Any]:
    return {"number": rng.randrange(1, 5)}


define("batch", "ragged", "the number of examples differs from batch to batch", merged=True)
define("batch", "empty_batch", "a batch without examples", _number, merged=True)
define(
    "batch",
    "few_ids",
    "ids repeat often within a batch",
    lambda rng: {"most": rng.randint(2, 4)},
    merged=True,
)
define("batch", "int32_ids", "ids are int32", merged=True)
define("batch", "tuples", "batches are tuples, not dicts", merged=True)


class Examples:
    """Batches by number, of some ranks of the job."""

    def __init__(self, program: Program, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self._seed = program.seed
        self._ragged = program.has("ragged")
        self._empty = program.first("empty_batch")
        self._few = program.first("few_ids")
        self._type = torch.int32 if program.has("int32_ids") else torch.int64
        self._tuples = program.has("tuples")

    def batch(self, number: int) -> Any:
        parts = [self._part(number, rank) for rank in self.ranks]
        joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return tuple(joined.values()) if self._tuples else joined

    def _part(self, number: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(self._seed * 1000 + number * 10 + rank)
        size = BATCH
        if self._ragged:
            size = 1 + int(torch.randint(0, BATCH, (), generator=generator))
        if self._empty is not None and self._empty["number"] == number:
            size = 0
        rows = ROWS if self._few is None else self._few["most"]
        return {
            "ids": torch.randint(0, rows, (size, COLUMNS), generator=generator).to(self._type),
            "x": torch.randn(size, NUMBERS, generator=generator),
            "y": torch.randn(size, generator=generator),
        }


def as_dict(batch: Any) -> Batch:
    if isinstance(batch, dict):
        return batch
    return dict(zip(("ids", "x", "y"), batch, strict=True))


class _Numbered(Dataset[Any]):
    def __init__(self, item: Callable[[int], Any]) -> None:
        self._item = item

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> Any:
        if number >= LENGTH:
            raise IndexError(number)
        return self._item(number)


class _Sequence(IterableDataset[Any]):
    def __init__(self, item: Callable[[int], Any]) -> None:
        self._item = item

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, LENGTH, every):
            yield self._item(number)


class CountingSampler(Sampler[int]):
    """Counts what it gave out, as samplers do that are saved in a checkpoint."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for number in range(LENGTH):
            self.position += 1
            yield number


Source = Callable[[Any, Block, Examples], Any]
SOURCES: dict[str, Source] = {}
"""By name of a block: from the run, the block and the examples to an iterable, made anew for each pass."""


def source(name: str, about: str, draw: Any = None, **rest: Any) -> Callable[[Source], Source]:
    define("source", name, about, draw, **rest)

    def keep(function: Source) -> Source:
        SOURCES[name] = function
        return function

    return keep


@source("generator", "batches come from a generator function", merged=True)
def _generator(run: Any, block: Block, examples: Examples) -> Any:
    return (examples.batch(number) for number in range(LENGTH))


@source(
    "loader", "DataLoader over batches", lambda rng: {"shuffle": rng.random() < 0.5}, weight=2.0, merged=True
)
def _loader(run: Any, block: Block, examples: Examples) -> Any:
    return DataLoader(
        _Numbered(examples.batch),
        batch_size=None,
        shuffle=block["shuffle"],
        generator=torch.Generator().manual_seed(run.program.seed),
    )


@source("workers", "DataLoader with two workers", weight=0.3, merged=True)
def _workers(run: Any, block: Block, examples: Examples) -> Any:
    return DataLoader(_Numbered(examples.batch), batch_size=None, num_workers=2)


@source("iterable", "DataLoader over an IterableDataset", merged=True)
def _iterable(run: Any, block: Block, examples: Examples) -> Any:
    return DataLoader(_Sequence(examples.batch), batch_size=None)


@source("iterable_workers", "the same with two workers", weight=0.3, merged=True)
def _iterable_workers(run: Any, block: Block, examples: Examples) -> Any:
    return DataLoader(_Sequence(examples.batch), batch_size=None, num_workers=2)


def _tensors(examples: Examples) -> TensorDataset:
    found = [as_dict(examples.batch(number)) for number in range(LENGTH)]
    return TensorDataset(*(torch.cat([each[name] for each in found]) for name in ("ids", "x", "y")))


@source("tensors", "DataLoader over a TensorDataset, which collates examples", weight=1.5, alone=True)
def _tensor_loader(run: Any, block: Block, examples: Examples) -> Any:
    return DataLoader(_tensors(examples), batch_size=BATCH)


@source("shuffled_tensors", "the same, shuffled by torch's global generator", alone=True)
def _shuffled_tensors(run: Any, block: Block, examples: Examples) -> Any:
    return DataLoader(_tensors(examples), batch_size=BATCH, shuffle=True, drop_last=True)


@source("subset", "DataLoader over a Subset", merged=True)
def _subset(run: Any, block: Block, examples: Examples) -> Any:
    return DataLoader(Subset(_Numbered(examples.batch), range(1, LENGTH)), batch_size=None)


@source("curriculum", "items depend on how many steps the loop has made", weight=1.5, merged=True)
def _curriculum(run: Any, block: Block, examples: Examples) -> Any:
    return DataLoader(
        _Numbered(lambda number: examples.batch((number + 5 * run.steps_made) % LENGTH)), batch_size=None
    )


@source("hard_negatives", "items depend on the last loss of the loop", alone=True)
def _hard_negatives(run: Any, block: Block, examples: Examples) -> Any:
    def item(number: int) -> Any:
        return examples.batch((number + (run.last_loss > 1.0) * 5) % LENGTH)

    return DataLoader(_Numbered(item), batch_size=None)


_RNG = ("torch", "random", "numpy", "own")


@source(
    "shared_rng",
    "items and the loop draw from the same generator",
    lambda rng: {"which": rng.choice(_RNG)},
    weight=2.0,
    merged=True,
)
def _shared_rng(run: Any, block: Block, examples: Examples) -> Any:
    return DataLoader(
        _Numbered(lambda number: examples.batch(int(number + 100 * run.random(block["which"])) % LENGTH)),
        batch_size=None,
    )


@source("reused_buffer", "each item is written into the same tensors", weight=1.5)
def _reused_buffer(run: Any, block: Block, examples: Examples) -> Any:
    """Torch's nn.EmbeddingBag(sparse=True) keeps the ids themselves in its gradient, so that another batch in
    their tensor changes where a gradient belongs that is not applied yet. So the twin gets new tensors.
    """
    kept: dict[str, torch.Tensor] = {}

    def item(number: int) -> Any:
        if not run.steppers.served:
            kept.clear()
        for name, value in as_dict(examples.batch(number)).items():
            if name in kept and kept[name].shape == value.shape:
                kept[name].copy_(value)
            else:
                kept[name] = value
        return dict(kept)

    return DataLoader(_Numbered(item), batch_size=None)


@source("counting_sampler", "the position of the sampler is observed")
def _counting_sampler(run: Any, block: Block, examples: Examples) -> Any:
    run.sampler = CountingSampler()
    return DataLoader(_Numbered(examples.batch), batch_size=None, sampler=run.sampler)


@source("two_loaders", "zip of two loaders: ids from one, the rest from the other")
def _two_loaders(run: Any, block: Block, examples: Examples) -> Any:
    loaders = [DataLoader(_Numbered(examples.batch), batch_size=None) for _ in range(2)]

    def joined() -> Iterator[Any]:
        for first, second in zip(*loaders, strict=True):
            yield {**as_dict(second), "ids": as_dict(first)["ids"]}

    return joined()


def random_number(which: str, own: torch.Generator) -> float:
    """In [0, 1), of one of the generators that a script may share."""
    if which == "torch":
        return float(torch.rand(()))
    if which == "random":
        return random.random()
    if which == "numpy":
        return float(np.random.random())  # the global one is the point
    return float(torch.rand((), generator=own))


def batches_of(run: Any, examples: Examples) -> Any:
    """A new pass over the batches of the program."""
    for block in run.program.family("source"):
        return SOURCES[block.name](run, block, examples)
    return [examples.batch(number) for number in range(LENGTH)]
