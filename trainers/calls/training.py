"""The fleet API's calls for training: model, optimizer, and the loop over a data set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Unpack

import torch

from trainers.calls.begun import Begun
from trainers.collective.runtime import CollectiveRuntime
from trainers.data import loop
from trainers.data.ahead import Batch
from trainers.data.batch import Batch as DataBatch
from trainers.data.loop import Result, Step
from trainers.errors import UsageError
from trainers.legacy import DistributeTranspilerConfig, strategy_of
from trainers.optimizer import DistributedOptimizer
from trainers.ps.trainer.prefetch import Ids
from trainers.runtime import Runtime
from trainers.strategy import DistributedStrategy


class Training(Begun):
    """The same calls for either kind of training."""

    def __init__(self) -> None:
        super().__init__()
        self._optimizer: DistributedOptimizer | None = None

    def distributed_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model to train: wrapped for data parallel training, or served by the parameter servers."""
        runtime = self._fitting("distributed_model")
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"distributed_model wants a torch.nn.Module, not {model!r}")
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise UsageError(
                "distributed_model was given a model that is wrapped for data parallel training already; "
                "gradients would be averaged twice: wrap it once"
            )
        return runtime.distributed_model(model)

    def distributed_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
    ) -> DistributedOptimizer:
        """The optimizer to train with. `strategy` replaces the one given to `init`; in a collective job it
        must not ask for something else than the model has been wrapped for.
        """
        runtime = self._ready("distributed_optimizer")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"distributed_optimizer wants a torch.optim optimizer, not {optimizer!r}")
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError("distributed_optimizer was given fleet's optimizer; give it torch's, once")
        with contextlib.ExitStack() as refused:
            refused.callback(setattr, runtime, "strategy", runtime.strategy)  # then the new one never was
            if strategy is not None:
                runtime.strategy = strategy_of(strategy)
            self._optimizer = self._fitting("distributed_optimizer").distributed_optimizer(optimizer)
            refused.pop_all()
        return self._optimizer

    def minimize(self, loss: torch.Tensor) -> None:
        """`minimize` of the optimizer that `distributed_optimizer` has returned last."""
        self._ready("minimize")
        if self._optimizer is None:
            raise UsageError("fleet.minimize() was called before fleet.distributed_optimizer(optimizer)")
        self._optimizer.minimize(loss)

    def distributed_scaler(self, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
        """The scaler for a script that scales losses itself: all ranks skip a step in which one of them has
        found gradients that are not finite. It shares its state with the one given.
        """
        runtime = self._ready("distributed_scaler")
        if not isinstance(runtime, CollectiveRuntime):
            raise UsageError(
                "fleet.distributed_scaler() belongs to collective training, and this job has parameter "
                "servers: they take float32; for rows in half precision on the wire use strategy.ps_configs "
                "wire_dtype"
            )
        if not isinstance(scaler, torch.amp.GradScaler):
            raise UsageError(f"distributed_scaler wants a torch.amp.GradScaler, not {scaler!r}")
        from trainers.collective.scaling import DistributedScaler

        return DistributedScaler(scaler)

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

    def _fitting(self, call: str) -> Runtime:
        """The runtime, whose strategy fits this kind of job: it may have changed since it was given."""
        runtime = self._ready(call)
        runtime.strategy.fits(isinstance(runtime, CollectiveRuntime))
        return runtime

    def _prefetch(self, call: str, ids: Callable[[DataBatch], Ids] | None) -> loop.Prefetch | None:
        runtime = self._ready(call)
        return None if ids is None else lambda batches: runtime.prefetch(batches, ids)
