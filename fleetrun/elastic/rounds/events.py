"""What a membership tells its node: the seam between a job's rounds and the processes of one machine."""

from __future__ import annotations

from typing import Protocol

from fleetrun.elastic.rounds.policy import Waiting
from fleetrun.elastic.rounds.records import Cause, Node, Round
from fleetrun.errors import LaunchError


class Events(Protocol):
    """Calls come from the loop and must return at once."""

    def waiting(self, note: Waiting) -> None:
        """The nodes have not all met: on every change, then now and then."""
        ...

    def start(self, round: Round, members: tuple[Node, ...], rank: int) -> None:
        """Run this generation, as member `rank` of these."""
        ...

    def stop(self, cause: Cause, restart: bool) -> None:
        """Stop this node's processes, then call `stopped`."""
        ...

    def finish(self) -> None:
        """The trainers of all nodes have completed: servers may leave; then call `stopped`."""
        ...

    def ended(self, code: int, cause: Cause | None) -> None:
        """The job is over. The last call. Without a cause it has completed."""
        ...

    def failed(self, error: LaunchError) -> None:
        """This node cannot take part or go on. The last call."""
        ...

    def store_down(self, why: str) -> None: ...

    def store_up(self) -> None: ...
