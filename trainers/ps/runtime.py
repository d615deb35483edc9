"""A trainer behind the fleet API, in parameter-server training, and the order of its calls."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Unpack

import torch
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fleetrun.aliases import Callback
from trainers import progress
from trainers.data.loop import AnyBatch, prefetched
from trainers.data.stream import Source, Stream, Streaming
from trainers.errors import FleetError, NotSupportedError, ServerError, UsageError
from trainers.optimizer import DistributedOptimizer, parameters_of
from trainers.process.hooks import at_exit, failed
from trainers.process.log import glog
from trainers.ps.model import clear_gradients, compute_in_half, watch_model
from trainers.ps.optimizer import CombinedOptimizer, JoinedSteps, ServedOptimizer, ServedScaler
from trainers.ps.saves.manifest import SaveMode
from trainers.ps.tables.spec import ShrinkPolicy
from trainers.ps.tables.warm import warm_up_trainer
from trainers.ps.trainer.layout import LayoutOptions, check_supported, dense_of, plan_layout
from trainers.ps.trainer.local import LocalTraining
from trainers.ps.trainer.modules import pools
from trainers.ps.trainer.torchrec import unwrapped
from trainers.ps.trainer.worker import Worker
from trainers.ps.transport import keys_of
from trainers.roles.identity import Identity
from trainers.runtime import Ids, Runtime, StandIns, ids_by_module
from trainers.storage.folder import Where
from trainers.strategy import DistributedStrategy


class _Phase(Enum):
    """The calls that a trainer has made."""

    NEW = "fleet.init_worker() has not been called"
    TRAINING = "fleet.init_worker() has been called"
    STOPPED = "fleet.stop_worker() has been called"


class TrainerRuntime(Runtime):
    """The runtime of a trainer. From init_worker to stop_worker, the servers hold the model's values."""

    refuses = "was called on a trainer. Move the servers' code under `if fleet.is_server():`."

    def __init__(self, identity: Identity, strategy: DistributedStrategy) -> None:
        super().__init__(identity, strategy)
        self._phase = _Phase.NEW
        self._model: Module | None = None
        self._optimizers: list[ServedOptimizer] = []
        self._joined: JoinedSteps | None = None
        """The steps of several optimizers."""
        self._after_push: list[Callback] = []
        self.worker: Worker | None = None
        self.scaler: ServedScaler | None = None
        self._resumed = 0
        self._dense: dict[str, Parameter] = {}
        """The parameters on the servers, without embeddings."""
        self._ends = contextlib.ExitStack()
        """Callbacks that turn the model into an ordinary model again."""

    def distributed_model(self, model: Module) -> Module:
        """Return `model` unchanged. After `init_worker`, the servers hold its `nn.Embedding(sparse=True)`."""
        self._expect(_Phase.NEW, "distributed_model")
        if self._model is not None:
            raise UsageError(
                "fleet.distributed_model() was called twice, but a job serves one model. Call it once."
            )
        self._model = getattr(model, "_orig_mod", model)  # the model inside torch.compile's wrapper
        model.__dict__.setdefault("clear_gradients", partial(clear_gradients, model))
        return model

    def distributed_optimizer(self, optimizer: Optimizer) -> DistributedOptimizer:
        self._expect(_Phase.NEW, "distributed_optimizer")
        inner = [self._served(each) for each in unwrapped(optimizer)]
        return inner[0] if len(inner) == 1 else CombinedOptimizer(inner)  # type: ignore[return-value]  # same calls

    def _served(self, optimizer: Optimizer) -> ServedOptimizer:
        check_supported(optimizer)
        taken = {id(each) for other in self._optimizers for each in parameters_of(other)}
        twice = [each for each in parameters_of(optimizer) if id(each) in taken]
        if twice:
            raise UsageError(
                f"fleet.distributed_optimizer() was called with {len(twice)} parameters that an earlier "
                "optimizer already has. Give each parameter to one optimizer."
            )
        self._optimizers.append(ServedOptimizer(optimizer, self))
        return self._optimizers[-1]

    def distributed_scaler(self, scaler: GradScaler) -> GradScaler:
        return ServedScaler(scaler)

    def init_worker(self) -> None:
        self._expect(_Phase.NEW, "init_worker")
        if self._model is None:
            raise UsageError("fleet.init_worker() was called before fleet.distributed_model(model)")
        if not self._optimizers:
            raise UsageError("fleet.init_worker() was called before fleet.distributed_optimizer(optimizer)")
        lazy = [name for name, each in self._model.named_parameters() if is_lazy(each)]
        if lazy:
            raise UsageError(
                f"Parameter {lazy[0]!r} has no shape yet (a lazy module). Call the model with one batch "
                "before fleet.init_worker()."
            )
        strategy, configs = self.strategy, self.strategy.ps()
        asynchronous = strategy.asynchronous() if strategy.a_sync else None
        geo = asynchronous is not None and asynchronous.k_steps > 0
        options = LayoutOptions(
            configs=configs, tables=strategy.tables(), geo=geo, dense=strategy.dense == "servers"
        )
        inner = [each.inner for each in self._optimizers]
        layout = plan_layout(self._model, inner, len(self.identity.servers), options)
        dense, others = dense_of(self._model)
        local = None
        if geo:
            local = LocalTraining(self._local_step)
        elif not options.dense:
            local = LocalTraining(self._local_step, dense, others)
        self.worker = Worker(
            self.identity,
            layout,
            configs,
            asynchronous,
            settings=strategy.agreed(),
            keys=keys_of(os.environ),
            local=local,
        )
        bags = bool(layout.collections) or any(pools(each.module) for each in layout.sparse)
        warm_up_trainer(layout.specs(), geo=geo, bags=bags)
        self.worker.start()
        self._resumed = self.worker.step_number
        self._dense = {each.name: each.parameter for each in layout.dense}
        if self._resumed and next(self._model.buffers(), None) is not None:
            glog(
                f"Resumed at step {self._resumed}. The trainers held the buffers (such as means of batch "
                "norm), so they continue from the values that this script gave them."
            )
        self._phase = _Phase.TRAINING
        if len(self._optimizers) > 1:
            self._joined = JoinedSteps(self._optimizers, self._push, dense)
            # The gradients of tables without an optimizer of the script are cleared with the first one.
            weights = [each.weights for each in self._optimizers if each.weights is not None]
            trained = {id(each.module.weight) for each in layout.sparse if each.trained}
            weights[0] |= trained.difference(*weights)
        self._ends.callback(watch_model(self._model, self.worker, self._joined, refresh=strategy.a_sync))
        if (amp := strategy.half_precision()) is not None:
            self.scaler = compute_in_half(self._model, amp, self._ends)
        for each in self._optimizers:
            each.freeze_options()
        self._ends.callback(register_optimizer_step_pre_hook(self._refuse_other_step).remove)
        at_exit(self._leave_at_exit)

    def _refuse_other_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if isinstance(optimizer, ServedOptimizer | CombinedOptimizer) or self._model is None:
            return
        mine = {id(each) for each in self._model.parameters()}
        known = any(each.inner is optimizer for each in self._optimizers)
        if not known and any(id(each) in mine for each in parameters_of(optimizer)):
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called on parameters of the served model, but fleet "
                "does not have this optimizer, so each trainer would train a separate copy. Give the "
                "optimizer to fleet.distributed_optimizer() before fleet.init_worker(). Do not step in "
                "backward()."
            )

    def barrier_worker(self) -> None:
        self._training("barrier_worker").barrier()

    def gather(self, mine: bytes, call: str) -> list[bytes]:
        return self._training(call).gather(mine)

    def prefetch(self, batches: Iterable[AnyBatch], ids: Callable[[AnyBatch], Ids]) -> Iterator[AnyBatch]:
        def prepare(batch: AnyBatch) -> None:
            worker = self._training("prefetch")
            served = [*(each.module for each in worker.layout.sparse), *worker.layout.collections]
            worker.prefetch(ids_by_module(ids(batch), served))

        yield from prefetched(batches, prepare, self._training("prefetch").begin_prefetch())

    def stream(self, source: Source, **settings: Unpack[Streaming]) -> Stream:
        return Stream(source, self._streaming, **settings)

    def _streaming(self) -> Worker:
        configs = self.strategy.asynchronous() if self.strategy.a_sync else None
        if (configs is not None and configs.k_steps) or self.strategy.dense == "allreduce":
            raise NotSupportedError(
                "fleet.stream() counts records by the pushes of their gradients. Geo training sends changes "
                'of several steps, and with dense="allreduce" every trainer needs equally many batches. Use '
                "sync or async training with dense values on the servers."
            )
        return self._training("stream")

    def resume_step(self) -> int:
        self._training("resume_step")
        return self._resumed

    def save(
        self,
        call: str,
        dirname: Where,
        model: Module | None,
        optimizer: Optimizer | None,
        mode: int,
    ) -> None:
        self._save_tables(dirname, _save_mode(mode))

    def save_table_values(self, dirname: Where) -> None:
        self._save_tables(dirname, SaveMode.VALUES)

    @contextmanager
    def stand_ins(self, model: Module, where: Where, *, rows: bool, int8: bool) -> Iterator[StandIns | None]:
        if not self.serving or self._model is None:
            yield {}
            return
        from trainers.ps.trainer.stand_ins import outside_of, stand_ins_of

        worker = self._complete("save_inference_model")
        kind = f"program, rows={rows}, int8={int8}"
        with worker.turn_to_save(where, SaveMode.VALUES, kind) as mine:
            found = None
            if mine and rows:
                save = partial(worker.save, mode=SaveMode.VALUES)
                found = stand_ins_of(worker.layout.sparse, where, save, int8=int8)
            elif mine:
                found = outside_of(worker.layout.sparse)
            worker.refresh()
            inside = set(model.modules())  # the argument may be a part of the model
            yield found and {each: found[each] for each in found if each in inside}

    def publish(self, *, buffers: bool = False) -> int:
        worker = self._complete("publish")
        if not self.strategy.ps().publish:
            raise UsageError(
                "fleet.publish() needs a directory or URL for the versions. Set strategy.ps_configs "
                '"publish" before fleet.is_server() is called.'
            )
        return worker.publish(self._not_served(buffers=True) if buffers else {})

    def _not_served(self, *, buffers: bool) -> dict[str, torch.Tensor]:
        """Return the values of the model that no server holds, by name. With dense "allreduce", they include
        the dense parameters. With `buffers`, they include the buffers.
        """
        assert self._model is not None
        found = dict(self._model.named_buffers()) if buffers else {}
        if self.strategy.dense != "servers":
            dense = {id(each) for each in dense_of(self._model)[0]}
            found |= {name: each for name, each in self._model.named_parameters() if id(each) in dense}
        return {name: each for name, each in found.items() if each.numel()}

    def shrink(self, policy: ShrinkPolicy | None = None) -> int:
        return self._training("shrink").shrink(policy or ShrinkPolicy())

    def stop_worker(self) -> None:
        worker = self._training("stop_worker")
        if self._joined is not None:
            self._joined.check()
        if worker.interrupted:
            worker.interrupt()
        else:
            worker.finish(self._not_served(buffers=False) if self.strategy.ps().publish else {})
        self._ends.close()  # the model is an ordinary torch model again
        self.scaler = None
        self._phase = _Phase.STOPPED

    @property
    def serving(self) -> bool:
        """True while servers hold the model's values."""
        return self._phase is _Phase.TRAINING

    @property
    def kept(self) -> bool:
        return self._joined is not None and self._joined.waits

    def step(self, optimizer: ServedOptimizer, *, overflow: bool = False) -> None:
        worker = self._training("distributed_optimizer(...).step")
        if self._joined is None:
            worker.step(overflow=overflow)
        else:
            self._joined.step(optimizer, overflow=overflow)

    def agree(self, overflow: bool) -> bool:
        return self._training("distributed_scaler(...).unscale_").agree(overflow)

    def drop_rows(self, optimizer: ServedOptimizer, *, set_to_none: bool) -> None:
        """Drop the gradients of the optimizer's embeddings. If a push still needs them, drop them after the
        push.
        """
        drop = partial(self._drop_rows, optimizer, set_to_none)
        if self._joined is not None and self._joined.stepped(optimizer):
            self._after_push.append(drop)
        else:
            drop()

    def _drop_rows(self, optimizer: ServedOptimizer, set_to_none: bool) -> None:
        for group in optimizer.groups:
            group.drop_gradients(set_to_none=set_to_none)

    def _push(self, overflow: bool) -> None:
        """Push the gradients of several optimizers."""
        self._training("distributed_optimizer(...).step").step(overflow=overflow)
        for each in self._after_push:
            each()
        self._after_push.clear()

    def _local_step(self) -> None:
        for each in self._optimizers:
            each.local_step()

    def _save_tables(self, dirname: Where, mode: SaveMode) -> None:
        with progress.activity("saving tables"):
            self._complete("save_persistables").save(dirname, mode)

    def _complete(self, call: str) -> Worker:
        """Return the worker, as `_training` does. Raises UsageError if the servers lack parameters of the
        model.
        """
        worker = self._training(call)
        now = {} if self._model is None else dict(self._model.named_parameters())
        if replaced := [name for name, each in self._dense.items() if now.get(name) is not each]:
            raise UsageError(
                f"Parameter {replaced[0]!r} was replaced after fleet.init_worker(), but the servers have the "
                "original one. Write into the parameter instead (copy_, or load_state_dict of the module)."
            )
        return worker

    def _training(self, call: str) -> Worker:
        self._expect(_Phase.TRAINING, call)
        if self.worker is None:
            raise AssertionError("a trainer in training has no worker")
        return self.worker

    def _expect(self, phase: _Phase, call: str) -> None:
        if self._phase is not phase:
            when = "between fleet.init_worker() and fleet.stop_worker()"
            if phase is _Phase.NEW:
                when = "before fleet.init_worker()"
            raise UsageError(
                f"fleet.{call}() was called at the wrong time: {self._phase.value}. Call it {when}."
            )

    def _leave_at_exit(self) -> None:
        # A script that ends without stop_worker has finished. A script that failed has not, and other
        # trainers must see the failure.
        if self._phase is _Phase.TRAINING and self.worker is not None and not failed():
            self._phase = _Phase.STOPPED
            # Push the gradients that are merged or kept for later. If that is impossible, the trainer has not
            # left, and its next attempt continues before these gradients.
            try:
                if self._joined is not None:
                    self._joined.check()
                self.worker.flush()
            except FleetError as error:
                raise ServerError(
                    f"The last gradients of this trainer could not be pushed at its exit: {error}"
                ) from error
            if not self.worker.interrupted:
                self.worker.leave()


def _save_mode(mode: int) -> SaveMode:
    if isinstance(mode, bool) or mode not in (0, 1, 2, 3):
        raise UsageError(f"save_persistables mode is {mode!r}; it must be 0, 1, 2 or 3")
    return SaveMode(mode)
