"""Passes over a data set whose place can be saved: the order is a function of (seed, epoch), the place a
number of samples. Pure; leaves who takes which samples to the samplers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from trainers.errors import UsageError

Sample = TypeVar("Sample", covariant=True)
T = TypeVar("T")

_WORD = 1 << 32


class ResumableSampler(Sampler[Sample]):
    """Training has used the first `position` samples of epoch `epoch`, all trainers together. That is the
    state: of any number of trainers and any batch size.
    """

    def __init__(self, length: int, *, rank: int, trainers: int, seed: int, shuffle: bool) -> None:
        if not 0 <= rank < trainers:
            raise UsageError(f"rank is {rank} of {trainers} trainers; ranks go from 0 to trainers - 1")
        self._length = length
        self._rank = rank
        self._trainers = trainers
        self._seed = seed
        self._shuffle = shuffle
        self._uncounted = False
        self.epoch = 0
        self.position = 0

    def order(self, epoch: int) -> NDArray[np.int64]:
        """The samples of an epoch in their order. numpy promises RandomState's stream for ever (NEP 19), so
        that a new version does not change the order in the middle of an epoch.
        """
        if not self._shuffle:
            return np.arange(self._length)
        seed = [self._seed % _WORD, self._seed // _WORD % _WORD, epoch % _WORD]
        return np.random.RandomState(seed).permutation(self._length)

    def state_dict(self) -> dict[str, int]:
        if self._uncounted:
            raise UsageError("batches were taken that nobody counted; loop over sampler.batches(loader)")
        return {"epoch": self.epoch, "position": self.position} | self._of()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises UsageError for the state of another order: samples would be lost, and come twice."""
        other = [
            f"{name} {state[name]}, now {value}" for name, value in self._of().items() if state[name] != value
        ]
        if other:
            raise UsageError(f"the sampler's state is of other data or another order: {'; '.join(other)}")
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._uncounted = False

    def _of(self) -> dict[str, int]:
        return {"length": self._length, "seed": self._seed, "shuffle": int(self._shuffle)}

    def _counted(self, loader: Iterable[T], samples: int, least: int) -> Iterator[T]:
        """The loader's batches; with each that is given out, `samples` of the job are used."""
        self._use(0, least)  # a place that was left with smaller batches may have too little for one of these
        try:
            for batch in self._begun(loader):
                self._uncounted = False
                self._use(samples, least)
                yield batch
        finally:
            self._uncounted = False  # what the loader has read ahead is used by nobody

    def _use(self, samples: int, least: int) -> None:
        """So many more samples of the job. An epoch that has less than `least` left is over."""
        self.position += samples
        if self._length - self.position < least:
            self.epoch, self.position = self.epoch + 1, 0

    def _begun(self, loader: Iterable[T]) -> Iterator[T]:
        """A DataLoader draws a random number when its loop begins. A loop that is taken up in the middle of
        an epoch must not draw it again: dropout would get other numbers than without the restart.
        """
        before = torch.get_rng_state()
        begun = iter(loader)
        if self.position:
            torch.set_rng_state(before)
        return begun

    @abstractmethod
    def __iter__(self) -> Iterator[Sample]: ...
