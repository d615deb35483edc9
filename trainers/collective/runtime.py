"""Collective training behind the fleet API: the process group, and models and optimizers in any order.

`wrapped`, `shaped`, `replaced` and `stepping` apply the parts of a strategy to a model and to an optimizer.
The parts need the order of the calls in these functions. Each part has its own file.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NoReturn, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from fleetrun.aliases import Callback
from trainers import progress
from trainers.collective.averaging import average_model, average_state
from trainers.collective.configs import CollectiveSettings, CompileConfigs, RecomputeConfigs
from trainers.collective.data_parallel import (
    Cadence,
    DataParallel,
    Reducing,
    compute_in,
    device_of,
    pace,
    set_reducing,
)
from trainers.collective.group import Agreement, Batch, gather, in_step, start
from trainers.collective.large_batch import lamb, lars
from trainers.collective.modules import compile_in_place, recompute, with_synchronized_batch_norm
from trainers.collective.sharding import rewire, shard, zero_optimizer
from trainers.collective.stepping import DistributedScaler, SteppingOptimizer, scaler_of
from trainers.data.loop import AnyBatch
from trainers.errors import UsageError
from trainers.notice import Notice
from trainers.optimizer import DistributedOptimizer, parameters_of
from trainers.roles.identity import Identity
from trainers.runtime import Ids, Runtime, StandIns, check_model
from trainers.storage.folder import Where
from trainers.strategy import DistributedStrategy

if TYPE_CHECKING:
    from trainers.data.stream import Source, Streaming

# ---- The changes of a strategy to a model and to an optimizer, in the order in which they must be applied

SMALLEST_BUCKET_MB = 1.0
"""The value of torch.distributed._DEFAULT_FIRST_BUCKET_BYTES. A compiled DDP model needs no smaller buckets.
"""


def shaped(model: Module, strategy: DistributedStrategy) -> Module:
    """Apply `sync_batch_norm`, `recompute` and `compile` of the strategy to a model, before it is wrapped.
    Parameters keep their names and stay the same objects, so the optimizer may be older than this call.

    Raises UsageError for names that match no module, and NotSupportedError if a requirement is missing.
    """
    if strategy.compile and strategy.fuse_grad_size_in_MB < SMALLEST_BUCKET_MB:
        raise UsageError(
            f"strategy.compile with fuse_grad_size_in_MB {strategy.fuse_grad_size_in_MB}: torch divides a "
            f"compiled program at the buckets, and the first bucket has {SMALLEST_BUCKET_MB} MB. Set "
            f"fuse_grad_size_in_MB to at least {SMALLEST_BUCKET_MB}."
        )
    if strategy.sync_batch_norm and dist.get_world_size() > 1:
        model = with_synchronized_batch_norm(model)
    if strategy.recompute:
        recompute(model, RecomputeConfigs(**strategy.recompute_configs), compiled=strategy.compile)
    if strategy.compile:
        compile_in_place(model, CompileConfigs(**strategy.compile_configs))
    return model


Names = dict[Tensor, str]


def wrapped(
    model: Module, strategy: DistributedStrategy, settings: CollectiveSettings, cadence: Cadence
) -> Module:
    """Return the model in DataParallel, or the sharded model itself. Raises UsageError for a model without
    parameters.
    """
    if not any(True for _ in model.parameters()):
        raise UsageError(
            f"fleet.distributed_model() was given a {type(model).__name__} without parameters, so ranks "
            "have nothing to exchange. Use the model directly."
        )
    model = shaped(model, strategy)
    if settings.sharded and settings.sharding is not None:
        model = shard(model, settings.sharding)
    else:
        model = DataParallel(
            model,
            find_unused_parameters=settings.find_unused_parameters,
            bucket_cap_mb=settings.fuse_grad_size_in_MB,
        )
    world = dist.get_world_size()
    divisor = settings.divisor(world)
    if divisor != world or settings.fp16_allreduce:
        set_reducing(model, Reducing(divisor, torch.float16 if settings.fp16_allreduce else None))
    if settings.amp is not None:
        compute_in(model, getattr(torch, settings.amp.dtype))
    if settings.paced:
        pace(model, cadence)
    return model


def replaced(optimizer: Optimizer, settings: CollectiveSettings, names: Names) -> Optimizer:
    """Return the optimizer that updates: the given one, or LARS or LAMB in its place. Its state may be
    divided among ranks.
    """
    if settings.lars is not None:
        optimizer = lars(optimizer, settings.lars, names)
    elif settings.lamb is not None:
        optimizer = lamb(optimizer, settings.lamb, names)
    if settings.sharding is not None and not settings.sharded:
        optimizer = zero_optimizer(optimizer)
    return optimizer


def stepping(
    optimizer: Optimizer,
    settings: CollectiveSettings,
    cadence: Cadence,
    average: Callback,
) -> DistributedOptimizer:
    """Wrap an optimizer for the fleet API. The plain wrapper is enough if each step is an update and no loss
    is scaled.
    """
    own_backward = settings.scale_strategy == "customized"
    if not (settings.paced or settings.float16 or own_backward):
        return DistributedOptimizer(optimizer)
    scaler = None
    if settings.float16 and settings.amp is not None:
        scaler = scaler_of(settings.amp, device_of(parameters_of(optimizer)))
    return SteppingOptimizer(optimizer, cadence, average, scaler=scaler, own_backward=own_backward)


# ---- The runtime


class _WrappedModel:
    """A wrapped model, and weak references to its parameters before wrapping."""

    def __init__(self, model: Module, former: Mapping[str, Parameter]) -> None:
        self.model = model
        self._former = {name: weakref.ref(param) for name, param in former.items()}

    def former(self) -> dict[str, Parameter]:
        return {name: param for name, ref in self._former.items() if (param := ref()) is not None}


class CollectiveRuntime(Runtime):
    """The runtime of a collective job. The constructor joins the process group."""

    is_collective = True
    refuses = (
        "is for training with parameter servers, but this job is collective. Remove the call, or use "
        "fleet.init(is_collective=False) and start with --server_num."
    )

    def __init__(self, identity: Identity, strategy: DistributedStrategy) -> None:
        super().__init__(identity, strategy)
        self.resumed = 0
        self._agreement = Agreement()
        self._settings: CollectiveSettings | None = None
        self._cadence = Cadence()
        self._models: list[_WrappedModel] = []
        self._optimizers: dict[Optimizer, DistributedOptimizer] = {}
        """The wrapped optimizers by the script's optimizers."""
        strategy.collective()  # raises early if settings contradict each other
        start(identity)

    def distributed_model(self, model: Module) -> Module:
        settings = self._agreed("distributed_model")
        if settings.paced and self._models:
            raise _once("model")
        former = dict(model.named_parameters())
        made = wrapped(model, self.strategy, settings, self._cadence)
        self._models.append(_WrappedModel(made, former))
        if settings.sharded:
            for optimizer in self._optimizers.values():
                rewire(optimizer, former, made)
        return made

    def distributed_optimizer(self, optimizer: Optimizer) -> DistributedOptimizer:
        settings = self._agreed("distributed_optimizer")
        if settings.paced and self._optimizers:
            raise _once("optimizer")
        names: dict[Tensor, str] = {}
        for each in self._models:
            former = each.former()
            names |= {param: name for name, param in former.items()}
            if settings.sharded:
                rewire(optimizer, former, each.model)
        inner = replaced(optimizer, settings, names)
        made = stepping(inner, settings, self._cadence, self._average)
        self._optimizers[optimizer] = made
        return made

    def distributed_scaler(self, scaler: GradScaler) -> GradScaler:
        return DistributedScaler(scaler)

    def barrier_worker(self) -> None:
        dist.barrier()

    def gather(self, mine: bytes, call: str) -> list[bytes]:
        return gather(mine)

    def prefetch(self, batches: Iterable[AnyBatch], ids: Callable[[AnyBatch], Ids]) -> Iterator[AnyBatch]:
        return iter(batches)  # all rows are local

    def stream(self, source: Source, **settings: Unpack[Streaming]) -> NoReturn:
        raise UsageError(
            "fleet.stream() counts records on parameter servers, but this job has no servers. Read files "
            "with trainers.data.dataset.QueueDataset."
        )

    def in_step(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass on the batches until one rank has no more, if ranks wait for each other in a step. They wait
        in training, and in each forward pass of a model whose parameters are sharded.
        """
        waits = torch.is_grad_enabled() or (self._settings is not None and self._settings.sharded)
        return in_step(batches) if waits else iter(batches)

    def resume_step(self) -> int:
        return self.resumed

    def agree_to_stop(self, notice: Notice | None) -> Notice | None:
        return self._agreement.on(notice)

    def save(
        self,
        call: str,
        dirname: Where,
        model: Module | None,
        optimizer: Optimizer | None,
        mode: int,
    ) -> None:
        from trainers.serving.weights import save_state

        if mode != 0:
            raise UsageError(f"fleet.{call}() was given mode={mode}. This job has no tables. Remove mode.")
        first = self.identity.index == 0
        with progress.activity("saving the model"):
            save_state(dirname, check_model(call, model), self.with_state(optimizer), first=first)

    def stand_ins(
        self, model: Module, where: Where, *, rows: bool, int8: bool
    ) -> AbstractContextManager[StandIns | None]:
        return nullcontext({} if self.identity.index == 0 else None)

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Give all ranks the same model, for a checkpoint. All ranks must enter it.

        With localsgd, each rank has its own model and update state, and a checkpoint has only one of each.
        Inside the context, all ranks have the average. Afterwards, each rank has its own model and state
        again.
        """
        cadence, optimizers = self._cadence, [each.inner for each in self._optimizers.values()]
        if not cadence.localized:
            yield
            return
        own = [value for each in self._models for value in (*each.model.parameters(), *each.model.buffers())]
        own += [value for each in optimizers for state in each.state.values() for value in state.values()]
        kept = [(each, each.clone()) for each in own if isinstance(each, Tensor)]
        apart, cadence.apart = cadence.apart, 0
        try:
            self._average()
            for optimizer in optimizers:
                average_state(optimizer)
            yield
        finally:
            cadence.apart = apart
            for tensor, value in kept:
                tensor.data.copy_(value)

    def _agreed(self, call: str) -> CollectiveSettings:
        """Return the settings of the strategy. The first model or optimizer fixes them. Raises UsageError if
        the strategy has changed since in a way that affects existing models or optimizers.
        """
        settings = self.strategy.collective()
        if self._settings is None:
            self._cadence = Cadence(settings.merged_steps, settings.localsgd)
        elif changed := self._settings.changed(settings):
            raise UsageError(
                f"fleet.{call}() has a strategy whose {', '.join(changed)} differs from the strategy of the "
                "earlier fleet call for the model or optimizer. Pass the strategy to "
                "fleet.init(is_collective=True, strategy=strategy), and do not change it later."
            )
        self._settings = settings
        return settings

    def with_state(self, optimizer: Optimizer | None) -> Optimizer | None:
        """Return fleet's optimizer in place of the script's own, which holds only a part of the state."""
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise UsageError(f"The optimizer must be one of torch's or fleet's, not {optimizer!r}")
        return next((made for given, made in self._optimizers.items() if given is optimizer), optimizer)

    def _average(self) -> None:
        for each in self._models:
            average_model(each.model)


def _once(what: str) -> UsageError:
    return UsageError(
        f"fleet.distributed_{what}() was called twice, but strategy.gradient_merge and strategy.localsgd "
        f"count the steps of one model and one optimizer. Use one {what}, or remove these settings."
    )
