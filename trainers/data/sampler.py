"""Sample with a position that can be saved, even in the middle of an epoch and for any number of trainers.

The order is a function of (seed, epoch), and the position is a number of samples. ElasticBatchSampler's batch
belongs to the whole job. When trainers join or leave, each takes a larger or smaller part of the same
batches. Samples of an epoch are therefore not lost or repeated. `shard` has a sampler whose batch belongs to
each trainer.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from fleetrun.aliases import Fields
from trainers.errors import UsageError
from trainers.process.log import glog

# ---- Epochs with a position that can be saved. Subclasses decide which rank takes which samples.

Sample = TypeVar("Sample", covariant=True)
Item = TypeVar("Item")

_SEED_WORD = 1 << 32
_OFTEN = 3
"""Unfinished passes before a line reports them. One or two are often just a look at a batch."""


def check_rank(rank: int, trainers: int) -> None:
    """Raise UsageError for a rank outside 0 to trainers - 1."""
    if not 0 <= rank < trainers:
        raise UsageError(f"rank is {rank} of {trainers} trainers; ranks are from 0 to {trainers - 1}")


class ResumableSampler(Sampler[Sample]):
    """A sampler over epochs whose position can be saved and loaded.

    All trainers together have used the first `position` samples of epoch `epoch`. This state holds for any
    number of trainers and any batch size.
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
        """True after a complete pass that `batches` did not count. The next pass is then another epoch."""
        self._left = 0
        """Consecutive unfinished passes over this epoch."""
        self.epoch = 0
        self.position = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. If it is the current epoch, the position stays."""
        if epoch != self.epoch:
            self.epoch, self.position, self._left = epoch, 0, 0
        self._passed = False

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the samples of an epoch in order.

        numpy guarantees that RandomState's stream never changes (NEP 19). A new version therefore cannot
        change the order in the middle of an epoch.
        """
        if not self._shuffle:
            return np.arange(self._length)
        seed = [self._seed % _SEED_WORD, self._seed // _SEED_WORD % _SEED_WORD, epoch % _SEED_WORD]
        return np.random.RandomState(seed).permutation(self._length)

    def state_dict(self) -> dict[str, int]:
        if self._uncounted:
            raise UsageError("Batches were taken without being counted. Loop over sampler.batches(loader).")
        return {"epoch": self.epoch, "position": self.position} | self._of()

    def load_state_dict(self, state: Fields) -> None:
        """Load a state. Raises UsageError for the state of another order, because samples would be lost or
        repeated.
        """
        other = [
            f"{name} {state[name]}, now {value}" for name, value in self._of().items() if state[name] != value
        ]
        if other:
            raise UsageError(
                f"The sampler's state belongs to other data or another order: {'; '.join(other)}"
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._uncounted = self._passed = False

    def _of(self) -> dict[str, int]:
        return {"length": self._length, "seed": self._seed, "shuffle": int(self._shuffle)}

    def _counted(self, loader: Iterable[Item], samples: int, least: int) -> Iterator[Item]:
        """Yield the loader's batches. Each yielded batch counts as `samples` used samples of the job."""
        self._use(0, least)  # after smaller batches, the rest of the epoch may be too short for one batch
        try:
            for batch in self._started(loader):
                self._uncounted = self._passed = False
                self._use(samples, least)
                yield batch
        finally:  # batches that the loader has read ahead are not used
            self._uncounted, self._passed, self._left = False, False, 0

    def _use(self, samples: int, least: int) -> None:
        """Count `samples` more as used. An epoch with fewer than `least` remaining samples is over."""
        self.position += samples
        if self._length - self.position < least:
            self.epoch, self.position = self.epoch + 1, 0

    def _started(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Start the loader without an extra random number in the middle of an epoch.

        A DataLoader draws a random number when its loop starts. If a resumed loop drew it again, dropout
        would get other numbers than without the restart.
        """
        before = torch.get_rng_state()
        batches = iter(loader)
        if self.position:
            torch.set_rng_state(before)
        return batches

    def __iter__(self) -> Iterator[Sample]:
        """Yield from the current position to the end of the epoch, and after a whole pass, from the next
        epoch.

        An unfinished pass does not count. One rank alone may therefore look at a batch, and shards stay
        disjoint.
        """
        if self._passed:
            self.set_epoch(self.epoch + 1)
        elif self._left == _OFTEN:
            glog(
                f"{type(self).__name__}: {_OFTEN} passes were left early, and each started with the same "
                f"samples of epoch {self.epoch}. To get other samples, call set_epoch(epoch) of the sampler "
                "on all ranks before each pass."
            )
        self._uncounted, self._left = True, self._left + 1
        epoch = self.epoch
        yield from self._samples(self.order(epoch)[self.position :])
        self._passed |= epoch == self.epoch  # otherwise another pass has already started the next epoch

    @abstractmethod
    def _samples(self, left: NDArray[np.int64]) -> Iterable[Sample]:
        """Return this rank's part of the remaining samples of an epoch."""


# ---- A sampler that resumes in the middle of an epoch, with any number of trainers

T = TypeVar("T")


class ElasticBatchSampler(ResumableSampler[list[int]]):
    """Batches for trainer `rank` of `trainers`, its part of each batch of `batch_size` samples of the job.

    Use it as `DataLoader(data, batch_sampler=sampler)`. Parts differ by at most one sample. With `lengths`
    (one number for each sample, such as its tokens), they also have about equally large sums of lengths, so
    no trainer waits for another one's long sequences. The samples of a batch stay the same. For the gradient
    of the whole batch, scale the sum of the losses by `trainers / batch_size`, because DDP takes the mean
    over trainers. The samples after the last whole batch of an epoch are left out. They differ in each epoch.

        for batch in sampler.batches(loader): ...       # one epoch, or the rest of it

    The state is the epoch and the number of used samples, including the batch that `batches` yielded last. It
    holds for any number of trainers and any batch size. Raises UsageError for an invalid batch size, and for
    another number of lengths than samples.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        rank: int,
        trainers: int,
        seed: int = 0,
        shuffle: bool = True,
        lengths: Sequence[float] | None = None,
    ) -> None:
        super().__init__(length, rank=rank, trainers=trainers, seed=seed, shuffle=shuffle)
        if not trainers <= batch_size <= length:
            raise UsageError(
                f"batch_size is {batch_size} for all trainers together; it must be from {trainers} (the "
                f"number of trainers) to {length} (the number of samples)"
            )
        if lengths is not None and len(lengths) != length:
            raise UsageError(f"lengths has {len(lengths)} numbers for {length} samples")
        self._batch_size = batch_size
        self._lengths = None if lengths is None else np.asarray(lengths, np.float64)

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        return self._length // self._batch_size

    def _samples(self, left: NDArray[np.int64]) -> Iterator[list[int]]:
        size = self._batch_size
        low, high = (part * size // self._trainers for part in (self._rank, self._rank + 1))
        for first in range(0, len(left) - size + 1, size):
            batch = left[first : first + size]
            if self._lengths is not None:
                # The samples of the batch, part by part. The longest sample goes first, to the part with the
                # smallest sum.
                lengths = self._lengths[batch]
                ends = [part * len(batch) // self._trainers for part in range(self._trainers + 1)]
                parts = [(0.0, part) for part in range(self._trainers)]
                places: list[list[int]] = [[] for _ in parts]
                for place in (-lengths).argsort(kind="stable").tolist():
                    total, part = heapq.heappop(parts)
                    places[part].append(place)
                    if len(places[part]) < ends[part + 1] - ends[part]:
                        heapq.heappush(parts, (total + lengths[place], part))
                batch = np.take(batch, np.concatenate([sorted(part) for part in places]))
            yield batch[low:high].tolist()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the loader's batches, and count each as used when it is yielded."""
        return self._counted(loader, self._batch_size, least=self._batch_size)

    def load_state_dict(self, state: Fields) -> None:
        super().load_state_dict(state)
        self._use(0, least=self._batch_size)
