"""Which ranks keep the others waiting, of a job that makes progress: from when each entered the collectives
that all members of a group have entered. Pure.

In lockstep every rank does as many steps per second as the slowest, so that rates cannot tell which one that
is. A rank is late by how much later than most it comes to a collective.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from fleetrun.pod.events import Late, Verdict
from fleetrun.probe.states import RankState

ENOUGH = 20
"""Collectives, below which nothing is said."""

OFTEN = 0.8
"""A rank that is no slower than the others comes after most of them in half of all collectives."""

MUCH = 0.1
"""The share of the time for which others wait that is worth a warning."""


def lateness(states: Sequence[RankState]) -> tuple[Late, ...]:
    """Of each trainer with others in a group, the latest first. Clocks of other nodes are corrected by
    `RankState.ahead`.
    """
    trainers = {each.rank: each for each in states if each.role == "trainer" and each.answered and each.alive}
    waits: dict[int, list[tuple[float, float]]] = {}
    first, last = float("inf"), float("-inf")
    for moments in _collectives(trainers):
        times = sorted(moments.values())
        most = times[(len(times) - 1) // 2]
        first, last = min(first, times[0]), max(last, times[-1])
        for rank, moment in moments.items():
            waits.setdefault(rank, []).append((most, moment))
    found = [_late(trainers[rank], spans, last - first) for rank, spans in waits.items()]
    return tuple(sorted((each for each in found if each.of >= ENOUGH), key=lambda each: -each.share))


def _collectives(trainers: Mapping[int, RankState]) -> Iterable[dict[int, float]]:
    """For each collective that all members of its group have entered: when each of them did."""
    for name, ranks in sorted({(name, group.ranks) for each in trainers.values()
                               for name, group in each.groups.items()}):  # fmt: skip
        entered = {rank: trainers[rank].arrivals.get(name, {}) for rank in ranks if rank in trainers}
        if not 1 < len(entered) == len(ranks):
            continue
        for number in set.intersection(*(set(each) for each in entered.values())):
            yield {rank: entered[rank][number] - trainers[rank].ahead for rank in ranks}


def _late(state: RankState, spans: Sequence[tuple[float, float]], seconds: float) -> Late:
    """`spans`: when most had come, and when it came."""
    behind = [(most, moment) for most, moment in spans if moment > most]
    return Late(
        rank=state.rank,
        title=state.title,
        node=state.node,
        share=min(1.0, _covered(behind) / seconds) if seconds > 0 else 0.0,
        seconds=statistics.median(moment - most for most, moment in behind) if behind else 0.0,
        behind=len(behind),
        of=len(spans),
    )


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in any of them: collectives that overlap, as those of one backward pass do, count once."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def straggler(states: Sequence[RankState], late: Sequence[Late]) -> Verdict | None:
    """The ranks that come late again and again, if others lose much time by it."""
    unsure = 2 * max((each.unsure for each in states), default=0.0)
    found = [
        each
        for each in late
        if each.share >= MUCH and each.behind >= OFTEN * each.of and each.seconds > unsure
    ]
    if not found:
        return None
    worst = found[0]
    where = f" ({worst.node})" if worst.node else ""
    others = f", and {len(found) - 1} more do" if len(found) > 1 else ""
    sentence = (
        f"{worst.title}{where} keeps the others waiting for {worst.share:.0%} of the time: it came to "
        f"{worst.behind} of the last {worst.of} collectives after most of them, by "
        f"{1000 * worst.seconds:.3g} ms in the median{others}"
    )
    (state,) = (each for each in states if (each.rank, each.role) == (worst.rank, "trainer"))
    ranks = tuple(each.rank for each in found)
    return Verdict(kind="straggler", sentence=sentence, ranks=ranks, stack=state.stack_lines)
