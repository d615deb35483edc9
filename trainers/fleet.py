"""The fleet API: module-level functions on one Fleet object. Knows the calls and their order; leaves the
work to `collective` and `ps`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Unpack

import torch

from trainers.collective.runtime import CollectiveRuntime
from trainers.continuing import Continuing
from trainers.data import loop
from trainers.data.ahead import Batch
from trainers.data.batch import Batch as DataBatch
from trainers.data.loop import Result, Step
from trainers.errors import NotSupportedError, UsageError
from trainers.lastwords import install
from trainers.optimizer import DistributedOptimizer
from trainers.ps.tables.shrink import ShrinkPolicy
from trainers.ps.trainer.prefetch import Ids
from trainers.role import EnvironmentRoleMaker, Identity, RoleMaker
from trainers.runtime import Runtime, Where
from trainers.strategy import DistributedStrategy

__all__ = [
    "DistributedStrategy",
    "barrier_worker",
    "distributed_model",
    "distributed_optimizer",
    "infer_from_dataset",
    "init",
    "init_server",
    "init_worker",
    "is_first_worker",
    "is_server",
    "is_worker",
    "load_checkpoint",
    "prefetch",
    "resume_step",
    "run_server",
    "save_checkpoint",
    "save_inference_model",
    "save_persistables",
    "server_endpoints",
    "server_index",
    "server_num",
    "shrink",
    "stop_requested",
    "stop_worker",
    "train_from_dataset",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]


class Fleet(Continuing):
    """One process's view of its job. Every method but `init` raises UsageError before `init`."""

    def __init__(self) -> None:
        super().__init__()
        self._identity: Identity | None = None

    def init(
        self,
        is_collective: bool = False,
        role_maker: RoleMaker | None = None,
        strategy: DistributedStrategy | None = None,
    ) -> None:
        """Find out who this process is and, for a collective job, join the process group.

        Raises UsageError when the job was not started for this kind of training.
        """
        install()
        if self._runtime is not None:
            raise UsageError("fleet.init() was called before; call it once, at the start of the script")
        identity = (role_maker or EnvironmentRoleMaker(os.environ)).identity()
        _check_kind(is_collective, identity)
        self._runtime = _runtime(is_collective, identity, strategy or DistributedStrategy())
        self._identity = identity

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

    def is_server(self) -> bool:
        return self._who("is_server").is_server

    def is_worker(self) -> bool:
        return not self._who("is_worker").is_server

    def is_first_worker(self) -> bool:
        identity = self._who("is_first_worker")
        return not identity.is_server and identity.index == 0

    def worker_num(self) -> int:
        return self._who("worker_num").worker_num

    def worker_index(self) -> int:
        """This trainer's rank. On a server too, as in Paddle, it is the process's index in its own role."""
        return self._who("worker_index").index

    def server_num(self) -> int:
        return len(self._who("server_num").servers)

    def server_index(self) -> int:
        identity = self._who("server_index")
        if not identity.is_server:
            raise UsageError("fleet.server_index() was called on a trainer; ask fleet.is_server() first")
        return identity.index

    def worker_endpoints(self, to_string: bool = False) -> str | list[str]:
        """`host:port` of every trainer in rank order; joined by commas with `to_string`."""
        identity = self._who("worker_endpoints")
        if not identity.trainers:
            raise NotSupportedError(f"{identity.source} has no trainer endpoints; start with fleetrun")
        return ",".join(identity.trainers) if to_string else list(identity.trainers)

    def server_endpoints(self, to_string: bool = False) -> str | list[str]:
        """`host:port` of every server in rank order; joined by commas with `to_string`."""
        identity = self._who("server_endpoints")
        return ",".join(identity.servers) if to_string else list(identity.servers)

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

    def init_server(self, dirname: str | None = None) -> None:
        """Bind this server's endpoint, and begin with the tables saved in `dirname`, if given: a folder that
        every server can read.
        """
        self._ready("init_server").init_server(dirname)

    def run_server(self) -> None:
        """Serve until every trainer has called stop_worker, or SIGTERM."""
        self._ready("run_server").run_server()

    def init_worker(self) -> None:
        """Connect to the servers; all trainers start from trainer 0's initial values."""
        self._ready("init_worker").init_worker()

    def save_persistables(self, dirname: Where, mode: int = 0) -> None:
        """Save all tables to a folder that every server can write: a path of a shared disk, or a URL that
        fsspec knows. For one trainer to call; the others may go on training.

        mode: 0 everything; 1 the rows changed since the last save, beside it; 2 values only, for serving; 3
        as 0, when a day has passed in the tables' statistics. Raises SaveError or ServerError; the former
        save stays current then.
        """
        if mode not in (0, 1, 2, 3):
            raise UsageError(f"save_persistables mode is {mode!r}; it must be 0, 1, 2 or 3")
        self._ready("save_persistables").save(dirname, mode)

    def save_inference_model(self, dirname: Where) -> None:
        """Save what serving needs: the values of all tables, without optimizer state and statistics.
        `trainers.ps.read_values(dirname)` reads them without servers.
        """
        self._ready("save_inference_model").save(dirname, 2)

    def shrink(self, policy: ShrinkPolicy | None = None) -> int:
        """A day has passed: age the statistics of all tables that keep them, and remove the rows that are
        not worth their memory. For one trainer to call; returns how many rows went.
        """
        return self._ready("shrink").shrink(policy or ShrinkPolicy())

    def stop_worker(self) -> None:
        """Say that this trainer has finished, wait for the others, and bring the trained values into the
        model. When fleetrun is ending this process (`stop_requested`), it has not finished: its pushes are
        waited for, nobody else is.
        """
        self._ready("stop_worker").stop_worker()

    def _who(self, call: str) -> Identity:
        if self._identity is None:
            raise UsageError(f"fleet.{call}() was called before fleet.init()")
        return self._identity


