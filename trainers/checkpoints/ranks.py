"""What ranks tell each other in a save or a load: rank 0 decides, all report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from trainers.checkpoints.manifest import CheckpointError
from trainers.errors import FleetError

T = TypeVar("T")


class Ranks:
    """The ranks of the default process group; a process without one is a rank of one. `group`: another group
    of the same ranks to talk through.

    Every method is called by all ranks, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        joined = dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank() if joined else 0
        self.world = dist.get_world_size() if joined else 1

    def first_tells(self, ask: Callable[[], T]) -> T:
        """What `ask` returns on the first rank; raises on all of them the FleetError that it raises, and
        CheckpointError for its OSError.
        """
        told: list[Any] = [None, None]
        if self.rank == 0:
            told = _tried(ask)
        if self.world > 1:
            dist.broadcast_object_list(told, src=0, group=self.group)
        answer: T = _answer(told)
        return answer

    def each(self, act: Callable[[], T]) -> T:
        """Return what `act` returns on this rank; raises on all what the first of them raises."""
        told = _tried(act)
        self.all_tell(lambda: _answer([None, told[1]]))
        answer: T = told[0]
        return answer

    def all_tell(self, mine: Callable[[], T]) -> list[T]:
        """What `mine` returns on each rank, in rank order; raises on all what the first of them raises."""
        told = _tried(mine)
        everyone: list[Any] = [told]
        if self.world > 1:
            everyone = [None] * self.world
            dist.all_gather_object(everyone, told, group=self.group)
        return [_answer(each) for each in everyone]


def done(act: Callable[[], T]) -> Callable[[], T]:
    """Run `act` now; calling the returned function gives its result, or raises its error."""
    told = _tried(act)
    return lambda: _answer(told)


def _tried(act: Callable[[], Any]) -> list[Any]:
    """[result, error]"""
    try:
        return [act(), None]
    except FleetError as error:
        return [None, error]
    except OSError as error:
        return [None, CheckpointError(str(error))]


def _answer(told: list[Any]) -> Any:
    result, error = told
    if error is not None:
        raise error
    return result
