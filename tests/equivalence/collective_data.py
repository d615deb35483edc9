"""Where the batches of a collective program come from: a list, or samplers of fleet.

A global batch is the same for any number of ranks, so that one process can have it, and a job may go on with
another number.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.equivalence.program import NUMBERS, Block, Program, define
from trainers.data.sampler import ElasticBatchSampler
from trainers.data.shard import ShardSampler, shard_loader

TURNS = 8
"""Batches that a program trains with."""
LENGTH, IDS = 41, 9
"""Examples of the data set, and the range of their ids."""
_PASS = 3
"""Batches of a pass."""


def _sampler(rng: random.Random) -> dict[str, Any]:
    return {
        "shuffle": rng.random() < 0.8,
        "peeks": tuple(sorted(rng.sample(range(TURNS), rng.choice((0, 0, 1, 1, 2))))),
        "by": rng.choice((0, 1, "all")),
        "broken": rng.choice((None, None, 2, 4, 5)),
        "set_epoch": rng.random() < 0.25,
    }


define("data", "shard_loader", "shard_loader, one epoch for each loop over it", _sampler, weight=2.0)
define("data", "counted_shards", "a loop over batches() of a ShardSampler", _sampler, weight=1.5)
define("data", "elastic_batches", "a loop over batches() of an ElasticBatchSampler", _sampler, weight=1.5)
define("data", "uneven", "ranks have parts of different sizes", weight=0.7)


@dataclass(frozen=True, slots=True)
class Batch:
    """Numbers (n, NUMBERS), ids (n, 2) and targets (n,)."""

    x: torch.Tensor
    ids: torch.Tensor
    y: torch.Tensor

    def of(self, places: Any) -> Batch:
        return Batch(self.x[places], self.ids[places], self.y[places])


class Feed:
    """The batches of a program, of one rank, or, with rank None, of all ranks, one after the other.

    `sizes`: the examples that each rank has of the batch that was given out last.
    """

    def __init__(self, program: Program, rank: int | None, world: int, stage: int) -> None:
        self._seed = program.seed
        self._rank, self._world, self._stage = rank, world, stage
        self._block: Block | None = next(
            (each for each in program.family("data") if each.name != "uneven"), None
        )
        self.size = 13 if program.has("uneven") and self._kind in ("", "elastic_batches") else 12
        generator = torch.Generator().manual_seed(program.seed)
        self.all = Batch(
            torch.randn(LENGTH, NUMBERS, generator=generator),
            torch.randint(0, IDS, (LENGTH, 2), generator=generator),
            torch.randn(LENGTH, generator=generator),
        )
        self.sizes: list[int] = []
        self._sampler: Any = None
        self._loader: Any = None
        if self._block is not None and rank is not None:
            self._loader = self._made(self._block, rank)
        self.place = (0, 0)  # of the twin: an epoch, and batches of it

    @property
    def _kind(self) -> str:
        return "" if self._block is None else self._block.name

    @property
    def counted(self) -> bool:
        """Whether its place can be saved."""
        return self._kind not in ("", "shard_loader")

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"sampler": self._sampler} if self.counted else {}

    def resumed(self, world: int, *, kept: bool) -> None:
        """The twin's loop begins again. `kept`: where a checkpoint was taken."""
        self._stage, self._world = self._stage + 1, world
        if not self.counted:
            self.place = (self._first_epoch(), 0)
        elif not kept:
            self.place = (0, 0)

    def batches(self, start: int) -> Iterator[Batch]:
        """From turn `start` on."""
        turn = start
        for passes in itertools.count():
            if turn >= TURNS:
                return
            if self._block is not None and self._block["set_epoch"]:
                self._set_epoch(50 + passes)
            self._peek(turn)
            for number, batch in enumerate(self._pass(turn)):
                if number:
                    self._peek(turn)
                yield batch
                turn += 1
                if turn == TURNS or (self._block is not None and turn == self._block["broken"]):
                    if self._kind == "shard_loader" and number + 1 == _PASS:
                        self._passed()  # its last batch was given out: that is a whole pass
                    break
            else:
                self._passed()

    def _first_epoch(self) -> int:
        return 10 * self._stage

    # ---- A rank's

    def _made(self, block: Block, rank: int) -> Any:
        data = TensorDataset(self.all.x, self.all.ids, self.all.y)
        where = {"rank": rank, "trainers": self._world, "seed": self._seed, "shuffle": block["shuffle"]}
        if block.name == "shard_loader":
            return shard_loader(data, self.size // self._world, epoch=self._first_epoch(), **where)
        if block.name == "counted_shards":
            self._sampler = ShardSampler(LENGTH, **where)
            return DataLoader(
                data, batch_size=self.size // self._world, sampler=self._sampler, drop_last=True
            )
        self._sampler = ElasticBatchSampler(LENGTH, self.size, **where)
        return DataLoader(data, batch_sampler=self._sampler)

    def _peek(self, turn: int) -> None:
        """Look at an example input, in a pass or before one."""
        block = self._block
        if block is None or self._rank is None or block["by"] not in ("all", self._rank):
            return
        if turn in block["peeks"]:
            next(iter(self._loader))

    def _pass(self, turn: int) -> Iterator[Batch]:
        if self._rank is None:
            return self._pass_of_all(turn)
        if self._block is None:
            low, high = self._range(self._rank)
            return (self.all.of(self._chosen(number)[low:high]) for number in range(turn, TURNS))
        loader = self._loader if self._sampler is None else self._sampler.batches(self._loader)
        return (Batch(*batch) for batch in loader)

    # ---- Which examples there are

    def _range(self, rank: int) -> tuple[int, int]:
        return rank * self.size // self._world, (rank + 1) * self.size // self._world

    def _chosen(self, turn: int) -> torch.Tensor:
        """Without a sampler."""
        generator = torch.Generator().manual_seed(self._seed * 1000 + turn)
        return torch.randperm(LENGTH, generator=generator)[: self.size]

    def _pass_of_all(self, turn: int) -> Iterator[Batch]:
        strided = self._kind in ("shard_loader", "counted_shards")
        for chosen in self._chosen_of_pass(turn):
            parts = [
                chosen[rank :: self._world] if strided else chosen[slice(*self._range(rank))]
                for rank in range(self._world)
            ]
            self.sizes = [len(each) for each in parts]
            yield self.all.of(torch.cat(parts))

    def _chosen_of_pass(self, turn: int) -> Iterator[torch.Tensor]:
        if self._block is None:
            yield from map(self._chosen, range(turn, TURNS))
            return
        sampler = ShardSampler(LENGTH, 0, 1, shuffle=self._block["shuffle"], seed=self._seed)
        epoch, first = self.place
        order = torch.from_numpy(sampler.order(epoch))
        for place in range(first, _PASS):
            if self.counted:
                self.place = (epoch, place + 1) if place + 1 < _PASS else (epoch + 1, 0)
            yield order[place * self.size : (place + 1) * self.size]

    def _passed(self) -> None:
        """The twin's pass has come to its end: a loop that breaks out begins the same epoch again."""
        if not self.counted:
            self.place = (self.place[0] + 1, 0)

    def _set_epoch(self, epoch: int) -> None:
        if self._loader is not None:
            (self._sampler or self._loader.sampler).set_epoch(epoch)
        elif epoch != self.place[0]:
            self.place = (epoch, 0)
