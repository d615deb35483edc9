"""From the nodes that are there to the members of a generation, in rank order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import ip_address

from fleetrun.elastic.rounds.records import Node
from fleetrun.elastic.rounds.view import Came


def choose(
    nodes: Iterable[Came], previous: Sequence[Node], most: int, *, sort_ip: bool = False
) -> tuple[Node, ...]:
    """At most `most` of these: members of the previous generation first, then those that ask for a rank, then
    by arrival. No two of them may ask for the same rank.

    Who asks for a rank gets it. The others of the previous generation keep theirs; where one is missing, its
    host may have come back, else the last ranks move into the holes, and newcomers follow: by address with
    `sort_ip`, else by arrival.
    """
    ranks = {node.id: rank for rank, node in enumerate(previous)}
    there = sorted(nodes, key=lambda came: (came.node.id not in ranks, came.node.rank < 0, came.created))[
        :most
    ]
    seats = _Seats(len(there))
    for came in there:
        seats.take(came.node.rank, came.node)
    for came in there:
        seats.take(ranks.get(came.node.id, -1), came.node)
    empty = _empty_places({came.node.id for came in there}, previous)
    for came in there:
        if came.node.id not in ranks:
            seats.take(empty.get((came.node.host, came.node.name), -1), came.node)
    movers = [came.node for came in there if came.node.id in ranks]
    newcomers = [came for came in there if came.node.id not in ranks]
    newcomers.sort(key=lambda came: (_address(came.node.host) if sort_ip else (), came.created))
    seats.fill(sorted(movers, key=lambda node: ranks[node.id]))
    seats.fill(came.node for came in newcomers)
    return seats.all()


class _Seats:
    def __init__(self, size: int) -> None:
        self._seats: list[Node | None] = [None] * size
        self._seated: set[str] = set()

    def take(self, rank: int, node: Node) -> None:
        """If it is free, and the node has none."""
        if 0 <= rank < len(self._seats) and self._seats[rank] is None and node.id not in self._seated:
            self._seats[rank] = node
            self._seated.add(node.id)

    def fill(self, nodes: Iterable[Node]) -> None:
        free = (rank for rank, node in enumerate(self._seats) if node is None)
        for node in nodes:
            if node.id not in self._seated:
                self.take(next(free), node)

    def all(self) -> tuple[Node, ...]:
        return tuple(node for node in self._seats if node is not None)


def _empty_places(there: set[str], previous: Sequence[Node]) -> dict[tuple[str, str], int]:
    """Ranks of the previous generation whose nodes are missing, by machine."""
    empty: dict[tuple[str, str], int] = {}
    for rank, node in enumerate(previous):
        if node.id not in there:
            empty.setdefault((node.host, node.name), rank)
    return empty


def _address(host: str) -> tuple[int, int, str]:
    """Numbers in numeric order, then names."""
    try:
        address = ip_address(host)
    except ValueError:
        return (9, 0, host)
    return (address.version, int(address), "")
