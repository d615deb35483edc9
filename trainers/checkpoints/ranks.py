"""Exchange results between ranks in a save or a load. Rank 0 decides, and all ranks report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from trainers.checkpoints.manifest import CheckpointError
from trainers.errors import FleetError

T = TypeVar("T")


class Ranks:
    """The ranks of the default process group. A process without a group is a rank of one.

    `group` is another group of the same ranks for the messages. All ranks must call every method in the same
    order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        joined = dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank() if joined else 0
        self.world = dist.get_world_size() if joined else 1

    def broadcast(self, ask: Callable[[], T]) -> T:
        """Return the result of `ask` on the first rank.

        If `ask` raises there, the first rank raises its exception. The others raise the same FleetError, or
        CheckpointError for any other exception.
        """
        outcome = _tried(ask) if self.rank == 0 else [None, None]
        sent = self._for_others(outcome)
        if self.world > 1:
            dist.broadcast_object_list(sent, src=0, group=self.group)
        answer: T = _answer(outcome if self.rank == 0 else sent)
        return answer

    def each(self, act: Callable[[], T]) -> T:
        """Return the result of `act` on this rank. Raises errors as `gather` does."""
        outcome = _tried(act)
        self.gather(lambda: _answer([None, outcome[1]]))
        answer: T = outcome[0]
        return answer

    def gather(self, mine: Callable[[], T]) -> list[T]:
        """Return the result of `mine` on each rank, in rank order.

        If it raises on some ranks, all raise the first of these errors, as in `broadcast`. A rank raises
        its own exception if that is not a FleetError.
        """
        outcome = _tried(mine)
        everyone: list[Any] = [outcome]
        if self.world > 1:
            everyone = [None] * self.world
            dist.all_gather_object(everyone, self._for_others(outcome), group=self.group)
        if not isinstance(outcome[1], FleetError | None):
            raise outcome[1]
        return [_answer(each) for each in everyone]

    def _for_others(self, outcome: list[Any]) -> list[Any]:
        """Convert a script's exception, which may not be serializable."""
        result, error = outcome
        if error is not None and not isinstance(error, FleetError):
            error = CheckpointError(f"rank {self.rank}: {type(error).__name__}: {error}")
        return [result, error]


def done(act: Callable[[], T]) -> Callable[[], T]:
    """Run `act` now. The returned function returns its result, or raises its error."""
    outcome = _tried(act)
    return lambda: _answer(outcome)


def _tried(act: Callable[[], object]) -> list[Any]:
    """Return [result, error]."""
    try:
        return [act(), None]
    except OSError as error:
        return [None, CheckpointError(str(error))]
    except Exception as error:  # noqa: BLE001 - also what a script's state_dict raises: the others wait
        return [None, error]


def _answer(outcome: list[Any]) -> Any:
    result, error = outcome
    if error is not None:
        raise error
    return result