def _check_kind(is_collective: bool, identity: Identity) -> None:
    if is_collective and identity.launched_as_ps:
        raise UsageError(
            "fleet.init(is_collective=True), but this job was started with parameter servers; "
            "start it without --server_num and --trainer_num, or call fleet.init(is_collective=False)"
        )
    if not is_collective and not identity.servers:
        raise UsageError(
            f"fleet.init(is_collective=False) wants parameter servers, and {identity.source} has none; "
            "start with `fleetrun --server_num=1 --trainer_num=2`, or call fleet.init(is_collective=True)"
        )


def _runtime(is_collective: bool, identity: Identity, strategy: DistributedStrategy) -> Runtime:
    if is_collective:
        return CollectiveRuntime(identity, strategy)
    # Late: its kernels take a third of a second to load, which a collective job need not wait for.
    from trainers.ps.runtime import ServerRuntime, TrainerRuntime

    return ServerRuntime(identity, strategy) if identity.is_server else TrainerRuntime(identity, strategy)


_fleet = Fleet()
init = _fleet.init
distributed_model = _fleet.distributed_model
distributed_optimizer = _fleet.distributed_optimizer
is_server = _fleet.is_server
is_worker = _fleet.is_worker
is_first_worker = _fleet.is_first_worker
worker_num = _fleet.worker_num
worker_index = _fleet.worker_index
server_num = _fleet.server_num
server_index = _fleet.server_index
worker_endpoints = _fleet.worker_endpoints
server_endpoints = _fleet.server_endpoints
barrier_worker = _fleet.barrier_worker
prefetch = _fleet.prefetch
resume_step = _fleet.resume_step
save_checkpoint = _fleet.save_checkpoint
load_checkpoint = _fleet.load_checkpoint
stop_requested = _fleet.stop_requested
train_from_dataset = _fleet.train_from_dataset
infer_from_dataset = _fleet.infer_from_dataset
save_persistables = _fleet.save_persistables
save_inference_model = _fleet.save_inference_model
shrink = _fleet.shrink
init_server = _fleet.init_server
run_server = _fleet.run_server
init_worker = _fleet.init_worker
stop_worker = _fleet.stop_worker
