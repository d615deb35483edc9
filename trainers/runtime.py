"""What `fleet` asks of either kind of training. Knows the questions; `collective` and `ps` know the
answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeAlias

import torch

from trainers.data.loop import AnyBatch
from trainers.optimizer import DistributedOptimizer
from trainers.ps.tables.shrink import ShrinkPolicy
from trainers.ps.trainer.prefetch import Ids
from trainers.strategy import DistributedStrategy

Where: TypeAlias = str | os.PathLike[str]


class Runtime(Protocol):
    """One process's side of a job. Every method raises UsageError when its turn has not come or has
    passed.
    """

    strategy: DistributedStrategy

    def distributed_model(self, model: torch.nn.Module) -> torch.nn.Module: ...

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> DistributedOptimizer: ...

    def barrier_worker(self) -> None: ...

    def gather(self, mine: bytes, call: str) -> list[bytes]:
        """What every trainer gives here, in rank order; all call it. `call` is its name, for errors."""
        ...

    def prefetch(self, batches: Iterable[AnyBatch], ids: Callable[[AnyBatch], Ids]) -> Iterator[AnyBatch]: ...

    def resume_step(self) -> int: ...

    def save(self, dirname: Where, mode: int) -> None: ...

    def stand_ins(self, model: torch.nn.Module, where: Where) -> dict[torch.nn.Module, torch.nn.Module]:
        """Ordinary modules with the values of now, for those of the model that have theirs elsewhere.
        `where`: a folder in which servers may write for a moment.
        """
        ...

    def shrink(self, policy: ShrinkPolicy) -> int: ...

    def init_server(self, dirname: str | None = None) -> None: ...

    def run_server(self) -> None: ...

    def init_worker(self) -> None: ...

    def stop_worker(self) -> None: ...
