"""Collective training behind the fleet API: the process group, models and optimizers in any order. Leaves
what a strategy changes in them to `wrapping`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist

from trainers.collective.agreement import Agreement
from trainers.collective.cadence import Cadence
from trainers.collective.gathering import gather
from trainers.collective.group import start
from trainers.collective.settings import CollectiveSettings
from trainers.collective.wrapping import replaced, stepping, wrapped
from trainers.data.ahead import Batch
from trainers.errors import UsageError
from trainers.optimizer import DistributedOptimizer
from trainers.ps.tables.shrink import ShrinkPolicy
from trainers.ps.trainer.prefetch import Ids
from trainers.roles.identity import Identity
from trainers.runtime import Where
from trainers.strategy import DistributedStrategy


class _Made:
    """A wrapped model, and the parameters that it had before. Those that nobody else holds are let go."""

    def __init__(self, model: torch.nn.Module, former: Mapping[str, torch.nn.Parameter]) -> None:
        self.model = model
        self._former = {name: weakref.ref(param) for name, param in former.items()}

    def former(self) -> dict[str, torch.nn.Parameter]:
        return {name: param for name, ref in self._former.items() if (param := ref()) is not None}


class CollectiveRuntime:
    """Joins the process group when made. `resumed` is the step of the last checkpoint that was loaded."""

    def __init__(self, identity: Identity, strategy: DistributedStrategy) -> None:
        self.strategy = strategy
        self.resumed = 0
        self.agreement = Agreement()
        self._settings: CollectiveSettings | None = None
        self._cadence = Cadence()
        self._models: list[_Made] = []
        self._optimizers: dict[torch.optim.Optimizer, DistributedOptimizer] = {}
        """By the one that the script gave."""
        strategy.collective()  # says now what does not go together
        start(identity)

    def distributed_model(self, model: torch.nn.Module) -> torch.nn.Module:
        settings = self._agreed("distributed_model")
        if settings.paced and self._models:
            raise _once("model")
        former = dict(model.named_parameters())
        made = wrapped(model, self.strategy, settings, self._cadence)
        self._models.append(_Made(made, former))
        if settings.sharded:
            for optimizer in self._optimizers.values():
                _rewire(optimizer, former, made)
        return made

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> DistributedOptimizer:
        settings = self._agreed("distributed_optimizer")
        if settings.paced and self._optimizers:
            raise _once("optimizer")
        names: dict[torch.Tensor, str] = {}
        for each in self._models:
            former = each.former()
            names |= {param: name for name, param in former.items()}
            if settings.sharded:
                _rewire(optimizer, former, each.model)
        inner = replaced(optimizer, settings, names)
        made = stepping(inner, settings, self._cadence, self._average)
        self._optimizers[optimizer] = made
        return made

    def made_of(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer | None:
        """Fleet's optimizer for the script's own, which does not know all of the state; any other itself."""
        return next((made for given, made in self._optimizers.items() if given is optimizer), optimizer)

    def before_checkpoint(self) -> None:
        """Of models and states that ranks have had alone for a while (localsgd) a checkpoint has only one,
        whose parts are from all ranks: bring them together. All ranks call it.
        """
        for optimizer in self._optimizers.values():
            optimizer.before_checkpoint()

    def barrier_worker(self) -> None:
        dist.barrier()

    def gather(self, mine: bytes, call: str) -> list[bytes]:
        return gather(mine)

    def prefetch(self, batches: Iterable[Batch], ids: Callable[[Batch], Ids]) -> Iterator[Batch]:
        return iter(batches)  # every row is here already

    def resume_step(self) -> int:
        return self.resumed

    def save(self, dirname: Where, mode: int) -> None:
        raise _no_servers("save_persistables")

    def stand_ins(self, model: torch.nn.Module, where: Where) -> dict[torch.nn.Module, torch.nn.Module]:
        return {}

    def shrink(self, policy: ShrinkPolicy) -> int:
        raise _no_servers("shrink")

    def init_server(self, dirname: str | None = None) -> None:
        raise _no_servers("init_server")

    def run_server(self) -> None:
        raise _no_servers("run_server")

    def init_worker(self) -> None:
        raise _no_servers("init_worker")

    def stop_worker(self) -> None:
        raise _no_servers("stop_worker")

    def _agreed(self, call: str) -> CollectiveSettings:
        """What the strategy asks for: the first model or optimizer settles it. Raises UsageError for one that
        would have changed what there is already.
        """
        settings = self.strategy.collective()
        if self._settings is None:
            self._cadence = Cadence(settings.merged_steps, settings.localsgd)
        elif changed := self._settings.changed(settings):
            raise UsageError(
                f"fleet.{call}() has a strategy with another {', '.join(changed)} than the model or "
                "optimizer that fleet has made before; give it to fleet.init(is_collective=True, "
                "strategy=strategy), and change nothing in it later"
            )
        self._settings = settings
        return settings

    def _average(self) -> None:
        from trainers.collective.averaging import average_model

        for each in self._models:
            average_model(each.model)


def _rewire(
    optimizer: torch.optim.Optimizer, former: dict[str, torch.nn.Parameter], model: torch.nn.Module
) -> None:
    from trainers.collective.sharding import rewire

    rewire(optimizer, former, model)


def _once(what: str) -> UsageError:
    return UsageError(
        f"fleet.distributed_{what}() was called twice with strategy.gradient_merge or strategy.localsgd, "
        f"which count the steps of one model and one optimizer; use one {what}, or drop them"
    )


def _no_servers(call: str) -> UsageError:
    return UsageError(
        f"fleet.{call}() belongs to parameter-server training, and this job is collective; "
        "remove the call, or use fleet.init(is_collective=False) and start with --server_num"
    )
