"""Check nodes before a generation (--check). Pair the nodes that measure the link between them, and find the
slow or broken nodes in all results. Pure; `doctor/check.py` measures.

A check has up to two turns. In the first turn, every node computes, copies memory and measures the link to a
neighbour. A link has two ends. In the second turn, each suspect therefore repeats the tests with a node that
is not suspected. If there are more suspects than other nodes, the second turn is repeated for the rest. A
waiting spare makes both turns alone, without a link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from zlib import crc32

from fleetrun.aliases import Integers, Strings
from fleetrun.frozen import frozen_by_name

UNEVEN = 4.0
"""A node this many times slower than the median is too slow."""

SECONDS = {"fast": 3.0, "full": 60.0}
"""Longest time of a turn, in seconds. `full` imports torch."""

LEAST_ALLOWED = {"fast": 1.0, "full": 20.0}
"""Seconds that every node has to answer, because its process may first have to be read from a disk."""

MARGIN = 2.0
"""Further seconds until a node must have reported."""


@frozen_by_name
class Check:
    """The check of a round."""

    turn: int = 0  # 1 or 2, or 0 without a check
    suspects: Strings = ()  # ids of the suspects of the first turn
    usual: float = 0.0  # the median speed of a link in the first turn, in bytes/s
    within: float = 0.0  # seconds that a node has to answer in the second turn
    done: int = 0  # the `digest` of the nodes whose check has ended


NO_CHECK = Check()


@frozen_by_name
class Measured:
    """The results of one node in a turn. 0 means not measured."""

    compute: float = 0.0  # seconds of a fixed computation
    gpu: float = 0.0  # seconds of a fixed computation on its slowest GPU
    memory: float = 0.0  # speed of its memory, in bytes/s
    link: float = 0.0  # speed of the link to its partner, in bytes/s
    error: str = ""  # a problem of the node
    link_error: str = ""  # a problem of the link
    took: float = 0.0  # seconds of all tests except the link
    waited: float = 0.0  # seconds of the link test
    late: float = 0.0  # the time allowed, if that was not enough


def better(one: Measured, other: Measured) -> Measured:
    """Return the better of two turns by the same node."""
    if one.error or one.late or other.error or other.late:
        return other if one.error or one.late else one
    return replace(
        other,
        compute=min(one.compute, other.compute),
        gpu=min(one.gpu, other.gpu),
        memory=max(one.memory, other.memory),
        took=min(one.took, other.took),
    )


Found = Mapping[int, Measured]
"""Results by the ranks of nodes."""


def time_allowed(found: Found, how: str) -> float:
    """Return the seconds after which a silent node is suspected.

    This is four times the other nodes' time, plus twice the time of their link tests, which have a separate
    limit. Without a measured link, a node may take as long as a turn.
    """
    waits = [each.waited for each in found.values() if each.link]
    if not waits:
        return SECONDS[how] + MARGIN
    took = _middle([each.took for each in found.values() if each.took])
    return max(LEAST_ALLOWED[how], UNEVEN * took + 2 * _middle(waits))


def overdue(ids: Sequence[str], found: Found, check: Check, how: str) -> tuple[Integers, float]:
    """Return the ranks that have not answered, and after how many seconds of a turn they are overdue.

    A silent node also delays its partner, so pairs are counted. In the first turn, nodes are overdue only
    after half of them have answered.
    """
    paired = pairs(ids, check.suspects)
    single = set(range(len(ids))).difference(*paired)
    busy = [*paired, *((rank,) for rank in single if measures(ids, check.suspects, rank))]
    missing = [each for each in busy if any(rank not in found for rank in each)]
    answered = [each for each in busy if each not in missing]
    if not check.within and len(missing) > len(answered):
        return (), 0.0
    within = check.within or time_allowed({rank: found[rank] for each in answered for rank in each}, how)
    return tuple(rank for rank in chain(*missing) if rank not in found), within


def digest(ids: Sequence[str]) -> int:
    """Return a number that identifies this set of nodes, never 0."""
    return crc32(",".join(sorted(ids)).encode()) or 1


def pairs(ids: Sequence[str], suspects: Sequence[str]) -> list[tuple[int, int]]:
    """Return pairs of ranks, each rank at most once. The first of a pair measures.

    Without suspects, the pairs are neighbours. With suspects, each pair is a suspect and another node.
    """
    if not suspects:
        return [(rank, rank + 1) for rank in range(0, len(ids) - 1, 2)]
    bad = [rank for rank, id_ in enumerate(ids) if id_ in suspects]
    good = [rank for rank, id_ in enumerate(ids) if id_ not in suspects]
    return list(zip(bad, good, strict=False))


def measures(ids: Sequence[str], suspects: Sequence[str], rank: int) -> bool:
    """Return True if this node has a task in this turn."""
    return not suspects or ids[rank] in suspects or any(rank in pair for pair in pairs(ids, suspects))


def left_over(ids: Sequence[str], suspects: Sequence[str]) -> Strings:
    """Return the suspects without a partner in the second turn."""
    paired = {ids[rank] for pair in pairs(ids, suspects) for rank in pair}
    return tuple(id_ for id_ in ids if id_ in suspects and id_ not in paired)


def usual_speed(found: Found) -> float:
    """Return the median speed of the measured links, in bytes/s, or 0."""
    seconds = _middle([1 / each.link for each in found.values() if each.link])
    return 1 / seconds if seconds else 0.0


def suspects(
    ids: Sequence[str], found: Found, check: Check, missing: Mapping[int, str] | None = None
) -> dict[int, str]:
    """Return the ranks with a problem, and the problem.

    Both ends of a bad link are suspects, unless one end was not suspected before. `missing` holds the
    `overdue` ranks, and why they are suspected.
    """
    wrong = alone(found) | dict(missing or {})
    usual = check.usual or usual_speed(found)
    for pair in pairs(ids, check.suspects):
        why = _way(found, pair, usual)
        for rank in pair if why else ():
            other = ids[pair[1] if rank == pair[0] else pair[0]]
            if not check.suspects or (ids[rank] in check.suspects and other not in check.suspects):
                wrong.setdefault(rank, why)
    return {rank: why for rank, why in wrong.items() if not check.suspects or ids[rank] in check.suspects}


def alone(found: Found) -> dict[int, str]:
    """Return the ranks with a problem that is independent of links, and the problem."""
    return dict(_alone(found))


def _alone(found: Found) -> Iterator[tuple[int, str]]:
    took = _middle([each.took for each in found.values() if each.took])
    for rank, each in found.items():
        if each.error:
            yield rank, each.error
        elif each.late and each.took > UNEVEN * took:  # otherwise all are slow, as on a single busy host
            yield rank, f"the check took longer than {each.late:g} s"
    for what, values in (
        ("its CPU computes", {rank: each.compute for rank, each in found.items()}),
        ("its GPU computes", {rank: each.gpu for rank, each in found.items()}),
        ("its memory is", {rank: each.memory and 1 / each.memory for rank, each in found.items()}),
    ):
        there = {rank: seconds for rank, seconds in values.items() if seconds}
        usual = _middle(list(there.values()))
        for rank, seconds in there.items():
            if seconds > UNEVEN * usual:
                yield rank, f"{what} {seconds / usual:.1f} times slower than the others'"


def _way(found: Found, pair: tuple[int, int], usual: float) -> str:
    there = [found[rank] for rank in pair if rank in found]
    for each in there:
        if each.link_error:
            return f"the link to its partner: {each.link_error}"
    speed = min((each.link for each in there if each.link), default=0.0)
    if speed and speed * UNEVEN < usual:
        return f"the link to its partner is {usual / speed:.1f} times slower than the other links"
    return ""


def _middle(values: Sequence[float]) -> float:
    """Return the lower median, or 0."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
