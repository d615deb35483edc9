"""What a supervisor tells, and to whom: the seam between watching and showing."""

from __future__ import annotations

from typing import Protocol

from fleetrun.pod.container import Container
from fleetrun.pod.result import Failure


class Observer(Protocol):
    """Who wants to know. Calls come from the loop and must return at once."""

    def started(self, containers: list[Container]) -> None: ...
    def failed(self, failure: Failure) -> None: ...
    def restarting(self, containers: list[Container]) -> None: ...
    def leaving(self, rest: list[Container]) -> None: ...
    def ending(self, why: str) -> None: ...
