"""Samplers whose position can be saved, in the middle of an epoch and for any number of trainers.

The order is a function of (seed, epoch), the place a number of samples. ElasticBatchSampler's batch is the
whole job's: when trainers come or go, each takes a larger or smaller part of the same batches, and no
sample of an epoch is lost or comes twice. `shard` has the sampler whose batch is each trainer's.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from fleetrun.aliases import Fields
from trainers.errors import UsageError
from trainers.process.log import glog

# ---- Epochs over a data set whose position can be saved: the order is a function of (seed, epoch), the place
# a number of samples. Pure; the samplers decide which rank takes which samples.

Sample = TypeVar("Sample", covariant=True)
Item = TypeVar("Item")

_SEED_WORD = 1 << 32
_OFTEN = 3
"""Passes that do not come to their end before a line says so; one or two are somebody's look at a batch."""


def check_rank(rank: int, trainers: int) -> None:
    """Raises UsageError for a rank that no trainer has."""
    if not 0 <= rank < trainers:
        raise UsageError(f"rank is {rank} of {trainers} trainers; ranks go from 0 to trainers - 1")


class ResumableSampler(Sampler[Sample]):
    """Training has used the first `position` samples of epoch `epoch`, all trainers together. That is the
    state: of any number of trainers and any batch size.
    """

    def __init__(self, length: int, *, rank: int, trainers: int, seed: int, shuffle: bool) -> None:
        check_rank(rank, trainers)
        self._length = length
        self._rank = rank
        self._trainers = trainers
        self._seed = seed
        self._shuffle = shuffle
        self._uncounted = False
        self._passed = False
        """True after a pass that no `batches` counted has come to its end: the next one is another epoch."""
        self._left = 0
        """Passes over this epoch, one after the other, that have not come to their end."""
        self.epoch = 0
        self.position = 0

    def set_epoch(self, epoch: int) -> None:
        """Make this epoch the one of the next pass. If it is the present one, the position in it stays."""
        if epoch != self.epoch:
            self.epoch, self.position, self._left = epoch, 0, 0
        self._passed = False

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The samples of an epoch in their order. numpy promises RandomState's stream never to change (NEP
        19), so that a new version does not change the order in the middle of an epoch.
        """
        if not self._shuffle:
            return np.arange(self._length)
        seed = [self._seed % _SEED_WORD, self._seed // _SEED_WORD % _SEED_WORD, epoch % _SEED_WORD]
        return np.random.RandomState(seed).permutation(self._length)

    def state_dict(self) -> dict[str, int]:
        if self._uncounted:
            raise UsageError("batches were taken without being counted; loop over sampler.batches(loader)")
        return {"epoch": self.epoch, "position": self.position} | self._of()

    def load_state_dict(self, state: Fields) -> None:
        """Raises UsageError for the state of another order: samples would be lost, and come twice."""
        other = [
            f"{name} {state[name]}, now {value}" for name, value in self._of().items() if state[name] != value
        ]
        if other:
            raise UsageError(f"the sampler's state is of other data or another order: {'; '.join(other)}")
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._uncounted = self._passed = False

    def _of(self) -> dict[str, int]:
        return {"length": self._length, "seed": self._seed, "shuffle": int(self._shuffle)}

    def _counted(self, loader: Iterable[Item], samples: int, least: int) -> Iterator[Item]:
        """The loader's batches; with each that is given out, `samples` of the job are used."""
        self._use(0, least)  # a place that was left with smaller batches may have too little for one of these
        try:
            for batch in self._begun(loader):
                self._uncounted = self._passed = False
                self._use(samples, least)
                yield batch
        finally:  # what the loader has read ahead is not used
            self._uncounted, self._passed, self._left = False, False, 0

    def _use(self, samples: int, least: int) -> None:
        """So many more samples of the job. An epoch that has less than `least` left is over."""
        self.position += samples
        if self._length - self.position < least:
            self.epoch, self.position = self.epoch + 1, 0

    def _begun(self, loader: Iterable[Item]) -> Iterator[Item]:
        """A DataLoader draws a random number when its loop begins. A loop that is taken up in the middle of
        an epoch must not draw it again: dropout would get other numbers than without the restart.
        """
        before = torch.get_rng_state()
        begun = iter(loader)
        if self.position:
            torch.set_rng_state(before)
        return begun

    def __iter__(self) -> Iterator[Sample]:
        """From the present place to the end of the epoch; after a whole pass, the next epoch. A pass that is
        left before its end does not count: one rank alone may look at a batch, and shards stay disjoint.
        """
        if self._passed:
            self.set_epoch(self.epoch + 1)
        elif self._left == _OFTEN:
            glog(
                f"{type(self).__name__}: {_OFTEN} passes were left before their end, and each began with the "
                f"same samples of epoch {self.epoch}; for others call set_epoch(epoch) of the sampler on all "
                "ranks before each pass"
            )
        self._uncounted, self._left = True, self._left + 1
        epoch = self.epoch
        yield from self._samples(self.order(epoch)[self.position :])
        self._passed |= epoch == self.epoch  # else a look at the next epoch has begun meanwhile

    @abstractmethod
    def _samples(self, left: NDArray[np.int64]) -> Iterable[Sample]:
        """What this rank has of the samples that are left of an epoch."""


# ---- A sampler that resumes in the middle of an epoch, with any number of trainers
#
# The batch is the whole job's: when trainers come or go, each takes a larger or smaller part of the same
# batches, and no sample of an epoch is lost or comes twice.

T = TypeVar("T")


class ElasticBatchSampler(ResumableSampler[list[int]]):
    """Batches for trainer `rank` of `trainers`: its part of each batch of `batch_size` samples of the job.

    For `DataLoader(data, batch_sampler=sampler)`. Parts differ by one sample at most; for the gradient of the
    whole batch, scale the sum of the losses by `trainers / batch_size`, as DDP takes the mean over trainers.
    What is left of an epoch after its last whole batch is left out, other samples in each epoch.

        for batch in sampler.batches(loader): ...       # one epoch, or what is left of it

    Training has used `position` samples of epoch `epoch`; the batch that `batches` has given out counts. That
    is the sampler's state, of any number of trainers and any batch size.
    """

    def __init__(
        self, length: int, batch_size: int, *, rank: int, trainers: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        super().__init__(length, rank=rank, trainers=trainers, seed=seed, shuffle=shuffle)
        if not trainers <= batch_size <= length:
            raise UsageError(
                f"batch_size is {batch_size}, of all trainers together; it must be from {trainers}, their "
                f"number, to {length}, the number of samples"
            )
        self._batch_size = batch_size

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._length // self._batch_size

    def _samples(self, left: NDArray[np.int64]) -> Iterator[list[int]]:
        size = self._batch_size
        low, high = (part * size // self._trainers for part in (self._rank, self._rank + 1))
        for first in range(0, len(left) - size + 1, size):
            yield left[first + low : first + high].tolist()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches, each counted as used when it is given out."""
        return self._counted(loader, self._batch_size, least=self._batch_size)

    def load_state_dict(self, state: Fields) -> None:
        super().load_state_dict(state)
        self._use(0, least=self._batch_size)
