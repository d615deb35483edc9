"""The fleet API's calls for training: model, optimizer, and the loop over a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Unpack

import torch

from trainers.calls.begun import Begun
from trainers.data import loop
from trainers.data.ahead import Batch
from trainers.data.batch import Batch as DataBatch
from trainers.data.loop import Result, Step
from trainers.errors import UsageError
from trainers.optimizer import DistributedOptimizer
from trainers.ps.trainer.prefetch import Ids
from trainers.strategy import DistributedStrategy


class Training(Begun):
    """The same calls for either kind of training."""

    def distributed_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model to train: wrapped for data parallel training, or served by the parameter servers."""
        return self._ready("distributed_model").distributed_model(model)

    def distributed_optimizer(
        self, optimizer: torch.optim.Optimizer, strategy: DistributedStrategy | None = None
    ) -> DistributedOptimizer:
        """The optimizer to train with. `strategy` replaces the one given to `init`."""
        runtime = self._ready("distributed_optimizer")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"distributed_optimizer wants a torch.optim optimizer, not {optimizer!r}")
        if strategy is not None:
            runtime.strategy = strategy
        return runtime.distributed_optimizer(optimizer)

    def barrier_worker(self) -> None:
        """Wait until every trainer is here."""
        self._ready("barrier_worker").barrier_worker()

    def prefetch(self, batches: Iterable[Batch], ids: Callable[[Batch], Ids]) -> Iterator[Batch]:
        """The same batches, while the rows of the next one are already fetched from the servers. Up to two
        batches are taken from `batches` ahead of the one that is given out.

        `ids(batch)` tells with which tensors (the very same objects) the served embeddings will be called:
        `{module: tensor or tensors}`, or just those when the model has one.
        """
        return self._ready("prefetch").prefetch(batches, ids)

    def train_from_dataset(
        self,
        step: Step,
        dataset: Iterable[DataBatch],
        *,
        ids: Callable[[DataBatch], Ids] | None = None,
        **printing: Unpack[loop.Printing],
    ) -> Result:
        """One pass over a data set, `step(batch)` for each batch; see trainers.data.loop. With `ids`, rows
        are prefetched as by `prefetch`.
        """
        prefetch = self._prefetch("train_from_dataset", ids)
        return loop.train_from_dataset(step, dataset, prefetch=prefetch, **printing)

    def infer_from_dataset(
        self,
        step: Step,
        dataset: Iterable[DataBatch],
        *,
        ids: Callable[[DataBatch], Ids] | None = None,
        **printing: Unpack[loop.Printing],
    ) -> Result:
        """The same without gradients; call `model.eval()` before it."""
        prefetch = self._prefetch("infer_from_dataset", ids)
        return loop.infer_from_dataset(step, dataset, prefetch=prefetch, **printing)

    def _prefetch(self, call: str, ids: Callable[[DataBatch], Ids] | None) -> loop.Prefetch | None:
        runtime = self._ready(call)
        return None if ids is None else lambda batches: runtime.prefetch(batches, ids)
