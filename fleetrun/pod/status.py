"""States of containers and pods, the moves between them, and what an exit says. Knows no process.

                +-----------------> FAILED <---------+
                |                      ^             |
UNINIT --> READY --> RUNNING --> TERMINATING --> COMPLETED
             ^          |              |
             |          v              |
             +---- RESTARTING <--------+
"""

from __future__ import annotations

import signal
from enum import StrEnum

from fleetrun.values import dataclass


class Status(StrEnum):
    """The words are Paddle's; they appear in `Run Pod: ..., status ready`."""

    UNINIT = "uninit"
    READY = "ready"
    RUNNING = "running"
    TERMINATING = "terminating"
    RESTARTING = "restarting"
    COMPLETED = "completed"
    FAILED = "failed"


_MOVES: dict[Status, frozenset[Status]] = {
    Status.UNINIT: frozenset({Status.READY, Status.FAILED}),
    Status.READY: frozenset({Status.RUNNING, Status.TERMINATING, Status.FAILED}),
    Status.RUNNING: frozenset({Status.TERMINATING, Status.RESTARTING, Status.COMPLETED, Status.FAILED}),
    Status.TERMINATING: frozenset({Status.RESTARTING, Status.COMPLETED, Status.FAILED}),
    Status.RESTARTING: frozenset({Status.READY, Status.RUNNING, Status.TERMINATING, Status.FAILED}),
    Status.COMPLETED: frozenset({Status.RESTARTING}),
    Status.FAILED: frozenset({Status.RESTARTING}),
}


def move(now: Status, then: Status) -> Status:
    """`then`, if a container or pod may go there from `now`. Raises RuntimeError (a bug, never bad input)
    otherwise.
    """
    if then not in _MOVES[now]:
        raise RuntimeError(f"illegal move from {now} to {then}")
    return then


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended. `code` is subprocess's: the exit code, or minus the signal."""

    code: int

    @property
    def ok(self) -> bool:
        return self.code == 0

    @property
    def signal(self) -> int | None:
        return -self.code if self.code < 0 else None

    @property
    def shell_code(self) -> int:
        """What a shell reports: the code, or 128 + the signal."""
        return 128 - self.code if self.code < 0 else self.code

    def __str__(self) -> str:
        if self.signal is None:
            return f"exited with code {self.code}"
        return f"was killed by {signal_name(self.signal)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
