"""The check of nodes before a generation (--check): which two measure the way between them, and from what all
have found to the nodes that are slow or broken. Pure; `doctor/check.py` measures.

A check has up to two turns. In the first every node computes, copies memory and measures the way to a
neighbour. A way has two ends: so in the second each suspect does it again, with a node that is not
suspected. Where there are more suspects than others, the second is repeated for the rest. A spare that waits
has both turns alone, without a way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from zlib import crc32

from fleetrun.aliases import Integers, Strings
from fleetrun.frozen import frozen_by_name

UNEVEN = 4.0
"""So many times slower than the middle one is too slow."""

SECONDS = {"fast": 3.0, "full": 60.0}
"""How long a turn takes at most; `full` imports torch."""

LEAST_ALLOWED = {"fast": 1.0, "full": 20.0}
"""Seconds that every node has to answer: its process may have to be read from a disk first."""

MARGIN = 2.0
"""Seconds beyond that in which a node must have reported."""


@frozen_by_name
class Check:
    """Of a round. `turn`: 0: none, 1 or 2. Of the first turn the `suspects`, by id, and `usual`, the speed of
    the middle way (bytes/s); `within`: the seconds that a node has to answer in the second.
    `done`: the `digest` of the nodes whose check is over.
    """

    turn: int = 0
    suspects: Strings = ()
    usual: float = 0.0
    within: float = 0.0
    done: int = 0


NO_CHECK = Check()


@frozen_by_name
class Measured:
    """What one node found in a turn: the seconds of a fixed computation, of one on its slowest GPU, the speed
    of its memory and of the way to its partner (bytes/s); 0: not measured. `error`: what is wrong with it,
    `link_error`: with the way. `took`: seconds of all but the way, `waited`: of the way; `late`: the time
    allowed, if that was not enough.
    """

    compute: float = 0.0
    gpu: float = 0.0
    memory: float = 0.0
    link: float = 0.0
    error: str = ""
    link_error: str = ""
    took: float = 0.0
    waited: float = 0.0
    late: float = 0.0


def better(one: Measured, other: Measured) -> Measured:
    """The better of two turns by the same node."""
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
"""By the ranks of nodes."""


def time_allowed(found: Found, how: str) -> float:
    """Seconds after which a node that has not answered is suspected: four times what it took the others, and
    twice the time for their ways, which has a limit of its own. Where no way was measured: as long as a turn
    may take.
    """
    ways = [each.waited for each in found.values() if each.link]
    if not ways:
        return SECONDS[how] + MARGIN
    took = _middle([each.took for each in found.values() if each.took])
    return max(LEAST_ALLOWED[how], UNEVEN * took + 2 * _middle(ways))


def overdue(ids: Sequence[str], found: Found, check: Check, how: str) -> tuple[Integers, float]:
    """The ranks that have not answered, and after how many seconds of a turn they are overdue. A node that
    does not answer delays its partner as well, so pairs are counted. In the first turn no node is
    overdue before half of them have answered.
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
    return crc32(",".join(sorted(ids)).encode()) or 1


def pairs(ids: Sequence[str], suspects: Sequence[str]) -> list[tuple[int, int]]:
    """Ranks, each at most once; the first of a pair measures. Neighbours; or each suspect and another."""
    if not suspects:
        return [(rank, rank + 1) for rank in range(0, len(ids) - 1, 2)]
    bad = [rank for rank, id_ in enumerate(ids) if id_ in suspects]
    good = [rank for rank, id_ in enumerate(ids) if id_ not in suspects]
    return list(zip(bad, good, strict=False))


def measures(ids: Sequence[str], suspects: Sequence[str], rank: int) -> bool:
    """Whether this node has something to do in this turn."""
    return not suspects or ids[rank] in suspects or any(rank in pair for pair in pairs(ids, suspects))


def left_over(ids: Sequence[str], suspects: Sequence[str]) -> Strings:
    """The suspects who have no partner in the second turn."""
    paired = {ids[rank] for pair in pairs(ids, suspects) for rank in pair}
    return tuple(id_ for id_ in ids if id_ in suspects and id_ not in paired)


def usual_speed(found: Found) -> float:
    seconds = _middle([1 / each.link for each in found.values() if each.link])
    return 1 / seconds if seconds else 0.0


def suspects(
    ids: Sequence[str], found: Found, check: Check, missing: Mapping[int, str] | None = None
) -> dict[int, str]:
    """The ranks with which something is wrong, and what; of a way both ends, unless one was not suspected
    before. `missing`: those that are `overdue`, and why they are suspected.
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
    """The ranks with which something is wrong whatever the ways are, and what."""
    return dict(_alone(found))


def _alone(found: Found) -> Iterator[tuple[int, str]]:
    took = _middle([each.took for each in found.values() if each.took])
    for rank, each in found.items():
        if each.error:
            yield rank, each.error
        elif each.late and each.took > UNEVEN * took:  # else all are slow, as on one machine that is busy
            yield rank, f"the check took longer than {each.late:g} s"
    for what, values in (
        ("its processor computes", {rank: each.compute for rank, each in found.items()}),
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
            return f"the way to its partner: {each.link_error}"
    speed = min((each.link for each in there if each.link), default=0.0)
    if speed and speed * UNEVEN < usual:
        return f"the way to its partner is {usual / speed:.1f} times slower than the others"
    return ""


def _middle(values: Sequence[float]) -> float:
    """Of two seconds the smaller."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
