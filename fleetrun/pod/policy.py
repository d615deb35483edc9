"""Restart policy: from an exit and a count to a decision. Pure: no clock, no process, no other machine."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

from fleetrun.pod.process import Exit
from fleetrun.values import dataclass

# 2: the command line was wrong; 126, 127: the program cannot be run. Trying again gives the same.
HOPELESS = frozenset({2, 126, 127})


@dataclass(frozen=True, slots=True)
class Restart:
    """Start again after so many seconds; this is restart `number` of `limit`."""

    after: float
    number: int
    limit: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


Policy = Callable[[Exit, int], Restart | GiveUp]
"""From how a process ended, and how many restarts there have been, to a decision: `decide` with its limit."""


HOPELESS_SAID = GiveUp("a restart will not help")


_SYMPTOMS = re.compile(
    r"timed? ?out|timeout|connection (closed|reset|refused|was)|broken pipe|by peer|watchdog|gloo|nccl"
    r"|DistNetwork|DistStore|DistBackend|TCPStore|has not answered|TrainerLostError",
    re.IGNORECASE,
)


def is_symptom(exit: Exit, message: str) -> bool:
    """Whether a process that ended so, with this error, may be the victim of another: a collective that timed
    out, a connection to a peer that broke, torch's watchdog, which ends the process by SIGABRT.
    """
    return exit.signal == signal.SIGABRT or _SYMPTOMS.search(message) is not None


def after_failure(policy: Policy, exit: Exit, restarts: int, *, hopeless: bool) -> Restart | GiveUp:
    """What `policy` says, unless the process itself said that its next attempt would fail in the same way
    (`hopeless`): a damaged file, no memory.
    """
    return HOPELESS_SAID if hopeless else policy(exit, restarts)


def decide(
    exit: Exit, restarts: int, *, limit: int, backoff: float = 0.5, longest: float = 30.0
) -> Restart | GiveUp:
    """At most `limit` restarts: the first at once, the next after `backoff` seconds, then doubling up to
    `longest`. `restarts` is how many there have been.
    """
    if exit.code in HOPELESS:
        return GiveUp(f"exit code {exit.code}: a restart will not help")
    if restarts >= limit:
        return GiveUp(f"--max_restart is {limit}" if restarts else "restarts are off (--max_restart 0)")
    doublings = min(restarts - 1, 60)  # far past any `longest`, and within what a float can hold
    after = 0.0 if restarts == 0 else min(longest, backoff * 2**doublings)
    return Restart(after, restarts + 1, limit)
