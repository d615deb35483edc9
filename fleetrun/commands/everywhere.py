"""Asks a launcher how its job stands on all of its machines. It asks the others; who asked it waits, within a
bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleetrun.control.client import ask
from fleetrun.control.elsewhere import unfolded
from fleetrun.control.observed import Observer, parts
from fleetrun.control.running import Running
from fleetrun.errors import UsageError

Status = dict[str, Any]

_PATIENCE = 6.0
"""Seconds for an answer. The launcher waits for other machines for two."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """`node`: of this one only, by its rank. `whole`: every process, however many machines there are."""

    node: int | None = None
    whole: bool = False

    def question(self) -> Status:
        one = {} if self.node is None else {"node": self.node}
        return {"ask": "status", "everywhere": True, "all": self.whole, **one}

    def check(self, status: Mapping[str, Any]) -> None:
        """Raises UsageError when there is no such machine."""
        ranks = [each.get("rank") for each in parts(status, "nodes")] or [0]
        if self.node is None or self.node in ranks:
            return
        known = f"nodes 0 to {len(ranks) - 1}" if len(ranks) > 1 else "one node, 0"
        if status.get("waiting"):
            known = "none yet: its nodes have not met"
        raise UsageError(f"there is no node {self.node}: this job has {known}")

    def shown(self, status: Mapping[str, Any]) -> Status:
        """What of a status people see: `only` is the machine that they asked for."""
        nodes = parts(status, "nodes")
        if self.node is None or len(nodes) < 2:
            return dict(status)
        here = any(each.get("this") is True and each.get("rank") == self.node for each in nodes)
        return {**status, "only": self.node, "containers": status.get("containers") if here else []}


def several(status: Mapping[str, Any]) -> bool:
    """Whether there are other machines to ask."""
    return len(parts(status, "nodes")) > 1


def everywhere(job: Running, wanted: Wanted) -> Status:
    """The answer as it comes. Raises NoAnswer."""
    return ask(job.socket, wanted.question(), _PATIENCE)


def complete(answer: Mapping[str, Any], observer: Observer) -> Status:
    """With what can be seen from outside, and what other machines said of themselves."""
    return unfolded(observer.complete(answer))
