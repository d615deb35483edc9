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

WINDOW = 60.0
"""Seconds before now: older collectives say nothing about the job as it is."""

ENOUGH = 20
"""Collectives of a rank in that time, below which nothing is said."""

MUCH = 0.1
"""The share of the time for which others wait that is worth a warning."""

_TIMES = 3.0
"""How often the share of a rank is that of most. Of equally fast ranks one is later than that at times, and
another one the next time.
"""


def lateness(states: Sequence[RankState]) -> tuple[Late, ...]:
    """Of each trainer with others in a group, the latest first. Clocks of other nodes are corrected by
    `RankState.ahead`, and what is less than they are unsure by counts as nothing.
    """
    trainers = {each.rank: each for each in states if each.role == "trainer" and each.answered and each.alive}
    since = max((each.now - each.ahead for each in trainers.values()), default=0.0) - WINDOW
    unsure = 2 * max((each.unsure for each in trainers.values()), default=0.0)
    spans: dict[int, list[tuple[float, float]]] = {}
    for moments in _collectives(trainers):
        times = sorted(moments.values())
        most = times[(len(times) - 1) // 2]
        for rank, moment in moments.items() if most >= since else ():
            spans.setdefault(rank, []).append((most, moment if moment - most > unsure else most))
    found = [_late(trainers[rank], each) for rank, each in spans.items() if len(each) >= ENOUGH]
    return tuple(sorted(found, key=lambda each: -each.share))


def _collectives(trainers: Mapping[int, RankState]) -> Iterable[dict[int, float]]:
    """For each collective that all members of its group have entered: when each of them did."""
    groups = {(name, group.ranks) for each in trainers.values() for name, group in each.groups.items()}
    for name, ranks in sorted(groups):
        entered = {rank: trainers[rank].arrivals.get(name, {}) for rank in ranks if rank in trainers}
        if not 1 < len(entered) == len(ranks):
            continue
        for number in set.intersection(*(set(each) for each in entered.values())):
            yield {rank: entered[rank][number] - trainers[rank].ahead for rank in ranks}


def _late(state: RankState, spans: Sequence[tuple[float, float]]) -> Late:
    """`spans`: when most had come, and when it came."""
    behind = [(most, moment) for most, moment in spans if moment > most]
    seconds = max(moment for _, moment in spans) - min(most for most, _ in spans)
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
    """The ranks for which the others wait much, and much longer than for most. Of ranks that are equally fast
    that may be any at a time: only if it is the same rank each time, it is slow.
    """
    usual = late[len(late) // 2].share if late else 0.0
    found = [each for each in late if each.share >= max(MUCH, _TIMES * usual)]
    if not found:
        return None
    worst = found[0]
    where = f" ({worst.node})" if worst.node else ""
    more = f", and {len(found) - 1} more do" if len(found) > 1 else ""
    sentence = (
        f"{worst.title}{where} keeps the others waiting for {worst.share:.0%} of the time: it came to "
        f"{worst.behind} of the last {worst.of} collectives after at least half of them, by "
        f"{1000 * worst.seconds:.3g} ms in the median{more}"
    )
    stack = next(each.stack_lines for each in states if (each.rank, each.role) == (worst.rank, "trainer"))
    return Verdict(kind="straggler", sentence=sentence, ranks=tuple(each.rank for each in found), stack=stack)
