"""The fleet API: module-level functions that are the methods of one Fleet object.

`init` finds this process's rank in the job and creates its runtime: `CollectiveRuntime`, or `ServerRuntime`
or `TrainerRuntime` of `trainers.ps`. The other calls check their arguments and forward to the runtime. A
runtime defines the calls that its kind of process supports, and `Runtime` refuses the others.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

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

    Runtime = CollectiveRuntime | ServerRuntime | TrainerRuntime

C = TypeVar("C", bound=Callable[..., object])


def _asked(declared: C) -> C:
    """Forward a call to the runtime, which defines it with the same parameters or refuses it."""

    @functools.wraps(declared)
    def call(self: Fleet, *args: object, **options: object) -> object:
        name = declared.__name__
        return self._runtime_for(name).ask(name)(*args, **options)

    return cast(C, call)


class Fleet:
    """One process's view of its job. Every method except `init` raises UsageError before `init`."""

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
        """Identify this process in the job. In a collective job, also join the process group.

        Without a role maker, the environment variables of the launcher decide: fleetrun, torchrun, Paddle's
        launchers or mpirun. mpirun alone starts no servers, so a job under it that is not collective uses
        MPISymmetricRoleMaker. If a role maker sets `is_collective`, you need not repeat the argument here.

        Raises UsageError if the job was not started for this kind of training, and errors of the role maker.
        """
        install_exit_hooks()
        if self._runtime is not None:
            raise UsageError("fleet.init() was called before. Call it once, at the start of the script.")
        wanted = strategy_of(strategy) if strategy is not None else DistributedStrategy()
        collective, identity = settle(role_maker, is_collective, os.environ)
        wanted.fits(collective)
        self._runtime = _make_runtime(collective, identity, wanted)

    # ---- this process's rank in the job

    def is_server(self) -> bool:
        """Return True if this process is a parameter server."""
        return self._identity_for("is_server").is_server

    def is_worker(self) -> bool:
        """Return True if this process is a trainer."""
        return not self._identity_for("is_worker").is_server

    def is_first_worker(self) -> bool:
        """Return True if this process is the trainer of rank 0."""
        identity = self._identity_for("is_first_worker")
        return not identity.is_server and identity.index == 0

    def worker_num(self) -> int:
        """Return the number of trainers, which is the world size."""
        return self._identity_for("worker_num").worker_num

    def worker_index(self) -> int:
        """Return this trainer's rank, starting at 0. On a server, return the server's rank, as in Paddle."""
        return self._identity_for("worker_index").index

    def server_num(self) -> int:
        """Return the number of parameter servers, or 0 in a collective job."""
        return len(self._identity_for("server_num").servers)

    def server_index(self) -> int:
        """Return this server's rank, starting at 0. Raises UsageError on a trainer."""
        identity = self._identity_for("server_index")
        if not identity.is_server:
            raise UsageError("fleet.server_index() was called on a trainer. Check fleet.is_server() first.")
        return identity.index

    def worker_endpoints(self, to_string: bool = False) -> str | list[str]:
        """Return `host:port` of every trainer in rank order, joined by commas with `to_string`. Raises
        NotSupportedError if the launcher does not provide the endpoints.
        """
        identity = self._identity_for("worker_endpoints")
        if not identity.trainers:
            raise NotSupportedError(f"{identity.source} has no trainer endpoints. Start with fleetrun.")
        return ",".join(identity.trainers) if to_string else list(identity.trainers)

    def server_endpoints(self, to_string: bool = False) -> str | list[str]:
        """Return `host:port` of every server in rank order, joined by commas with `to_string`."""
        identity = self._identity_for("server_endpoints")
        return ",".join(identity.servers) if to_string else list(identity.servers)

    # ---- model, optimizer, and the loop over a data set

    def distributed_model(self, model: Module) -> Module:
        """Return the model to train. In a collective job, the model is wrapped for data parallel training, or
        sharded if the strategy requests sharding. With parameter servers, it is the same model, and the
        servers hold its parameters from `init_worker` to `stop_worker`.

        Raises UsageError if `model` is not a module, or is already wrapped.
        """
        runtime = self._fitting_runtime("distributed_model")
        if not isinstance(model, Module):
            raise UsageError(f"distributed_model needs a torch.nn.Module, not {model!r}")
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise UsageError(
                "distributed_model was given a model that is already wrapped for data parallel training, so "
                "gradients would be averaged twice. Pass the model without the wrapper."
            )
        return runtime.distributed_model(model)

    def distributed_optimizer(
        self,
        optimizer: Optimizer,
        strategy: DistributedStrategy | DistributeTranspilerConfig | None = None,
    ) -> DistributedOptimizer:
        """Return the optimizer to train with. It is torch's optimizer with `minimize(loss)` added, and its
        `step` also applies the strategy. `strategy` replaces the strategy given to `init`. In a collective
        job, it must agree with the strategy for which the model was wrapped.

        Raises UsageError if `optimizer` is not an optimizer of torch, and NotSupportedError if parameter
        servers do not support it.
        """
        runtime = self._runtime_for("distributed_optimizer")
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"distributed_optimizer needs a torch.optim optimizer, not {optimizer!r}")
        if isinstance(optimizer, DistributedOptimizer):
            raise UsageError(
                "distributed_optimizer was given fleet's optimizer. Pass torch's optimizer, once."
            )
        with contextlib.ExitStack() as refused:
            refused.callback(setattr, runtime, "strategy", runtime.strategy)  # undone after a refusal
            if strategy is not None:
                runtime.strategy = strategy_of(strategy)
            self._optimizer = self._fitting_runtime("distributed_optimizer").distributed_optimizer(optimizer)
            refused.pop_all()
        return self._optimizer

    def minimize(self, loss: torch.Tensor) -> None:
        """Make one training step. Compute the gradients of `loss`, a tensor of one value, unless you called
        `backward` before. Then step the last optimizer that `distributed_optimizer` returned, and clear the
        gradients. Raises UsageError before `distributed_optimizer`.
        """
        self._runtime_for("minimize")
        if self._optimizer is None:
            raise UsageError("fleet.minimize() was called before fleet.distributed_optimizer(optimizer)")
        self._optimizer.minimize(loss)

    def distributed_scaler(self, scaler: GradScaler) -> GradScaler:
        """Return a scaler for a script that scales losses itself. If one rank finds gradients that are not
        finite, all ranks skip the step. The returned scaler shares its state with `scaler`.
        """
        runtime = self._runtime_for("distributed_scaler")
        if not isinstance(scaler, GradScaler):
            raise UsageError(f"distributed_scaler needs a torch.amp.GradScaler, not {scaler!r}")
        return runtime.distributed_scaler(scaler)

    @_asked
    def barrier_worker(self) -> None:
        """Wait until every trainer has called `barrier_worker`."""
        raise NotImplementedError

    @_asked
    def prefetch(self, batches: Iterable[AnyBatch], ids: Callable[[AnyBatch], Ids]) -> Iterator[AnyBatch]:
        """Yield the same batches, and fetch the rows of the next batch from the servers in advance. Up to two
        batches are drawn from `batches` ahead of the current batch.

        `ids(batch)` returns the tensors with which you will call the served embeddings, as `{module: tensor
        or tensors}`. They must be the same objects. If the model has one served embedding, the tensors alone
        are enough.
        """
        raise NotImplementedError

    @_asked
    def stream(self, source: Source, **settings: Unpack[Streaming]) -> Stream:
        """Return the records of a source, batch by batch. Each record counts once in the tables of the
        parameter servers. This holds through restarts of trainers and servers, also with another number of
        trainers.

        `source`: a `MultiSlotFiles`, `ParquetFiles` or `KafkaTopic` of `trainers`. All trainers name the same
        source, and its shards are divided among them. Make one optimizer step for each batch.

        `batch_size`: the most records of a batch. A batch comes from one shard and does not wait until it is
        full.

        `follow`: wait for new records, and look for them every `poll_s` seconds. The stream ends when the
        function `until` returns True, or when this process must stop. Another thread calls `until`.

        `queue_size`: the most batches that wait in memory.
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
        """Make one pass over a data set, and call `step(batch)` for each batch. A batch holds tensors by slot
        name. Return the numbers of `batches`, `examples` and broken `skipped_lines`, the `seconds`, and as
        `fetches` the result of the last step: numbers by name.

        Every `print_period` batches (100), the values of `fetch_list` are printed. `fetch_list` holds names
        in the result of the step, and `fetch_info` the labels to print. With `ids`, rows are prefetched as in
        `prefetch`.

        In a collective job, the pass ends for all trainers when one has no more batches. The other trainers
        log that they leave out the rest. Raises UsageError if the step does not return a name of
        `fetch_list`, or if a trainer has no batch at all.
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
        """Make a pass as `train_from_dataset` does, without gradients. Call `model.eval()` before it. In a
        collective job, each trainer uses all its batches. If the model's parameters are sharded, the pass
        ends for all trainers with the shortest pass.
        """
        self._runtime_for("infer_from_dataset")
        with torch.no_grad():
            return self.train_from_dataset(step, dataset, ids=ids, **printing)

    # ---- jobs with parameter servers

    @_asked
    def init_server(self, dirname: str | None = None, var_names: Sequence[str] | None = None) -> None:
        """Bind this server's endpoint. If `dirname` is given, start with the tables saved in this directory,
        which every server must be able to read.

        `var_names`: load only these tables and parameters, with their optimizer state and statistics. The
        names are those in `model.named_parameters()`. All others start with trainer 0's values, and so do
        rows of an nn.Embedding that the saved tables lack. Raises LoadError if the saved tables lack a name.
        """
        raise NotImplementedError

    @_asked
    def run_server(self) -> None:
        """Serve until every trainer has called `stop_worker`, or until SIGTERM."""
        raise NotImplementedError

    @_asked
    def init_worker(self) -> None:
        """Connect to the servers. All trainers start from trainer 0's initial values."""
        raise NotImplementedError

    @_asked
    def publish(self, *, buffers: bool = False) -> int:
        """Publish a version of all tables for serving now, with every push of this trainer. Return the number
        of the version. Set `publish` in `strategy.ps_configs` first. The servers then also publish at an
        interval. In sync training, all tables of a version are from the same step. The call may wait for
        other trainers.

        `buffers`: add the buffers of this trainer's model to this version and later ones, as float32. If no
        server holds the dense parameters (`strategy.dense = "allreduce"`), this trainer's dense parameters
        are added too.
        """
        raise NotImplementedError

    @_asked
    def shrink(self, policy: ShrinkPolicy | None = None) -> int:
        """Age the statistics of all tables that keep them, as after one day. Remove the rows that are not
        worth their memory, and forget ids that a CountFilterEntry has not seen for long. Call it once a day,
        from one trainer. Return the number of removed rows.
        """
        raise NotImplementedError

    @_asked
    def stop_worker(self) -> None:
        """Finish this trainer, wait for the others, and load the trained values into the model. If fleetrun
        is ending this process (`stop_requested`), the trainer has not finished. It then waits for its own
        pushes only, not for the other trainers.
        """
        raise NotImplementedError

    # ---- Saved models and tables, for serving and for another job. The former files stay in the directory
    # until the new ones are complete. A directory is a path, or a URL that fsspec supports.

    def save_persistables(self, dirname: Where, model: Module | None = None, mode: int = 0) -> None:
        """Save the trained values.

        With parameter servers, save all tables to a directory that every server can write. Call it from one
        trainer while the others continue training, or from all trainers. If all trainers call it, they save
        in turn. A trainer saves nothing if another trainer saved the same and no table has changed since.

        `mode`: 0 saves everything. 1 saves the rows changed since the last save, next to the last save. 2
        saves only values, for serving. 3 saves everything, after the tables' statistics have aged by one day.

        In a collective job, save the model's whole state, as `save` does without an optimizer.

        Raises SaveError or ServerError. The former saved tables then stay current.
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
        """Save the whole state of a model, and of its optimizer. The result is safetensors files, which any
        number of processes can load and any tool can read. `fleet.save_checkpoint` saves more state, in
        parallel.

        In a collective job, the first trainer writes. The other trainers may call it too. If the model is
        sharded, all trainers must call it. After a `barrier_worker()`, all trainers can read the files.

        With parameter servers, the call is `save_persistables(dirname, mode)`, because the servers hold the
        optimizer's state. Raises SaveError or ServerError.
        """
        _check_folder("save", dirname)
        self._worker_for("save").save("save", dirname, model, optimizer, mode)

    def load(
        self,
        dirname: Where,
        model: Module | None = None,
        optimizer: Optimizer | None = None,
    ) -> None:
        """Load the state that `save`, or `save_persistables` of a collective job, has written into a model
        and its optimizer. Call it on all trainers. With parameter servers, call it before `init_worker` to
        start from these values.

        Raises LoadError if the state is damaged or belongs to another model. Nothing has changed then.
        """
        _check_folder("load", dirname)
        runtime = self._runtime_for("load")
        if isinstance(runtime, CollectiveRuntime):
            optimizer = runtime.with_state(optimizer)
        elif model is None or optimizer is not None:
            raise UsageError(
                "With parameter servers, fleet.load() needs a model and no optimizer, because the servers "
                "hold the optimizer state. Call fleet.load(dirname, model) before fleet.init_worker(). To "
                "load tables and optimizer state, call fleet.init_server(dirname)."
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
        """Save a model for use without fleet and without its code, with
        `trainers.inference.load_inference_model(dirname)`. The exported model is a program of torch.export,
        with its weights next to it in a safetensors file.

        `example_inputs`: the arguments of the model. Give a tensor, a tuple of tensors, or a dict by the
        argument names of `forward`. The program takes batches of any size. `dynamic_shapes` describes other
        sizes, as a tuple with torch.export's description for each input. `()` fixes all sizes.

        Call it from one trainer, or from all. One trainer writes. With parameter servers, it exports the
        current rows, which must fit into the memory of this process. An id without a row reads as in
        evaluation.

        `rows=False`: leave out the rows, for `fleetrun serve --follow`, which reads them from a published
        directory.

        `int8_rows`: store the rows in 8 bits, with a scale and an offset for each row, and log the largest
        error of a value.

        Without a model, it saves the values of all tables, which `trainers.ps.read_values(dirname)` reads.

        Raises SaveError, NotSupportedError if the model fixes the batch size, and errors of torch.export for
        a model that it cannot export.
        """
        _check_folder("save_inference_model", None if more else dirname)
        runtime = self._worker_for("save_inference_model")
        if model is None and rows and not int8_rows and not isinstance(runtime, CollectiveRuntime):
            runtime.save_table_values(dirname)
            return
        if int8_rows and not rows:
            raise UsageError("int8_rows=True and rows=False exclude each other. Remove one of them.")
        model = check_model("save_inference_model", model)
        if example_inputs is None:
            raise UsageError(
                "fleet.save_inference_model() needs example_inputs: a batch for the model's forward()."
            )
        with (
            progress.activity("saving the model for serving"),
            runtime.stand_ins(model, dirname, rows=rows, int8=int8_rows) as stand_ins,
        ):
            if (int8_rows or not rows) and stand_ins == {}:
                option = "int8_rows" if int8_rows else "rows=False"
                raise UsageError(
                    f"{option} is for tables on parameter servers, but this model has none. Remove {option}."
                )
            if stand_ins is not None:
                from trainers.export import save_program

                save_program(dirname, model, example_inputs, dynamic_shapes, stand_ins)

    # ---- checkpoints, and the request to stop

    @_asked
    def resume_step(self) -> int:
        """Return the number of steps that are already done.

        In a collective job, return the step of the loaded checkpoint, or 0 if none was loaded. With parameter
        servers, return the steps of this trainer's rank that the servers had when it started. The number is 0
        unless the trainer was restarted. A script that skips as many batches continues where it was before
        the restart. If the number of trainers has changed, each trainer gets an equal share of all done
        steps, rounded down.
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
        **state: object,
    ) -> str | None:
        """Save model, optimizer and random generators after `step` steps. Call it on all ranks. When it
        returns the path `directory/step-XXXXXXXX`, the checkpoint is complete and durable. The newest `keep`
        checkpoints stay.

        `directory`: a path, the same directory on every node, or a URL that fsspec supports.

        `async_save`: only copy everything into this node's memory now, and return None. The copy is written
        during training. The next save, load or `wait_checkpoint`, and the end of the process, wait for the
        write.

        `state`: more state under names of your choice. Give small dicts, or objects with `state_dict` and
        `load_state_dict`, such as a sampler or a learning rate schedule.

        Raises CheckpointError, and the former checkpoints stay unchanged. If a save in the background failed,
        the next of these calls raises the error on all ranks.
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
        **state: object,
    ) -> None:
        """Keep the state that `save_checkpoint` saves in this node's memory, where it outlives the process.
        Training continues after one copy. Call it on all ranks, with a later step than the last.

        After a restart under the same launcher with as many ranks, `load_checkpoint` of the same directory
        loads the newest version that all ranks have. Without such a version, it loads the newest checkpoint
        in `directory`.

        `every`: also save to `directory` during training, if the last such save is complete and started at
        least this many seconds ago. None: never.

        `neighbour`: also copy to the next node during training, in case a node is lost.

        At the end of your script, save with `save_checkpoint`. Raises CheckpointError if a save to
        `directory` has failed.
        """
        runtime = self._collective_for("checkpoint")
        from trainers.checkpoints import checkpoint

        checkpoint.keep_newest(
            directory, step, model, runtime.with_state(optimizer),
            keep=keep, every=every, neighbour=neighbour, state=state, as_one=runtime.as_one,
        )  # fmt: skip

    def wait_checkpoint(self) -> str | None:
        """Wait until the last `save_checkpoint(..., async_save=True)` is complete and durable. Return its
        path, or None without such a save. Call it on all ranks. Raises CheckpointError if the save has
        failed.
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
        **state: object,
    ) -> int | None:
        """Load the newest complete checkpoint into model, optimizer and `state`. Dicts change in place.
        Return the step, or None if no checkpoint exists. Call it on all ranks. The number of ranks may differ
        from the number at the save.

        A damaged checkpoint is skipped in favor of the one before. Raises CheckpointError if all are damaged,
        or if the checkpoint belongs to another model.
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
        """Return a Notice with the reason and the deadline if this process should stop, else None. When you
        get a Notice, save and exit.

        From the first call on, SIGTERM no longer ends the process, so call it regularly. `signals` are
        further signals that mean "stop", such as SIGUSR1, which Slurm can send ahead of its time limit.

        In a collective job, call it equally often on all ranks. All ranks then get the same answer at the
        same call, through a small all_reduce. Without `sync`, each rank sees only its own signal, and must
        not exit alone. If the launcher reports that other ranks have ended, a process of a collective job
        still ends immediately, because it could save nothing.
        """
        runtime = self._runtime_for("stop_requested")
        self._signals.listen((signal.SIGTERM, *signals), with_others=runtime.is_collective)
        notice = self._signals.notice()
        return runtime.agree_to_stop(notice) if sync and isinstance(runtime, CollectiveRuntime) else notice

    # ---- values that trainers exchange. Both exist before `init`, and raise UsageError until then.

    @functools.cached_property
    def util(self) -> Util:
        return Util(self._identity_for, self._worker_for)

    @functools.cached_property
    def metrics(self) -> DistributedMetrics:
        return DistributedMetrics(self.util)

    def known_identity(self) -> Identity | None:
        """This process's identity, or None before `fleet.init`."""
        return None if self._runtime is None else self._runtime.identity

    def _identity_for(self, call: str) -> Identity:
        return self._runtime_for(call).identity

    def _runtime_for(self, call: str) -> Runtime:
        if self._runtime is None:
            raise UsageError(f"fleet.{call}() was called before fleet.init()")
        return self._runtime

    def _fitting_runtime(self, call: str) -> Runtime:
        """Return the runtime, and check its strategy again, because a script may have changed it."""
        runtime = self._runtime_for(call)
        runtime.strategy.fits(runtime.is_collective)
        return runtime

    def _collective_for(self, call: str) -> CollectiveRuntime:
        runtime = self._runtime_for(call)
        if not isinstance(runtime, CollectiveRuntime):
            raise UsageError(
                f"fleet.{call}() is for collective training, but this job has parameter servers. Keep their "
                "tables with strategy.ps_configs durability, or with fleet.save_persistables()."
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
    # Imported late. Its kernels take a third of a second to load, and a collective job does not need them.
    if identity.is_server:
        from trainers.ps.server_runtime import ServerRuntime

        return ServerRuntime(identity, strategy)
    from trainers.ps.runtime import TrainerRuntime

    return TrainerRuntime(identity, strategy)


def _check_folder(call: str, dirname: object) -> None:
    """Raise UsageError unless `dirname` is a path. Paddle's calls take an executor and more arguments."""
    if not isinstance(dirname, str | os.PathLike):
        example = ", example_inputs" if call == "save_inference_model" else ""
        raise UsageError(
            f"fleet.{call}() needs a directory and a torch module, and none of Paddle's executor, feeds, "
            f"targets and program. Write fleet.{call}(dirname, model{example})."
        )


MPISymetricRoleMaker = MPISymmetricRoleMaker  # Paddle's spelling

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
    "main_program": "create a static.Program and pass it to static.Executor().run",
    "startup_program": "torch modules get their first values when you create them, so remove the run",
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise NotSupportedError(f"NotSupported: fleet.{name}; {_INSTEAD[name]}")
    raise AttributeError(f"module 'trainers.fleet' has no attribute {name!r}")
