"""A parameter server behind the fleet API."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from trainers import progress
from trainers.errors import UsageError
from trainers.optimizer import DistributedOptimizer
from trainers.process.hooks import leave_dismissed
from trainers.ps.optimizer import ServedScaler
from trainers.ps.saves.read import open_saves
from trainers.ps.server.server import Server, ServerPlan
from trainers.ps.tables.spec import FullError, start_of, torch_memory
from trainers.ps.tables.warm import warm_up_server
from trainers.ps.trainer.layout import check_supported
from trainers.ps.trainer.torchrec import unwrapped
from trainers.ps.transport import keys_of
from trainers.roles.identity import Identity
from trainers.runtime import Runtime
from trainers.strategy import DistributedStrategy


class _OptimizerOfServer(DistributedOptimizer):
    """The optimizer of a script that also runs on a server, where nothing is trained."""

    def step(self, closure: object = None) -> NoReturn:
        raise UsageError(f"fleet.distributed_optimizer(...).step() {ServerRuntime.refuses}")


class ServerRuntime(Runtime):
    """The runtime of a server. It returns model and optimizer unchanged. Trainers define the tables."""

    is_server = True
    refuses = "was called on a server. Move the trainers' code under `if fleet.is_worker():`."

    def __init__(self, identity: Identity, strategy: DistributedStrategy) -> None:
        super().__init__(identity, strategy)
        self._server: Server | None = None

    def distributed_model(self, model: Module) -> Module:
        return model

    def distributed_optimizer(self, optimizer: Optimizer) -> DistributedOptimizer:
        inner = unwrapped(optimizer)
        for each in inner:
            check_supported(each)
        return _OptimizerOfServer(inner[0])

    def distributed_scaler(self, scaler: GradScaler) -> GradScaler:
        return ServedScaler(scaler)

    def init_server(self, dirname: str | None = None, var_names: Sequence[str] | None = None) -> None:
        if self._server is not None:
            raise UsageError("fleet.init_server() was called twice")
        if var_names is not None and (isinstance(var_names, str) or not var_names or dirname is None):
            raise UsageError(
                f"fleet.init_server() was given var_names={var_names!r}. Pass a dirname and a list of "
                "tables and parameters in it, or neither."
            )
        with _enough_memory():
            identity, configs = self.identity, self.strategy.ps()
            if dirname is not None:  # raises early without saved tables, or without these names
                open_saves(dirname).only(var_names or ())
            warm_up_server()
            self._server = Server(
                ServerPlan(
                    endpoints=identity.servers,
                    index=identity.index,
                    trainers=identity.worker_num,
                    sync=not self.strategy.a_sync,
                    configs=configs,
                    max_staleness=self.strategy.asynchronous().max_staleness,
                    settings=self.strategy.agreed(),
                    start=start_of(identity.trainers),
                    keys=keys_of(os.environ),
                    load_from=dirname,
                    load_only=var_names,
                    durable_dir=Path(configs.durability_dir or identity.scratch),
                ),
                progress.meter.tables if progress.meter.listened_to else None,
            )

    def run_server(self) -> None:
        if self._server is None:
            raise UsageError("fleet.run_server() was called before fleet.init_server()")
        progress.meter.begins_to_serve()
        with _enough_memory():
            self._server.run()
        if self._server.dismissed:
            leave_dismissed()


@contextmanager
def _enough_memory() -> Iterator[None]:
    """Raise FullError if Python, numpy or torch runs out of memory."""
    try:
        with torch_memory():
            yield
    except MemoryError as error:
        raise FullError(
            f"This server has no memory left ({error or 'MemoryError'}). Start more servers, or add memory."
        ) from error
