"""Define the identity of a process in its job, which role makers find."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol, runtime_checkable

from fleetrun.aliases import Strings
from fleetrun.frozen import frozen_by_name
from trainers.errors import UsageError

EVALUATOR = "an evaluator of fleetrun"
"""The source of a process that evaluates a training without taking part in it."""


class Role(IntEnum):
    """The role of a process in a job with parameter servers, with Paddle's numbers."""

    WORKER = 1
    SERVER = 2


@frozen_by_name
class Identity:
    """One process of the job. The default is a process on its own, rank 0 of 1.

    `index` counts within the role. `trainers` and `servers` are `host:port` in rank order. `trainers` is
    empty if the environment does not contain it. `source` names the launcher for messages. `scratch` is a
    directory for data of this run on this node.
    """

    index: int = 0
    worker_num: int = 1
    trainers: Strings = ()
    servers: Strings = ()
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
        return not self.master and self.worker_num == 1

    def meeting(self) -> str:
        """Return `host:port` where workers meet. Raises UsageError if it is unknown."""
        if not self.master:
            raise UsageError(
                f"The {self.worker_num} workers of this job need an address to connect at, but "
                f"{self.source} gives none. Pass worker_endpoints to UserDefinedRoleMaker, set "
                "PADDLE_TRAINER_ENDPOINTS, or start with fleetrun."
            )
        return self.master


@runtime_checkable
class RoleMaker(Protocol):
    """An object that finds this process's identity.

    An optional attribute `is_collective` (a bool) sets the kind of training that `fleet.init` starts.
    """

    def identity(self) -> Identity: ...
