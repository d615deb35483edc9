"""Which measures there are, who takes part in each, and how often."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import _measures as measure
from _measures import Steps
from _peers import OURS, Peer
from _rows import Result
from _run import Run


def _in_words(result: Result) -> bool:
    return "error" not in result and any(isinstance(value, str) for value in result.values())


def _above(metric: str, limit: float) -> Callable[[Result], bool]:
    """Enough, too, once a figure is so large that its spread does not matter."""

    def enough(result: Result) -> bool:
        figure = result.get(metric)
        return _in_words(result) or (isinstance(figure, float) and figure > limit)

    return enough


@dataclass(frozen=True, slots=True)
class Scenario:
    """`wants` says which launchers take part, `rounds` how often for so many runs asked for, `enough` after
    which result a launcher is not run again: words, such as "leaves 4", would only be repeated. An empty
    result does not count and is tried again.
    """

    name: str
    steps: Callable[[Run], Steps]
    wants: Callable[[Peer], bool] = field(default=lambda peer: True)
    rounds: Callable[[int], int] = field(default=lambda runs: runs)
    enough: Callable[[Result], bool] = field(default=_in_words)


def at_once(function: Callable[[Run], Result]) -> Callable[[Run], Steps]:
    """A scenario without a barrier."""

    def steps(run: Run) -> Steps:
        yield from ()
        return function(run)

    return steps


def _all() -> Iterator[Scenario]:
    yield Scenario("interpreter", at_once(measure.interpreter))
    for n in (1, 8, 32):
        yield Scenario(f"start{n}", at_once(partial(measure.startup, processes=n)))
    for n in (8, 32):
        yield Scenario(f"empty{n}", at_once(partial(measure.empty, processes=n)))
    yield Scenario("command", at_once(measure.command_line), wants=lambda peer: peer.cli)
    yield Scenario("fail4", partial(measure.failure, processes=4))
    yield Scenario("fail64", partial(measure.failure, processes=64), enough=_above("exit", 10_000))
    for name, number in {"kill": signal.SIGKILL, "hup": signal.SIGHUP, "quit": signal.SIGQUIT}.items():
        yield Scenario(f"die-{name}", partial(measure.death, number=number), enough=_above("left", 1))
    inside = partial(measure.death, number=measure.RAISE, below_guard=True)
    yield Scenario("die-raise", inside, wants=lambda peer: peer.in_python, enough=_above("left", 1))
    below = partial(measure.death, number=signal.SIGKILL, below_guard=True)
    yield Scenario("die-below", below, wants=lambda peer: peer.name == OURS, enough=_above("left", 1))
    yield Scenario("daemon", measure.daemon, enough=_above("left", 1))
    yield Scenario("stubborn", measure.stubborn, enough=_above("exit", 10))
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        yield Scenario(f"stop-{each.name[3:].lower()}", partial(measure.stop, number=each))
    for delay in (5, 50):
        yield Scenario(
            f"blame{delay}",
            partial(measure.blame, delay=delay / 1e3),
            wants=lambda peer: bool(peer.named_rank),
            rounds=lambda runs: 2 * runs + 1,
        )
    yield Scenario("restart", measure.restart, wants=lambda peer: peer.restarts)
    yield Scenario("output", measure.output, wants=lambda peer: peer.to_files, enough=_above("wall", 5))
    yield Scenario("idle", measure.idle, rounds=lambda runs: 1)


SCENARIOS = {scenario.name: scenario for scenario in _all()}
