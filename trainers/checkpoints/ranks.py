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
        """Return what `ask` returns on the first rank. Raises what it raises there: on the others the
        FleetError, or CheckpointError for any other exception.
        """
        told = _tried(ask) if self.rank == 0 else [None, None]
        sent = self._for_others(told)
        if self.world > 1:
            dist.broadcast_object_list(sent, src=0, group=self.group)
        answer: T = _answer(told if self.rank == 0 else sent)
        return answer

    def each(self, act: Callable[[], T]) -> T:
        """Return what `act` returns on this rank. Raises as `all_tell` does."""
        told = _tried(act)
        self.all_tell(lambda: _answer([None, told[1]]))
        answer: T = told[0]
        return answer

    def all_tell(self, mine: Callable[[], T]) -> list[T]:
        """Return what `mine` returns on each rank, in rank order. If it raises on some, all raise what the
        first of them raises, as in `first_tells`. A rank raises its own exception if that is no FleetError.
        """
        told = _tried(mine)
        everyone: list[Any] = [told]
        if self.world > 1:
            everyone = [None] * self.world
            dist.all_gather_object(everyone, self._for_others(told), group=self.group)
        if not isinstance(told[1], FleetError | None):
            raise told[1]
        return [_answer(each) for each in everyone]

    def _for_others(self, told: list[Any]) -> list[Any]:
        """An exception of a script may not be one that can be sent."""
        result, error = told
        if error is not None and not isinstance(error, FleetError):
            error = CheckpointError(f"rank {self.rank}: {type(error).__name__}: {error}")
        return [result, error]


def done(act: Callable[[], T]) -> Callable[[], T]:
    """Run `act` now; calling the returned function gives its result, or raises its error."""
    told = _tried(act)
    return lambda: _answer(told)


def _tried(act: Callable[[], Any]) -> list[Any]:
    """[result, error]"""
    try:
        return [act(), None]
    except OSError as error:
        return [None, CheckpointError(str(error))]
    except Exception as error:  # noqa: BLE001 - also what a script's state_dict raises: the others wait
        return [None, error]


def _answer(told: list[Any]) -> Any:
    result, error = told
    if error is not None:
        raise error
    return result
