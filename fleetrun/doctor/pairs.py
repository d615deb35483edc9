"""Who measures with whom, and when. Pure."""

from __future__ import annotations

MOST_TURNS = 8
"""With more machines than that, each is measured with so many others, whose ways cross all of the network."""

Turn = tuple[tuple[int, int], ...]
"""Pairs that do not touch each other; the first of a pair does the measuring."""


def turns(count: int) -> list[Turn]:
    """Every machine at most once in a turn, every pair at most once at all: a round robin (circle method).

    So no two measurements share a machine, and `count` machines need `count - 1` turns, or one more.
    """
    players = [*range(count), *([-1] if count % 2 else [])]
    found: list[Turn] = []
    for _ in range(min(MOST_TURNS, len(players) - 1)):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        found.append(tuple((one, other) for one, other in pairs if -1 not in (one, other)))
        players = [players[0], players[-1], *players[1:-1]]
    return found


def partner(turn: Turn, me: int) -> tuple[int, bool] | None:
    """Whom this machine meets in a turn, and whether it does the measuring; None: it rests."""
    for one, other in turn:
        if me == one:
            return other, True
        if me == other:
            return one, False
    return None
