"""What `fleet` asks of either kind of training; `collective.runtime` and `ps.runtime` implement it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, Unpack

import torch

from trainers.data.loop import AnyBatch
from trainers.errors import UsageError
from trainers.notice import Notice
from trainers.optimizer import DistributedOptimizer
from trainers.strategy import DistributedStrategy

if TYPE_CHECKING:
    from trainers.data.stream import Source, Stream, Streaming
    from trainers.ps.tables.spec import ShrinkPolicy

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
Ids: TypeAlias = Tensors | Mapping[torch.nn.Module, Tensors]
"""The tensors with which embeddings will be called: for each module, or of the only one."""

Where: TypeAlias = str | os.PathLike[str]
StandIns: TypeAlias = dict[torch.nn.Module, torch.nn.Module]
"""A folder: a path, or a URL that fsspec supports."""


class Runtime(Protocol):
    """One process's side of a job: what differs between collective and parameter-server training. A method
    raises UsageError when its call does not belong to this kind of job, to this role, or to this moment.
    """

    strategy: DistributedStrategy
    is_collective: ClassVar[bool]

    def distributed_model(self, model: torch.nn.Module) -> torch.nn.Module: ...

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> DistributedOptimizer: ...

    def distributed_scaler(self, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler: ...

    def barrier_worker(self) -> None: ...

    def gather(self, mine: bytes, call: str) -> list[bytes]:
        """The bytes that every trainer passes here, in rank order; all call it. `call` is its name, for
        errors.
        """
        ...

    def prefetch(self, batches: Iterable[AnyBatch], ids: Callable[[AnyBatch], Ids]) -> Iterator[AnyBatch]: ...

    def stream(self, source: Source, **settings: Unpack[Streaming]) -> Stream: ...

    def resume_step(self) -> int: ...

    def agree_to_stop(self, notice: Notice | None) -> Notice | None:
        """The notice that holds for all ranks of a collective job; this process's own where servers let a
        trainer stop alone.
        """
        ...

    def save(
        self,
        call: str,
        dirname: Where,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        mode: int,
    ) -> None:
        """Save the model's and the optimizer's state, or, with servers, all tables. `call` is the method of
        fleet, for errors.
        """
        ...

    def load(
        self, dirname: Where, model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
    ) -> None: ...

    def save_table_values(self, dirname: Where) -> None:
        """Save the values of all tables, without a model."""
        ...

    def stand_ins(
        self, model: torch.nn.Module, where: Where, *, rows: bool, int8: bool
    ) -> AbstractContextManager[StandIns | None]:
        """Ordinary modules with the current values, for the modules of the model whose values are on servers;
        None where another rank exports the model. Until the end of the context no other rank exports.
        `where`: a folder for temporary files of the servers; `int8`: rows are kept in 8 bits.
        """
        ...

    def save_checkpoint(
        self,
        directory: Where,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        keep: int,
        async_save: bool,
        state: dict[str, Any],
    ) -> str | None: ...

    def checkpoint(
        self,
        directory: Where,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        keep: int,
        every: float | None,
        neighbour: bool,
        state: dict[str, Any],
    ) -> None: ...

    def wait_checkpoint(self) -> str | None: ...

    def load_checkpoint(
        self,
        directory: Where,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        state: dict[str, Any],
    ) -> int | None: ...

    def publish(self, *, buffers: bool) -> int: ...

    def shrink(self, policy: ShrinkPolicy | None) -> int: ...

    def init_server(self, dirname: str | None = None, var_names: Sequence[str] | None = None) -> None: ...

    def run_server(self) -> None: ...

    def init_worker(self) -> None: ...

    def stop_worker(self) -> None: ...


def check_model(call: str, model: Any) -> torch.nn.Module:
    """Raises UsageError for anything but a torch module."""
    if not isinstance(model, torch.nn.Module):
        what = "no model" if model is None else f"{model!r} as the model"
        raise UsageError(
            f"fleet.{call}() was given {what}; give the torch.nn.Module, as fleet.distributed_model() "
            "returned it or before"
        )
    return model


def check_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Raises UsageError for anything but a torch optimizer or None."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"the optimizer must be one of torch's or fleet's, not {optimizer!r}")
    return optimizer


def ids_by_module(
    ids: Ids, served: Sequence[torch.nn.Module]
) -> Mapping[torch.nn.Module, Sequence[torch.Tensor]]:
    """The ids by module, also where a script names no module. Raises UsageError for a module that is not
    served, and for tensors without a module when several are served.
    """
    if not isinstance(ids, Mapping):
        if len(served) != 1:
            raise UsageError(
                f"fleet.prefetch got ids without a module, and {len(served)} embeddings are served; "
                "return {module: ids, ...}"
            )
        ids = {served[0]: ids}
    known = {id(module) for module in served}
    for module in ids:
        if id(module) not in known:
            raise UsageError(f"fleet.prefetch got ids of {module}, which no server serves")
    return {module: [each] if isinstance(each, torch.Tensor) else each for module, each in ids.items()}
