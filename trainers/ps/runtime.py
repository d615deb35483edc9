"""Parameter-server training behind the fleet API: which call may come when, on a server and on a trainer.
Leaves tables to `server` and `worker`.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path

import torch

from trainers.data.loop import AnyBatch, prefetched
from trainers.errors import FleetError, UsageError
from trainers.notice import notice_file, read_notice
from trainers.optimizer import DistributedOptimizer
from trainers.process.hooks import failed, leave_dismissed
from trainers.process.log import glog
from trainers.ps.net.keys import keys_of
from trainers.ps.saved.modes import SaveMode
from trainers.ps.saved.saves import current
from trainers.ps.server.server import Server, ServerPlan
from trainers.ps.tables.shrink import ShrinkPolicy
from trainers.ps.tables.spec import start_of
from trainers.ps.tables.warm import warm_up_server, warm_up_trainer
from trainers.ps.trainer.layout import Wishes, dense_of, plan
from trainers.ps.trainer.optimizers import check_supported
from trainers.ps.trainer.prefetch import Ids, by_module
from trainers.ps.trainer.served import ServedOptimizer, watch_model
from trainers.ps.trainer.worker import Local, Worker
from trainers.roles.identity import Identity
from trainers.runtime import Where
from trainers.strategy import DistributedStrategy


class ServerRuntime:
    """A server's process: it takes model and optimizer as they are; their tables come from the trainers."""

    def __init__(self, identity: Identity, strategy: DistributedStrategy) -> None:
        self.strategy = strategy
        self._identity = identity
        self._server: Server | None = None

    def distributed_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> DistributedOptimizer:
        check_supported(optimizer)
        return ServedOptimizer(optimizer, self)

    def barrier_worker(self) -> None:
        raise _not_a_trainer("barrier_worker")

    def gather(self, mine: bytes, call: str) -> list[bytes]:
        raise _not_a_trainer(call)

    def prefetch(self, batches: Iterable[AnyBatch], ids: Callable[[AnyBatch], Ids]) -> Iterator[AnyBatch]:
        raise _not_a_trainer("prefetch")

    def resume_step(self) -> int:
        raise _not_a_trainer("resume_step")

    def save(self, dirname: Where, mode: int) -> None:
        raise _not_a_trainer("save_persistables")

    def stand_ins(self, model: torch.nn.Module, where: Where) -> dict[torch.nn.Module, torch.nn.Module]:
        raise _not_a_trainer("save_inference_model")

    def shrink(self, policy: ShrinkPolicy) -> int:
        raise _not_a_trainer("shrink")

    def init_server(self, dirname: str | None = None) -> None:
        if self._server is not None:
            raise UsageError("fleet.init_server() was called twice")
        identity, configs = self._identity, self.strategy.ps()
        if dirname is not None:
            current(dirname)  # says at once that there is no save
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
                keep_in=Path(configs.durability_dir or identity.scratch),
            )
        )

    def run_server(self) -> None:
        if self._server is None:
            raise UsageError("fleet.run_server() was called before fleet.init_server()")
        self._server.run()
        if self._server.dismissed:
            leave_dismissed()

    def init_worker(self) -> None:
        raise _not_a_trainer("init_worker")

    def stop_worker(self) -> None:
        raise _not_a_trainer("stop_worker")

    @property
    def serving(self) -> bool:
        return False

    def step(self) -> None:
        raise _not_a_trainer("distributed_optimizer(...).step")

    def has_rows(self) -> bool:
        return False

    def drop_rows(self) -> None:
        return


class _Stage(Enum):
    """How far a trainer has come."""

    NEW = "fleet.init_worker() has not been called"
    TRAINING = "fleet.init_worker() has been called"
    STOPPED = "fleet.stop_worker() has been called"


