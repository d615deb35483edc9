"""Which ranks keep the others waiting, from when each entered its collectives."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from fleetrun.probe.lateness import ENOUGH, lateness, straggler
from fleetrun.probe.states import Group, RankState

STEP = 0.1


def job(
    delays: Sequence[float],
    steps: int = 100,
    *,
    jitter: float = 0.0,
    groups: Mapping[str, tuple[int, ...]] | None = None,
    **more: object,
) -> list[RankState]:
    """Of ranks in lockstep: each step takes STEP, and that rank's delay longer until it is in the collective,
    which ends for all when the last has come.
    """
    source = random.Random(7)
    groups = groups or {"0": tuple(range(len(delays)))}
    arrivals: list[dict[str, dict[int, float]]] = [{name: {} for name in groups} for _ in delays]
    begin = 1e9
    for number in range(1, steps + 1):
        come = [begin + STEP + delay + jitter * source.random() for delay in delays]
        for name, ranks in groups.items():
            for rank in ranks:
                arrivals[rank][name][number] = come[rank]
        begin = max(come)
    return [
        RankState(
            rank=rank,
            title=f"trainer {rank}",
            answered=True,
            groups={name: Group(ranks, steps) for name, ranks in groups.items() if rank in ranks},
            arrivals={name: each for name, each in found.items() if each},
            **more,
        )
        for rank, found in enumerate(arrivals)
    ]


def found(states: Sequence[RankState]) -> tuple[int, ...]:
    verdict = straggler(states, lateness(states))
    return () if verdict is None else verdict.ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_share_of_the_time_for_which_the_others_wait(ranks: int) -> None:
    states = job([0.0, 0.05, *[0.0] * (ranks - 2)])
    first, *rest = lateness(states)
    assert (first.rank, first.behind, first.of) == (1, 100, 100)
    assert first.share == pytest.approx(1 / 3, rel=0.02)
    assert first.seconds == pytest.approx(0.05)
    assert all(each.share == 0 for each in rest)
    verdict = straggler(states, lateness(states))
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("straggler", (1,))
    for noun in ("trainer 1 ", "34%", "100 of the last 100", "50 ms"):
        assert noun in verdict.sentence


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_rank_is_named_where_all_are_late_at_times(ranks: int) -> None:
    assert found(job([0.0] * ranks, jitter=0.1)) == ()


def test_a_straggler_among_ranks_that_vary() -> None:
    assert found(job([0.0, 0.0, 0.1, 0.0], jitter=0.05)) == (2,)


def test_all_ranks_of_a_slow_node() -> None:
    states = job([0.0, 0.0, 0.05, 0.05])
    assert found(states) == (2, 3)


def test_a_delay_that_no_one_notices_is_not_worth_a_warning() -> None:
    assert found(job([0.0, 0.005, 0.0])) == ()


def test_collectives_of_one_backward_pass_count_once() -> None:
    """Three buckets, which are entered right after one another and do not wait."""
    states = job([0.0, 0.05])
    buckets = [
        {**each.arrivals, "1": {n: t + 1e-3 for n, t in each.arrivals["0"].items()}} for each in states
    ]
    groups = {"0": Group((0, 1), 100), "1": Group((0, 1), 100)}
    both = [
        RankState(rank=each.rank, title=each.title, answered=True, groups=groups, arrivals=arrivals)
        for each, arrivals in zip(states, buckets, strict=True)
    ]
    assert lateness(both)[0].share == pytest.approx(0.34, abs=0.02)


def test_groups_of_some_ranks() -> None:
    """Two pairs: 3 keeps 2 waiting, and the others do not know it."""
    states = job([0.0, 0.0, 0.0, 0.06], groups={"1": (0, 1), "2": (2, 3)})
    assert found(states) == (3,)


def test_a_clock_that_is_ahead_is_corrected() -> None:
    states = job([0.0, 0.0])
    ahead = [
        states[0],
        RankState(
            rank=1, title="trainer 1", node="node 1, b", answered=True, groups=states[1].groups, ahead=0.5,
            arrivals={"0": {number: each + 0.5 for number, each in states[1].arrivals["0"].items()}},
        ),
    ]  # fmt: skip
    assert lateness(ahead)[0].share == pytest.approx(0.0, abs=1e-4)


def test_less_than_the_clocks_are_unsure_by_is_not_told() -> None:
    assert found(job([0.0, 0.05], unsure=0.01)) == (1,)
    assert found(job([0.0, 0.05], unsure=0.04)) == ()
    assert lateness(job([0.0, 0.05], unsure=0.04))[0].share == 0.0


def test_a_group_of_which_a_rank_is_not_known_tells_nothing() -> None:
    assert lateness(job([0.0, 0.05, 0.0])[:2]) == ()


@pytest.mark.parametrize("each", [3, 6])
def test_several_collectives_a_step(each: int) -> None:
    """After the first of a step all are level again, so that the straggler is late in that one only."""
    states = job([0.0, 0.06, 0.0], 30)
    groups = {"0": Group((0, 1, 2), 30 * each)}
    begin = 1e9
    arrivals: list[dict[int, float]] = [{}, {}, {}]
    for number in range(1, 30 * each + 1):
        come = [begin + 0.002 + (0.06 if rank == 1 and number % each == 1 else 0.0) for rank in range(3)]
        for rank in range(3):
            arrivals[rank][number] = come[rank]
        begin = max(come)
    told = [
        RankState(rank=rank, title=state.title, answered=True, groups=groups, arrivals={"0": arrivals[rank]})
        for rank, state in enumerate(states)
    ]
    assert found(told) == (1,)


def test_what_is_long_ago_tells_nothing() -> None:
    """A job that evaluates on one rank."""
    states = [replace(each, now=1e9 + 3600.0) for each in job([0.0, 0.05])]
    assert lateness(states) == ()


def test_a_group_that_is_used_rarely_does_not_hide_a_straggler() -> None:
    states = job([0.0, 0.05], 100)
    rarely = {number: 1e9 + 5.0 * number for number in range(1, 13)}
    others = [
        RankState(rank=rank, title=f"trainer {rank}", answered=True, groups={"2": Group((2, 3), 12)},
                  arrivals={"2": rarely})
        for rank in (2, 3)
    ]  # fmt: skip
    assert found([*states, *others]) == (1,)


def test_few_collectives_tell_nothing() -> None:
    assert lateness(job([0.0, 0.05], ENOUGH - 1)) == ()
    assert lateness(job([0.0, 0.05], ENOUGH)) != ()
