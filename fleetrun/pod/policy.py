"""Restart policy: from an exit and a count to a decision. Knows no clock, no process and no peer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun.values import dataclass

if TYPE_CHECKING:
    from fleetrun.pod.process import Exit


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """At most `limit` restarts: the first at once, the next after `backoff` seconds, then doubling up to
    `longest`.
    """

    limit: int
    backoff: float = 0.5
    longest: float = 30.0

    def decide(self, exit: Exit, restarts: int) -> Restart | GiveUp:
        """`restarts` is how many there have been."""
        if exit.code in HOPELESS:
            return GiveUp(f"exit code {exit.code} cannot heal by a restart")
        if restarts >= self.limit:
            return GiveUp(
                f"--max_restart is {self.limit}" if restarts else "restarts are off (--max_restart 0)"
            )
        doublings = min(restarts - 1, 60)  # far past any `longest`, and within what a float can hold
        after = 0.0 if restarts == 0 else min(self.longest, self.backoff * 2**doublings)
        return Restart(after, restarts + 1, self.limit)
