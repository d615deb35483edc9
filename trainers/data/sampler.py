"""A sampler that goes on in the middle of an epoch, with any number of trainers.

The batch is the whole job's: when trainers come or go, each takes a larger or smaller part of the same
batches, and no sample of an epoch is lost or comes twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from trainers.data.passes import ResumableSampler
from trainers.errors import UsageError

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

    def __iter__(self) -> Iterator[list[int]]:
        """This trainer's parts from the present place to the end of the epoch, whatever is used meanwhile: a
        loader's workers are ahead of the training.
        """
        self._uncounted = True
        start, size = self.position, self._batch_size
        order = self.order(self.epoch)
        low, high = (part * size // self._trainers for part in (self._rank, self._rank + 1))
        for first in range(start, self._length - size + 1, size):
            yield order[first + low : first + high].tolist()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches, each counted as used when it is given out."""
        return self._counted(loader, self._batch_size, least=self._batch_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._use(0, least=self._batch_size)
