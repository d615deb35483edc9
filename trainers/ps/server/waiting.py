"""Waiting: requests without an answer yet, and when trainers wait for each other so that none can go on.
Pure: leaves answers to `service`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from trainers.ps.net.wire import Kind, Message
from trainers.ps.server.members import Member

MOST_WAITING = 4096
"""Requests of one trainer."""
_ENOUGH = 2

Key = tuple[int, int, int]
"""Rank, incarnation and sequence of a request."""


def key_of(request: Message) -> Key:
    return (request.rank, request.incarnation, request.sequence)


@dataclass(slots=True)
class Waiting:
    """`repeats`: how often this was asked again since its trainer last asked anything new: a trainer that
    computes asks nothing, one that waits asks again and again.
    """

    route: bytes
    request: Message
    repeats: int = 0


class WaitingRequests:
    """By key, in the order in which they came."""

    def __init__(self) -> None:
        self._all: dict[Key, Waiting] = {}

    def __len__(self) -> int:
        return len(self._all)

    def repeats(self, request: Message) -> int | None:
        """How often this request has been repeated; one that is new means that its trainer goes on. None
        when too many of this trainer wait.
        """
        key = key_of(request)
        if key in self._all:
            return self._all[key].repeats + 1
        mine = [waiting for other, waiting in self._all.items() if other[:2] == key[:2]]
        for waiting in mine:
            waiting.repeats = 0
        return None if len(mine) >= MOST_WAITING else 0

    def park(self, route: bytes, request: Message, repeats: int) -> None:
        self._all[key_of(request)] = Waiting(route, request, repeats)

    def drop(self, request: Message) -> None:
        """It has been answered."""
        self._all.pop(key_of(request), None)

    def all(self) -> list[Waiting]:
        return list(self._all.values())

    def standstill(self, active: Collection[Member]) -> str | None:
        """Why nobody can go on: some wait at a barrier, and all others for a step. None while somebody
        can.
        """
        barrier: set[int] = set()
        step: set[int] = set()
        for each in self._all.values():
            if each.repeats >= _ENOUGH:
                (barrier if each.request.kind is Kind.BARRIER else step).add(each.request.rank)
        if not barrier or not step or not all(member.rank in barrier | step for member in active):
            return None
        return (
            f"trainer {_listed(barrier)} waits at fleet.barrier_worker(), trainer {_listed(step - barrier)} "
            "for the others' next step: none can go on. All trainers must reach each barrier after the same "
            "steps"
        )


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