class TrainerRuntime:
    """A trainer's process: from init_worker to stop_worker the servers hold the model's values."""

    def __init__(self, identity: Identity, strategy: DistributedStrategy) -> None:
        self.strategy = strategy
        self._identity = identity
        self._stage = _Stage.NEW
        self._model: torch.nn.Module | None = None
        self._optimizer: ServedOptimizer | None = None
        self._worker: Worker | None = None
        self._resumed = 0
        self._unwatch: Callable[[], None] = _nothing

    def distributed_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The same model; nn.Embedding(sparse=True) in it is served from init_worker on."""
        self._expect(_Stage.NEW, "distributed_model")
        if self._model is not None:
            raise UsageError("fleet.distributed_model() was called twice; a job serves one model")
        self._model = model
        model.__dict__.setdefault("clear_gradients", lambda: model.zero_grad())
        return model

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> DistributedOptimizer:
        self._expect(_Stage.NEW, "distributed_optimizer")
        check_supported(optimizer)
        self._optimizer = ServedOptimizer(optimizer, self)
        return self._optimizer

    def init_server(self, dirname: str | None = None) -> None:
        raise _not_a_server("init_server")

    def run_server(self) -> None:
        raise _not_a_server("run_server")

    def init_worker(self) -> None:
        self._expect(_Stage.NEW, "init_worker")
        if self._model is None:
            raise UsageError("fleet.init_worker() was called before fleet.distributed_model(model)")
        if self._optimizer is None:
            raise UsageError("fleet.init_worker() was called before fleet.distributed_optimizer(optimizer)")
        strategy, configs = self.strategy, self.strategy.ps()
        asynchronous = strategy.asynchronous() if strategy.a_sync else None
        geo = asynchronous is not None and asynchronous.k_steps > 0
        wishes = Wishes(configs=configs, tables=strategy.tables(), geo=geo, dense=strategy.dense == "servers")
        layout = plan(self._model, self._optimizer.inner, len(self._identity.servers), wishes)
        local = None
        if geo:
            local = Local(self._optimizer.local_step)
        elif not wishes.dense:
            local = Local(self._optimizer.local_step, *dense_of(self._model))
        self._worker = Worker(
            self._identity,
            layout,
            configs,
            asynchronous,
            settings=strategy.agreed(),
            keys=keys_of(os.environ),
            local=local,
        )
        warm_up_trainer(layout.specs(), geo=geo)
        self._worker.start()
        self._resumed = self._worker.step_number
        self._stage = _Stage.TRAINING
        self._unwatch = watch_model(self._model, self._worker, refresh=self.strategy.a_sync)
        self._optimizer.freeze_options()
        atexit.register(self._leave_at_exit)

    def barrier_worker(self) -> None:
        self._training("barrier_worker").barrier()

    def gather(self, mine: bytes, call: str) -> list[bytes]:
        return self._training(call).gather(mine)

    def prefetch(self, batches: Iterable[AnyBatch], ids: Callable[[AnyBatch], Ids]) -> Iterator[AnyBatch]:
        def prepare(batch: AnyBatch) -> None:
            worker = self._training("prefetch")
            worker.prefetch(by_module(ids(batch), worker.served_modules()))

        yield from prefetched(batches, prepare, self._training("prefetch").ahead)

    def resume_step(self) -> int:
        self._training("resume_step")
        return self._resumed

    def save(self, dirname: Where, mode: int) -> None:
        self._training("save_persistables").save(dirname, SaveMode(mode))

    def stand_ins(self, model: torch.nn.Module, where: Where) -> dict[torch.nn.Module, torch.nn.Module]:
        if not self.serving or model is not self._model:
            return {}
        from trainers.ps.trainer.stand_ins import stand_ins_of

        worker = self._training("save_inference_model")
        found = stand_ins_of(model, where, lambda folder: worker.save(folder, SaveMode.VALUES))
        worker.refresh()
        return found

    def shrink(self, policy: ShrinkPolicy) -> int:
        return self._training("shrink").shrink(policy)

    def stop_worker(self) -> None:
        worker = self._training("stop_worker")
        if _interrupted():
            worker.interrupt()
        else:
            worker.finish()
        self._unwatch()  # from here on an ordinary torch model
        self._stage = _Stage.STOPPED

    @property
    def serving(self) -> bool:
        """Whether servers hold the model's values."""
        return self._stage is _Stage.TRAINING

    def step(self) -> None:
        self._training("distributed_optimizer(...).step").step()

    def has_rows(self) -> bool:
        return self._worker is not None and self._worker.has_rows()

    def drop_rows(self) -> None:
        if self._worker is not None:
            self._worker.drop_rows()

    def _training(self, call: str) -> Worker:
        self._expect(_Stage.TRAINING, call)
        if self._worker is None:
            raise AssertionError("a trainer in training without a worker")
        return self._worker

    def _expect(self, stage: _Stage, call: str) -> None:
        if self._stage is not stage:
            when = "between fleet.init_worker() and fleet.stop_worker()"
            if stage is _Stage.NEW:
                when = "before fleet.init_worker()"
            raise UsageError(f"fleet.{call}() belongs {when}, and {self._stage.value}")

    def _leave_at_exit(self) -> None:
        # A script that forgot stop_worker has still finished; one that died has not, and others must know.
        if self._stage is _Stage.TRAINING and self._worker is not None and not failed():
            self._stage = _Stage.STOPPED
            try:
                self._worker.flush()  # what is merged or kept for later would be lost
            except FleetError as error:
                glog(f"the last gradients of this trainer could not be pushed: {error}")
            if not _interrupted():
                self._worker.leave()


def _interrupted() -> bool:
    """Whether the launcher ends this process: it has not finished, and may be started again."""
    return read_notice(notice_file(os.environ)) is not None


def _nothing() -> None:
    return


def _not_a_trainer(call: str) -> UsageError:
    return UsageError(
        f"fleet.{call}() was called on a server; put trainers' code under `if fleet.is_worker():`"
    )


def _not_a_server(call: str) -> UsageError:
    return UsageError(
        f"fleet.{call}() was called on a trainer; put servers' code under `if fleet.is_server():`"
    )
