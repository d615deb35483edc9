"""Tells the desk whose process begins and whose has ended. Decides nothing."""

from __future__ import annotations

from fleetrun.pod.container import Container, Ended
from fleetrun.pod.result import Failure, Hang
from fleetrun.progress.desk import Desk


class DeskObserver:
    """A supervisor's observer."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def started(self, containers: list[Container]) -> None:
        for each in containers:
            self._desk.begun(each.spec.name)

    def exited(self, ended: Ended) -> None:
        self._desk.ended(ended.spec.name)

    def failed(self, failure: Failure) -> None: ...
    def hung(self, hang: Hang) -> None: ...
    def restarting(self, containers: list[Container]) -> None: ...
    def leaving(self, rest: list[Container]) -> None: ...
    def ending(self, why: str) -> None: ...
