"""Whose stacks are asked for, and what was found out about each process. Values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fleetrun.stacks.traces import Thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A container that runs. `mark` is the value of FLEETRUN_CONTAINER in its environment, `title` how
    messages call it (`trainer 3`).
    """

    role: str
    rank: int
    title: str
    pid: int
    log: str
    mark: str

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, said: Mapping[str, Any]) -> Target:
        """Raises what reading other people's JSON raises: KeyError, TypeError, ValueError."""
        words = {name: str(said[name]) for name in ("role", "title", "log", "mark")}
        return cls(rank=int(said["rank"]), pid=int(said["pid"]), **words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One process of a container: the container's own, or one below it that it started (`below`).

    `state` is the letter of `ps`. Without `threads`, `note` says why there are none.
    """

    target: Target
    pid: int
    command: str
    state: str
    threads: tuple[Thread, ...] = ()
    note: str = ""

    @property
    def below(self) -> bool:
        return self.pid != self.target.pid

    @property
    def title(self) -> str:
        return f"{self.target.title}, its {self.command}" if self.below else self.target.title
