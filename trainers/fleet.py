"""The fleet API: module-level functions that are the methods of one Fleet object.

`init` finds this process's place in the job and makes its runtime: `CollectiveRuntime`, or `ServerRuntime` or
`TrainerRuntime` of `trainers.ps`. The other calls check their arguments and leave the rest to the runtime. A
runtime defines the calls that its kind of process can do, and `Runtime` refuses the others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Unpack, cast

import torch
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from trainers import progress
from trainers.collective.runtime import CollectiveRuntime
from trainers.data import loop
from trainers.data.loop import AnyBatch, Result, Step
from trainers.data.slots import Batch as DataBatch
from trainers.errors import NotSupportedError, UsageError
from trainers.metrics import DistributedMetrics
from trainers.notice import Notice, StopSignals, notice_file
from trainers.optimizer import DistributedOptimizer as DistributedOptimizer
from trainers.process.hooks import install_exit_hooks
from trainers.roles.environment import ask_first
from trainers.roles.identity import Identity, RoleMaker
from trainers.roles.identity import Role as Role
from trainers.roles.makers import MPISymmetricRoleMaker as MPISymmetricRoleMaker
from trainers.roles.makers import PaddleCloudRoleMaker as PaddleCloudRoleMaker
from trainers.roles.makers import UserDefinedRoleMaker as UserDefinedRoleMaker
from trainers.roles.makers import settle
from trainers.runtime import Ids, check_model
from trainers.storage.folder import Where
from trainers.strategy import DistributedStrategy as DistributedStrategy
from trainers.strategy import DistributeTranspilerConfig as DistributeTranspilerConfig
from trainers.strategy import strategy_of
from trainers.util import Util

if TYPE_CHECKING:
    from trainers.data.stream import Source, Stream, Streaming
    from trainers.ps.runtime import TrainerRuntime
    from trainers.ps.server_runtime import ServerRuntime
    from trainers.ps.tables.spec import ShrinkPolicy
    from trainers.serving.program import Inputs

    Runtime: TypeAlias = CollectiveRuntime | ServerRuntime | TrainerRuntime

C = TypeVar("C", bound=Callable[..., Any])


def _asked(declared: C) -> C:
    """Pass a call on to the runtime, which defines it with the same parameters or refuses it."""

    @functools.wraps(declared)
    def call(self: Fleet, *args: Any, **options: Any) -> Any:
        name = declared.__name__
        return self._runtime_for(name).ask(name)(*args, **options)

    return cast(C, call)


class Fleet:
    """One process's view of its job. Every method but `init` raises UsageError before `init`."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._optimizer: DistributedOptimizer | None = None
        self._signals = StopSignals(notice_file(os.environ))

    def init(
        self,
        role_maker: RoleMaker | None = None,
        is_collective: bool = False,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
    ) -> None:
        """Find out who this process is and, for a collective job, join the process group.

        Without a role maker the environment decides: fleetrun, torchrun, Paddle's launchers and mpirun, which
        alone has no servers: a job under it that is not collective takes MPISymmetricRoleMaker. A role maker
        that says `is_collective` need not be told again here.

        Raises UsageError when the job was not started for this kind of training, and what the role maker
        raises.
        """
        install_exit_hooks()
        if self._runtime is not None:
            raise UsageError("fleet.init() was called before; call it once, at the start of the script")
        wanted = strategy_of(strategy) if strategy is not None else DistributedStrategy()
        collective, identity = settle(role_maker, is_collective, os.environ)
        wanted.fits(collective)
        self._runtime = _make_runtime(collective, identity, wanted)

    # ---- this process's place in the job

    def is_server(self) -> bool:
        """Whether this process is a parameter server."""
        return self._identity_for("is_server").is_server

    def is_worker(self) -> bool:
        """Whether this process is a trainer."""
        return not self._identity_for("is_worker").is_server

    def is_first_worker(self) -> bool:
        """Whether this process is the trainer of rank 0."""
        identity = self._identity_for("is_first_worker")
        return not identity.is_server and identity.index == 0

    def worker_num(self) -> int:
        """How many trainers the job has: the world size."""
        return self._identity_for("worker_num").worker_num

    def worker_index(self) -> int:
        """This trainer's rank, from 0 on. On a server too, as in Paddle, it is the process's index in its own
        role.
        """
        return self._identity_for("worker_index").index

    def server_num(self) -> int:
        """How many parameter servers the job has; 0 in a collective job."""
        return len(self._identity_for("server_num").servers)

    def server_index(self) -> int:
        """This server's rank, from 0 on. Raises UsageError on a trainer."""
        identity = self._identity_for("server_index")
        if not identity.is_server:
            raise UsageError("fleet.server_index() was called on a trainer; ask fleet.is_server() first")
        return identity.index

    def worker_endpoints(self, to_string: bool = False) -> str | list[str]:
        """`host:port` of every trainer in rank order; joined by commas with `to_string`. Raises
        NotSupportedError under a launcher that does not give them.
        """
        identity = self._identity_for("worker_endpoints")
        if not identity.trainers:
            raise NotSupportedError(f"{identity.source} has no trainer endpoints; start with fleetrun")
        return ",".join(identity.trainers) if to_string else list(identity.trainers)

    def server_endpoints(self, to_string: bool = False) -> str | list[str]:
        """`host:port` of every server in rank order; joined by commas with `to_string`."""
        identity = self._identity_for("server_endpoints")
        return ",".join(identity.servers) if to_string else list(identity.servers)

    # ---- model, optimizer, and the loop over a data set

    def distributed_model(self, model: Module) -> Module:
        """The model to train: wrapped for data parallel training (or sharded, as the strategy says), or the
        same model, whose parameters are on the servers from `init_worker` to `stop_worker`.

        Raises UsageError for what is not a module, or is wrapped already.
        """
        runtime = self._fitting_runtime("distributed_model")
        if not isinstance(model, Module):
            raise UsageError(f"distributed_model needs a torch.nn.Module, not {model!r}")
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise UsageError(
                "distributed_model was given a model that is wrapped for data parallel training already; "
                "gradients would be averaged twice: wrap it once"
            )
        return runtime.distributed_model(model)

    def distributed_optimizer(
        self,
        optimizer: Optimizer,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
    ) -> DistributedOptimizer:
        """The optimizer to train with: torch's, whose `step` also does what the strategy says, and which has
        `minimize(loss)`. `strategy` replaces the one given to `init`; in a collective job it must not ask for
        something else than the model has been wrapped for.

        Raises UsageError for what is not an optimizer of torch, NotSupportedError for one that parameter
        servers do not have.
        """
        runtime = self._runtime_for("distributed_optimizer")
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"distributed_optimizer needs a torch.optim optimizer, not {optimizer!r}")
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError("distributed_optimizer was given fleet's optimizer; give it torch's, once")
        with contextlib.ExitStack() as refused:
            refused.callback(setattr, runtime, "strategy", runtime.strategy)  # undone if it is refused
            if strategy is not None:
                runtime.strategy = strategy_of(strategy)
            self._optimizer = self._fitting_runtime("distributed_optimizer").distributed_optimizer(optimizer)
            refused.pop_all()
        return self._optimizer

    def minimize(self, loss: torch.Tensor) -> None:
        """One training step: gradients of `loss`, a tensor of one value (unless `backward` was called
        before), the step of the optimizer that `distributed_optimizer` has returned last, and gradients
        cleared. Raises UsageError before `distributed_optimizer`.
        """
        self._runtime_for("minimize")
        if self._optimizer is None:
            raise UsageError("fleet.minimize() was called before fleet.distributed_optimizer(optimizer)")
        self._optimizer.minimize(loss)

    def distributed_scaler(self, scaler: GradScaler) -> GradScaler:
        """The scaler for a script that scales losses itself: all ranks skip a step in which one of them has
        found gradients that are not finite. It shares its state with the one given.
        """
        runtime = self._runtime_for("distributed_scaler")
        if not isinstance(scaler, GradScaler):
            raise UsageError(f"distributed_scaler needs a torch.amp.GradScaler, not {scaler!r}")
        return runtime.distributed_scaler(scaler)

    @_asked
    def barrier_worker(self) -> None:
        """Wait until every trainer is here."""
        raise NotImplementedError

    @_asked
    def prefetch(self, batches: Iterable[AnyBatch], ids: Callable[[AnyBatch], Ids]) -> Iterator[AnyBatch]:
        """The same batches, while the rows of the next one are already fetched from the servers. Up to two
        batches are taken from `batches` ahead of the one that is given out.

        `ids(batch)` tells with which tensors (the very same objects) the served embeddings will be called:
        `{module: tensor or tensors}`, or just those when the model has one.
        """
        raise NotImplementedError

    @_asked
    def stream(self, source: Source, **settings: Unpack[Streaming]) -> Stream:
        """The records of a source, batch by batch, each of which counts once in the tables of the parameter
        servers: through restarts of trainers and servers, and with another number of trainers after one.

        `source`: `MultiSlotFiles`, `ParquetFiles` or `KafkaTopic` of `trainers`; all trainers name the same,
        and its shards are divided among them. Make one optimizer step for each batch. `batch_size`: records,
        at most: a batch is of one shard, and of what there is. `follow`: wait for new records, which are
        looked for every `poll_s` seconds, until the function `until`, which another thread calls, says that
        no more come (or for ever), or this process is to stop. `queue_size`: batches that may wait.
        """
        raise NotImplementedError

    def train_from_dataset(
        self,
        step: Step,
        dataset: Iterable[DataBatch],
        *,
        ids: Callable[[DataBatch], Ids] | None = None,
        **printing: Unpack[loop.Printing],
    ) -> Result:
        """One pass over a data set, `step(batch)` for each batch, which has tensors by the names of slots.
        Returns how many `batches` and `examples` there were, `seconds`, `skipped_lines` that were broken, and
        in `fetches` what the last step gave: numbers by name.

        Every `print_period` batches (100) the values of `fetch_list`, names of what the step gives, are
        printed, under the names of `fetch_info` if given. With `ids`, rows are prefetched as by `prefetch`.
        In a collective job the pass ends for all trainers when one has no more batches; the others log that
        they leave out the rest. Raises UsageError for a name that the step does not give, and where one has
        no batch at all.
        """
        runtime = self._runtime_for("train_from_dataset")
        prefetch: loop.Prefetch | None = None
        if isinstance(runtime, CollectiveRuntime):
            prefetch = runtime.in_step
        elif ids is not None:
            prefetch = functools.partial(self.prefetch, ids=ids)
        return loop.train_from_dataset(step, dataset, prefetch=prefetch, **printing)

    def infer_from_dataset(
        self,
        step: Step,
        dataset: Iterable[DataBatch],
        *,
        ids: Callable[[DataBatch], Ids] | None = None,
        **printing: Unpack[loop.Printing],
    ) -> Result:
        """The same without gradients; call `model.eval()` before it. In a collective job each trainer uses
        all its batches, unless the model's parameters are sharded: then the pass ends for all with the first.
        """
        self._runtime_for("infer_from_dataset")
        with torch.no_grad():
            return self.train_from_dataset(step, dataset, ids=ids, **printing)

    # ---- jobs with parameter servers

    @_asked
    def init_server(self, dirname: str | None = None, var_names: Sequence[str] | None = None) -> None:
        """Bind this server's endpoint, and begin with the tables saved in `dirname`, if given: a folder that
        every server can read.

        `var_names`: load only these tables and parameters, by their names in `model.named_parameters()`, with
        optimizer state and statistics. All others begin with trainer 0's values, and so do rows of an
        nn.Embedding that the save does not have. Raises LoadError for a name that the save does not have.
        """
        raise NotImplementedError

    @_asked
    def run_server(self) -> None:
        """Serve until every trainer has called stop_worker, or SIGTERM."""
        raise NotImplementedError

    @_asked
    def init_worker(self) -> None:
        """Connect to the servers; all trainers start from trainer 0's initial values."""
        raise NotImplementedError

    @_asked
    def publish(self, *, buffers: bool = False) -> int:
        """Publish a version of all tables for serving now, with everything that this trainer has pushed;
        returns its number. Needs `strategy.ps_configs` `publish`, by which the servers publish at
        an interval anyway. In sync training the version is of one step, which other trainers may wait for.
        `buffers`: those of this trainer's model are in it and in later ones, as float32; so are its dense
        parameters where no server has them (`strategy.dense = "allreduce"`).
        """
        raise NotImplementedError

    @_asked
    def shrink(self, policy: ShrinkPolicy | None = None) -> int:
        """A day has passed: age the statistics of all tables that keep them, remove the rows that are not
        worth their memory, and forget ids that a CountFilterEntry has not seen for long. For one trainer to
        call; returns how many rows went.
        """
        raise NotImplementedError

    @_asked
    def stop_worker(self) -> None:
        """Say that this trainer has finished, wait for the others, and bring the trained values into the
        model. When fleetrun is ending this process (`stop_requested`), it has not finished: it waits for its
        own pushes only, not for the other trainers.
        """
        raise NotImplementedError

    # ---- Saves of models and tables, for serving and for another job. The former save stays in the folder
    # until the new one is complete. A folder is a path, or a URL that fsspec supports.

    def save_persistables(self, dirname: Where, model: Module | None = None, mode: int = 0) -> None:
        """Save what has been trained.

        With parameter servers: all tables, to a folder that every server can write. One trainer calls it
        while the others continue training, or all trainers do: they save in turn, and if no table has changed
        since another trainer saved the same, its save counts for both. mode: 0 everything; 1 the rows changed
        since the last save, next to it; 2 values only, for serving; 3 as 0, when a day has passed in the
        tables' statistics.

        Collective: the model's whole state, as `save` does without an optimizer.

        Raises SaveError or ServerError; the former save stays current then.
        """
        _check_folder("save_persistables", dirname)
        self._worker_for("save_persistables").save("save_persistables", dirname, model, None, mode)

    def save(
        self,
        dirname: Where,
        model: Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        mode: int = 0,
    ) -> None:
        """Save the whole state of a model, and of its optimizer: safetensors files that any number of
        processes loads, and any tool reads. `fleet.save_checkpoint` saves more, and in parallel.

        Collective: the first trainer writes; the others may call it too, and must where the model is
        sharded. It is there for all after a `barrier_worker()`. With parameter servers:
        `save_persistables(dirname, mode)`; the servers have the optimizer's state. Raises SaveError or
        ServerError.
        """
        _check_folder("save", dirname)
        self._worker_for("save").save("save", dirname, model, optimizer, mode)

    def load(
        self,
        dirname: Where,
        model: Module | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        """Bring a model, and its optimizer, to the state that `save` or `save_persistables` of a collective
        job has written. All trainers call it; with parameter servers before init_worker, to begin from these
        values.

        Raises LoadError when it is damaged or of another model; nothing has changed then.
        """
        _check_folder("load", dirname)
        runtime = self._runtime_for("load")
        if isinstance(runtime, CollectiveRuntime):
            optimizer = runtime.with_state(optimizer)
        elif model is None or optimizer is not None:
            raise UsageError(
                "fleet.load() in a job with parameter servers brings values into a model before "
                "fleet.init_worker(); tables and optimizer state are the servers': fleet.init_server(dirname)"
            )
        from trainers.serving.weights import load_state

        with progress.activity("loading the model"):
            load_state(dirname, check_model("load", model), optimizer)

    def save_inference_model(
        self,
        dirname: Where,
        model: Module | None = None,
        example_inputs: Inputs | None = None,
        *more: object,
        dynamic_shapes: object = None,
        rows: bool = True,
        int8_rows: bool = False,
    ) -> None:
        """Save a model to be called without fleet, and without its code: `trainers.inference.
        load_inference_model(dirname)`. A program of torch.export, and its weights next to it in a safetensors
        file.

        example_inputs: what the model is called with: a tensor, a tuple of tensors, or a dict by the names
        that `forward` has for them. The program takes batches of any size; `dynamic_shapes`, a tuple with
        what torch.export takes for each input, says more, and () fixes all.

        For one trainer to call, or all; one of them writes. With parameter servers it takes the rows that are
        there at the moment, which must fit into this process; an id without a row reads as in evaluation.
        `rows=False`: without them, for `fleetrun serve --follow`, which reads them from a published folder.
        `int8_rows`: it keeps them in 8 bits, with a scale and an offset for each row, and logs by how much a
        value is off at most.
        Without a model it saves the values of all tables, which `trainers.ps.read_values(dirname)` reads.

        Raises SaveError, NotSupportedError for a model that fixes the size of a batch, and what torch.export
        raises for one that it cannot export.
        """
        _check_folder("save_inference_model", None if more else dirname)
        runtime = self._worker_for("save_inference_model")
        if model is None and rows and not int8_rows and not isinstance(runtime, CollectiveRuntime):
            runtime.save_table_values(dirname)
            return
        if int8_rows and not rows:
            raise UsageError("int8_rows=True and rows=False exclude each other")
        model = check_model("save_inference_model", model)
        if example_inputs is None:
            raise UsageError(
                "fleet.save_inference_model() needs example_inputs with the model: a batch for its forward()"
            )
        with (
            progress.activity("saving the model for serving"),
            runtime.stand_ins(model, dirname, rows=rows, int8=int8_rows) as stand_ins,
        ):
            if (int8_rows or not rows) and stand_ins == {}:
                option = "int8_rows" if int8_rows else "rows=False"
                raise UsageError(f"{option} is for tables on parameter servers, and this model has none")
            if stand_ins is not None:
                from trainers.export import save_program

                save_program(dirname, model, example_inputs, dynamic_shapes, stand_ins)

    # ---- checkpoints, and the notice to stop

    @_asked
    def resume_step(self) -> int:
        """How many steps are done already. Collective: the step of the checkpoint that was loaded, 0 when
        none was. With parameter servers: how many steps of this trainer's place they had when it started; 0,
        unless it was restarted. A script that skips as many batches continues where it was before the
        restart. When there are more trainers than before, or fewer: the share of each of what all had done,
        rounded down.
        """
        raise NotImplementedError

    def save_checkpoint(
        self,
        directory: Where,
        step: int,
        model: Module,
        optimizer: Optimizer | None = None,
        *,
        keep: int = 2,
        async_save: bool = False,
        **state: Any,
    ) -> str | None:
        """Save model, optimizer and random generators as they are after `step` steps; all ranks call it.
        When it returns its path, `directory/step-XXXXXXXX` is complete and durable; the newest `keep` stay.

        state: by any name, small dicts, and objects with `state_dict` and `load_state_dict` (a sampler, a
        learning rate schedule). `directory`: a path, the same folder on every machine, or a URL of fsspec.
        async_save: only copy everything now, into memory of this machine, and return None; the copy is
        written beside the training. The next save, load or wait_checkpoint waits for it, and so does the end
        of the process. Raises CheckpointError, then the former checkpoints are as they were; a save in the
        background that failed lets the next of these calls raise it, on all ranks.
        """
        runtime = self._collective_for("save_checkpoint")
        from trainers.checkpoints import checkpoint

        optimizer = runtime.with_state(optimizer)
        with runtime.as_one():
            return checkpoint.save(
                directory, step, model, optimizer, keep=keep, state=state, background=async_save
            )

    def checkpoint(
        self,
        directory: Where,
        step: int,
        model: Module,
        optimizer: Optimizer | None = None,
        *,
        keep: int = 2,
        every: float | None = 60.0,
        neighbour: bool = False,
        **state: Any,
    ) -> None:
        """Keep what `save_checkpoint` saves in memory of this machine, where it outlives the process: one
        copy, after which training continues. All ranks call it, with a later step than the last.

        A restart under the same launcher, with as many ranks, loads the newest version that all ranks have
        (`load_checkpoint` of the same directory); without one the newest in `directory`, which is saved
        beside the training, when the last such save is complete and began `every` seconds ago (None: never).
        neighbour: a copy goes to the next machine too, beside the training, for the loss of a machine.
        At its end a script saves what it has by `save_checkpoint`. Raises CheckpointError for such a save
        that has failed.
        """
        runtime = self._collective_for("checkpoint")
        from trainers.checkpoints import checkpoint

        checkpoint.keep_newest(
            directory, step, model, runtime.with_state(optimizer),
            keep=keep, every=every, neighbour=neighbour, state=state, as_one=runtime.as_one,
        )  # fmt: skip

    def wait_checkpoint(self) -> str | None:
        """Wait until the last `save_checkpoint(..., async_save=True)` is complete and durable; its path, None
        when there is nothing to wait for; all ranks call it. Raises CheckpointError when it has failed.
        """
        self._collective_for("wait_checkpoint")
        from trainers.checkpoints import checkpoint

        with progress.activity("waiting for the checkpoint"):
            return checkpoint.wait()

    def load_checkpoint(
        self,
        directory: Where,
        model: Module,
        optimizer: Optimizer | None = None,
        **state: Any,
    ) -> int | None:
        """Bring model, optimizer and `state`, dicts in place, to the newest complete checkpoint; all ranks
        call it, and there may be more or fewer than when it was saved. Its step, or None when there is none.

        A damaged checkpoint is skipped for the one before. Raises CheckpointError when all are damaged,
        or when it is of another model.
        """
        runtime = self._collective_for("load_checkpoint")
        from trainers.checkpoints import checkpoint

        with progress.activity("loading the checkpoint"):
            step = checkpoint.load(directory, model, runtime.with_state(optimizer), state=state)
        runtime.resumed = step or 0
        progress.meter.resumed(runtime.resumed)
        return step

    load_latest = load_checkpoint

    def stop_requested(self, *, sync: bool = True, signals: Collection[int] = ()) -> Notice | None:
        """Why and until when this process is to stop, once it is: save, and leave.

        From the first call on SIGTERM no longer ends the process: it is asked to ask again. `signals` are
        more that mean "stop": SIGUSR1, where Slurm sends it ahead of its time limit. In a collective job all
        ranks call it equally often and get the same answer at the same call, through a small all_reduce;
        without `sync` each hears of its own signal only, and must not leave alone. When the launcher says
        that other ranks are gone, a collective job's process still ends at once: it could save nothing.
        """
        runtime = self._runtime_for("stop_requested")
        self._signals.listen((signal.SIGTERM, *signals), with_others=runtime.is_collective)
        notice = self._signals.notice()
        return runtime.agree_to_stop(notice) if sync and isinstance(runtime, CollectiveRuntime) else notice

    # ---- values that trainers exchange; both are there before `init`, and raise UsageError until then

    @functools.cached_property
    def util(self) -> Util:
        return Util(self._identity_for, self._worker_for)

    @functools.cached_property
    def metrics(self) -> DistributedMetrics:
        return DistributedMetrics(self.util)

    def known_identity(self) -> Identity | None:
        """This process's identity; None before `fleet.init`."""
        return None if self._runtime is None else self._runtime.identity

    def _identity_for(self, call: str) -> Identity:
        return self._runtime_for(call).identity

    def _runtime_for(self, call: str) -> Runtime:
        if self._runtime is None:
            raise UsageError(f"fleet.{call}() was called before fleet.init()")
        return self._runtime

    def _fitting_runtime(self, call: str) -> Runtime:
        """The runtime; its strategy is checked again, as a script may have changed it."""
        runtime = self._runtime_for(call)
        runtime.strategy.fits(runtime.is_collective)
        return runtime

    def _collective_for(self, call: str) -> CollectiveRuntime:
        runtime = self._runtime_for(call)
        if not isinstance(runtime, CollectiveRuntime):
            raise UsageError(
                f"fleet.{call}() belongs to collective training, and this job has parameter servers: they "
                "keep their tables by strategy.ps_configs durability, and by fleet.save_persistables()"
            )
        return runtime

    def _worker_for(self, call: str) -> CollectiveRuntime | TrainerRuntime:
        runtime = self._runtime_for(call)
        if runtime.is_server:
            raise runtime.refusal(call)
        return cast("CollectiveRuntime | TrainerRuntime", runtime)


def _make_runtime(is_collective: bool, identity: Identity, strategy: DistributedStrategy) -> Runtime:
    if is_collective:
        return CollectiveRuntime(identity, strategy)
    # Late: its kernels take a third of a second to load, which a collective job need not wait for.
    if identity.is_server:
        from trainers.ps.server_runtime import ServerRuntime

        return ServerRuntime(identity, strategy)
    from trainers.ps.runtime import TrainerRuntime

    return TrainerRuntime(identity, strategy)


def _check_folder(call: str, dirname: Any) -> None:
    """Paddle's calls take an executor, and more arguments."""
    if not isinstance(dirname, str | os.PathLike):
        example = ", example_inputs" if call == "save_inference_model" else ""
        raise UsageError(
            f"fleet.{call}() needs a folder and a torch module. Of Paddle's executor, feeds, targets and "
            f"program it needs none: write fleet.{call}(dirname, model{example})"
        )


MPISymetricRoleMaker = MPISymmetricRoleMaker  # as Paddle spells it

_fleet = Fleet()
ask_first(_fleet.known_identity)
init = _fleet.init
report = progress.report
log_scalar = progress.log_scalar
heartbeat = progress.heartbeat
activity = progress.activity
distributed_model = _fleet.distributed_model
distributed_optimizer = _fleet.distributed_optimizer
distributed_scaler = _fleet.distributed_scaler
minimize = _fleet.minimize
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
stream = _fleet.stream
resume_step = _fleet.resume_step
save_checkpoint = _fleet.save_checkpoint
checkpoint = _fleet.checkpoint
wait_checkpoint = _fleet.wait_checkpoint
load_checkpoint = _fleet.load_checkpoint
load_latest = _fleet.load_latest
stop_requested = _fleet.stop_requested
train_from_dataset = _fleet.train_from_dataset
infer_from_dataset = _fleet.infer_from_dataset
save = _fleet.save
load = _fleet.load
save_persistables = _fleet.save_persistables
save_inference_model = _fleet.save_inference_model
publish = _fleet.publish
shrink = _fleet.shrink
util = _fleet.util
metrics = _fleet.metrics
init_server = _fleet.init_server
run_server = _fleet.run_server
init_worker = _fleet.init_worker
stop_worker = _fleet.stop_worker

__all__ = [name for name in vars(Fleet) if name in globals() and name[0] != "_"] + [
    "DistributeTranspilerConfig",
    "DistributedOptimizer",
    "DistributedStrategy",
    "MPISymetricRoleMaker",
    "MPISymmetricRoleMaker",
    "PaddleCloudRoleMaker",
    "Role",
    "UserDefinedRoleMaker",
    "activity",
    "heartbeat",
    "log_scalar",
    "report",
]

_INSTEAD = {
    "main_program": "make a static.Program and give it to static.Executor().run",
    "startup_program": "torch modules hold their first values when they are made: leave the run out",
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise NotSupportedError(f"NotSupported: fleet.{name}; {_INSTEAD[name]}")
    raise AttributeError(f"module 'trainers.fleet' has no attribute {name!r}")
