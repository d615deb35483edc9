"""What `fleet` asks of either kind of training. Knows the questions; `collective` and `ps` know the
answers.
"""

from __future__ import annotations

from typing import Protocol

import torch

from trainers.optimizer import DistributedOptimizer
from trainers.strategy import DistributedStrategy


class Runtime(Protocol):
    """One process's side of a job. Every method raises UsageError when its turn has not come or has
    passed.
    """

    strategy: DistributedStrategy

    def distributed_model(self, model: torch.nn.Module) -> torch.nn.Module: ...

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> DistributedOptimizer: ...

    def barrier_worker(self) -> None: ...

    def init_server(self) -> None: ...

    def run_server(self) -> None: ...

    def init_worker(self) -> None: ...

    def stop_worker(self) -> None: ...
