"""What a supervisor tells, and to whom: the seam between watching and showing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fleetrun.pod.container import Container, Ended
from fleetrun.pod.result import Failure, Hang


class Observer(Protocol):
    """Who wants to know. Calls come from the loop and must return at once."""

    def started(self, containers: list[Container]) -> None: ...
    def exited(self, ended: Ended) -> None:
        """A process is gone, well or not; comes before what follows from it."""
        ...

    def failed(self, failure: Failure) -> None: ...
    def hung(self, hang: Hang) -> None:
        """No trainer gives a sign of life. The processes still run."""
        ...

    def restarting(self, containers: list[Container]) -> None: ...
    def leaving(self, rest: list[Container]) -> None: ...
    def ending(self, why: str) -> None: ...


class Observers:
    """Several as one, told in their order."""

    def __init__(self, each: Sequence[Observer]) -> None:
        self._each = tuple(each)

    def started(self, containers: list[Container]) -> None:
        for observer in self._each:
            observer.started(containers)

    def exited(self, ended: Ended) -> None:
        for observer in self._each:
            observer.exited(ended)

    def failed(self, failure: Failure) -> None:
        for observer in self._each:
            observer.failed(failure)

    def hung(self, hang: Hang) -> None:
        for observer in self._each:
            observer.hung(hang)

    def restarting(self, containers: list[Container]) -> None:
        for observer in self._each:
            observer.restarting(containers)

    def leaving(self, rest: list[Container]) -> None:
        for observer in self._each:
            observer.leaving(rest)

    def ending(self, why: str) -> None:
        for observer in self._each:
            observer.ending(why)
