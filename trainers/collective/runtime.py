"""Collective training behind the fleet API: process group, DataParallel, the optimizer as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from trainers.collective.agreement import Agreement
from trainers.collective.data_parallel import DataParallel
from trainers.collective.group import start
from trainers.data.ahead import Batch
from trainers.errors import UsageError
from trainers.optimizer import DistributedOptimizer
from trainers.ps.tables.shrink import ShrinkPolicy
from trainers.ps.trainer.prefetch import Ids
from trainers.roles.identity import Identity
from trainers.runtime import Where
from trainers.strategy import DistributedStrategy


class CollectiveRuntime:
    """Joins the process group when made. `resumed` is the step of the last checkpoint that was loaded."""

    def __init__(self, identity: Identity, strategy: DistributedStrategy) -> None:
        self.strategy = strategy
        self.resumed = 0
        self.agreement = Agreement()
        start(identity)

    def distributed_model(self, model: torch.nn.Module) -> DataParallel:
        return DataParallel(
            model,
            find_unused_parameters=self.strategy.find_unused_parameters,
            bucket_cap_mb=self.strategy.fuse_grad_size_in_MB,
        )

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> DistributedOptimizer:
        return DistributedOptimizer(optimizer)

    def barrier_worker(self) -> None:
        dist.barrier()

    def prefetch(self, batches: Iterable[Batch], ids: Callable[[Batch], Ids]) -> Iterator[Batch]:
        return iter(batches)  # every row is here already

    def resume_step(self) -> int:
        return self.resumed

    def save(self, dirname: Where, mode: int) -> None:
        raise _no_servers("save_persistables")

    def shrink(self, policy: ShrinkPolicy) -> int:
        raise _no_servers("shrink")

    def init_server(self, dirname: str | None = None) -> None:
        raise _no_servers("init_server")

    def run_server(self) -> None:
        raise _no_servers("run_server")

    def init_worker(self) -> None:
        raise _no_servers("init_worker")

    def stop_worker(self) -> None:
        raise _no_servers("stop_worker")


def _no_servers(call: str) -> UsageError:
    return UsageError(
        f"fleet.{call}() belongs to parameter-server training, and this job is collective; "
        "remove the call, or use fleet.init(is_collective=False) and start with --server_num"
    )
