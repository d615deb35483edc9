"""What `fleet` asks of either kind of training, and what a script may say about the ids of its next batch.

The answers are in `collective.runtime` and `ps.runtime`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch

from trainers.data.loop import AnyBatch
from trainers.errors import UsageError
from trainers.optimizer import DistributedOptimizer
from trainers.ps.tables.spec import ShrinkPolicy
from trainers.strategy import DistributedStrategy

# ---- Prefetch: what scripts may say about the ids of a batch. Leaves rows to `worker`.

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
Ids: TypeAlias = Tensors | Mapping[torch.nn.Module, Tensors]
"""The tensors with which embeddings will be called: for each module, or of the only one."""


def ids_by_module(
    ids: Ids, served: Sequence[torch.nn.Module]
) -> Mapping[torch.nn.Module, Sequence[torch.Tensor]]:
    """What a script said, in full. Raises UsageError for a module that is not served, and for tensors of
    no module when there are several.
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


# ---- What `fleet` asks of either kind of training. Knows the questions; `collective` and `ps` know the
# answers.

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
