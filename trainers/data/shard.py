"""Divide a data set among trainers. The functions give equal results on every trainer, so shares are
disjoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from trainers import progress
from trainers.data.sampler import ResumableSampler, check_rank
from trainers.errors import UsageError

T = TypeVar("T")


class ShardSampler(ResumableSampler[int]):
    """Indices of trainer `rank` of `trainers`, every trainers-th of one shuffled order, cut to equal lengths.

    Lengths are equal because, in synchronous training, a trainer with an extra batch would wait forever. The
    order changes with every whole pass, or with `set_epoch(epoch)` on all ranks. `seed` makes it repeatable.
    An unfinished pass starts again. To resume training at its position, with any number of trainers, loop
    over `batches`, and save the sampler's state:

        loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
        for batch in sampler.batches(loader): ...       # one epoch, or the rest of it
    """

    def __init__(
        self, length: int, rank: int, trainers: int, *, shuffle: bool = True, seed: int = 0, epoch: int = 0
    ) -> None:
        super().__init__(length, rank=rank, trainers=trainers, seed=seed, shuffle=shuffle)
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of indices in a whole epoch."""
        return self._length // self._trainers

    def _samples(self, left: NDArray[np.int64]) -> Any:
        return left[self._rank :: self._trainers][: len(left) // self._trainers].tolist()

    def batches(self, loader: DataLoader[T]) -> Iterator[T]:
        """Yield the loader's batches, and count each as used when it is yielded.

        Raises UsageError for a loader that does not make batches of this sampler's indices.
        """
        size = loader.batch_size
        if size is None or loader.sampler is not self:
            raise UsageError("batches() needs a DataLoader(data, batch_size=..., sampler=this sampler)")
        least = size if loader.drop_last else 1
        return self._counted(loader, size * self._trainers, least=least * self._trainers)


class Sized(Protocol):
    """A map-style data set with a length."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


def shard_loader(
    dataset: Sized,
    batch_size: int,
    *,
    rank: int,
    trainers: int,
    seed: int = 0,
    shuffle: bool = True,
    epoch: int = 0,
    num_workers: int = 0,
) -> DataLoader[Any]:
    """Return a loader over this trainer's share. The last, short batch is dropped.

    Each whole loop over the loader is one epoch, and the first one is `epoch` (see `ShardSampler`). Raises
    UsageError if a share is too small for one batch.
    """
    sampler = ShardSampler(len(dataset), rank, trainers, shuffle=shuffle, seed=seed, epoch=epoch)
    if len(sampler) < batch_size:
        raise UsageError(
            f"batch_size is {batch_size}, but {len(dataset)} samples for {trainers} trainers are only "
            f"{len(sampler)} for each. Use a smaller batch_size."
        )
    return _Loader(
        dataset,  # type: ignore[arg-type]  # torch's Dataset has no length
        batch_size=batch_size,
        sampler=sampler,
        drop_last=True,
        num_workers=num_workers,
    )


class _Loader(DataLoader[Any]):
    """Counts its batches as progress, except during an evaluation."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        assert isinstance(self.sampler, ShardSampler)
        for number, batch in enumerate(super().__iter__(), 1):
            if torch.is_grad_enabled():
                progress.meter.drawn(self.batch_size or 0)
            self.sampler._passed = number == len(self)  # workers may have read to the end before
            yield batch


def get_file_shard(files: Sequence[str], rank: int, trainers: int) -> list[str]:
    """Return the files of trainer `rank` of `trainers`, as Paddle's `fleet.util.get_file_shard` does.

    Each trainer gets a block of neighbouring files. Blocks are equally long, or the first ones have one file
    more. With more trainers than files, the last trainers take part without data. Raises UsageError for a
    string instead of a list, for an empty list, and for a rank outside 0 to trainers - 1.
    """
    if isinstance(files, str | bytes):
        raise UsageError(f"get_file_shard was given {files!r}; it must be a list of files")
    if not files:
        raise UsageError(
            "get_file_shard was given no files. If you use a pattern, check that it matches files."
        )
    check_rank(rank, trainers)
    block, longer = divmod(len(files), trainers)
    first = rank * block + min(rank, longer)
    return list(files[first : first + block + (rank < longer)])
