"""Waiting: requests without an answer yet, and when trainers wait for each other so that none can go on.
Pure: leaves answers to `service`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from trainers.ps.net.wire import Kind, Message
from trainers.ps.server.members import Member

MOST_WAITING = 4096
"""Requests of one trainer."""
MEETINGS = (Kind.BARRIER, Kind.GATHER)
"""What all trainers must come to."""
_ENOUGH = 2

Sender = tuple[int, int]
"""Rank and incarnation."""


def _sender(request: Message) -> Sender:
    return (request.rank, request.incarnation)


@dataclass(slots=True)
class Waiting:
    """`repeats`: how often this was asked again since its trainer last asked anything new: a trainer that
    computes asks nothing, one that waits asks again and again.
    """

    route: bytes
    request: Message
    repeats: int = 0


class WaitingRequests:
    """By sender and sequence; those of one sender in the order in which they came."""

    def __init__(self) -> None:
        self._all: dict[Sender, dict[int, Waiting]] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def repeats(self, request: Message) -> int | None:
        """How often this request has been repeated; one that is new means that its trainer goes on. None
        when too many of this trainer wait.
        """
        mine = self._all.get(_sender(request))
        if mine is None:
            return 0
        if request.sequence in mine:
            return mine[request.sequence].repeats + 1
        for waiting in mine.values():
            waiting.repeats = 0
        return None if len(mine) >= MOST_WAITING else 0

    def park(self, route: bytes, request: Message, repeats: int) -> None:
        mine = self._all.setdefault(_sender(request), {})
        mine[request.sequence] = Waiting(route, request, repeats)

    def drop(self, request: Message) -> None:
        """It has been answered."""
        mine = self._all.get(_sender(request))
        if mine is not None:
            mine.pop(request.sequence, None)
            if not mine:
                del self._all[_sender(request)]

    def all(self) -> list[Waiting]:
        return [waiting for mine in self._all.values() for waiting in mine.values()]

    def standstill(self, active: Collection[Member], needs_others: Callable[[Message], bool]) -> str | None:
        """Why nobody can go on: some wait at a barrier, or in a gathering, and all others for something else
        that needs others. None while somebody can.
        """
        barrier: set[int] = set()
        gathering: set[int] = set()
        step: set[int] = set()
        places = {Kind.BARRIER: barrier, Kind.GATHER: gathering}
        for each in self.all():
            if each.repeats >= _ENOUGH and needs_others(each.request):
                places.get(each.request.kind, step).add(each.request.rank)
        step -= barrier | gathering  # who waits there may have a push underway
        waits = [
            f"trainer {_listed(ranks)} {where}"
            for ranks, where in (
                (barrier, "waits at fleet.barrier_worker()"),
                (gathering, "waits in fleet.util"),
                (step, "waits for the others' next step"),
            )
            if ranks
        ]
        if len(waits) < 2 or not all(member.rank in barrier | gathering | step for member in active):
            return None
        return (
            f"{', '.join(waits)}: none can go on. All trainers must come to these calls after the same steps"
        )


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
