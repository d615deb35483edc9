"""Who a process is in its job. Knows the facts; leaves where they are found to the role makers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process of the job. The default is a process on its own: rank 0 of 1.

    `index` counts within the role; `trainers` and `servers` are `host:port` in rank order, `trainers` is
    empty where the environment does not tell. `source` says who started this process, for messages.
    `scratch` is a folder for what this launch keeps on this machine.
    """

    index: int = 0
    worker_num: int = 1
    trainers: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    is_server: bool = False
    launched_as_ps: bool = False
    local_rank: int = 0
    master: str = ""
    device: int | None = None
    backend: str | None = None
    restart_count: int = 0
    source: str = "a process on its own"
    scratch: str = "ps"

    @property
    def alone(self) -> bool:
        return not self.master


class RoleMaker(Protocol):
    """Anything that knows this process's identity."""

    def identity(self) -> Identity: ...
