"""Find stragglers in a job that makes progress, from the times at which ranks enter the collectives of a
group. All functions are pure.

In lockstep, every rank makes as many steps per second as the slowest, so rates do not reveal the slowest
rank. The lateness of a rank is how much later than most ranks it enters a collective.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from fleetrun.pod.events import Late, Verdict
from fleetrun.probe.states import RankState

WINDOW = 60.0
"""Seconds before now. Older collectives do not describe the current state of the job."""

ENOUGH = 20
"""Fewest collectives of a rank in that time for a result."""

MUCH = 0.1
"""Share of the time for which others wait, from which a warning is worthwhile."""

_TIMES = 3.0
"""Factor between the share of a straggler and the median share, which equally fast ranks exceed in turn."""


def lateness(states: Sequence[RankState]) -> tuple[Late, ...]:
    """Return the lateness of each trainer that shares a group with others, the latest first.

    Clocks of other nodes are corrected by `RankState.ahead`. Differences within the uncertainty of the clocks
    count as zero.
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
    """Yield the entry times of each collective that all members of its group have entered."""
    groups = {(name, group.ranks) for each in trainers.values() for name, group in each.groups.items()}
    for name, ranks in sorted(groups):
        entered = {rank: trainers[rank].arrivals.get(name, {}) for rank in ranks if rank in trainers}
        if not 1 < len(entered) == len(ranks):
            continue
        for number in set.intersection(*(set(each) for each in entered.values())):
            yield {rank: entered[rank][number] - trainers[rank].ahead for rank in ranks}


def _late(state: RankState, spans: Sequence[tuple[float, float]]) -> Late:
    """Summarize a rank. `spans`: the time at which most ranks had entered, and the time of this rank."""
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
    """Return the seconds covered by any span.

    Overlapping collectives, such as in one backward pass, count once.
    """
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def straggler(states: Sequence[RankState], late: Sequence[Late]) -> Verdict | None:
    """Return a diagnosis for the ranks that keep others waiting much, and much longer than most ranks do.

    Equally fast ranks are late in turn. A rank is only slow if it is late each time.
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
