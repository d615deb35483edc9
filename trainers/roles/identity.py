"""The identity of a process in its job. The role makers find it out."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol, runtime_checkable

from fleetrun.aliases import Strings
from fleetrun.frozen import frozen_by_name
from trainers.errors import UsageError

EVALUATOR = "an evaluator of fleetrun"
"""The source of a process that evaluates a training without being part of it."""


class Role(IntEnum):
    """What a process is in a job with parameter servers; Paddle's numbers."""

    WORKER = 1
    SERVER = 2


@frozen_by_name
class Identity:
    """One process of the job. The default is a process on its own: rank 0 of 1.

    `index` counts within the role; `trainers` and `servers` are `host:port` in rank order, `trainers` is
    empty where the environment does not say. `source` says what started this process, for messages.
    `scratch` is a folder for what this launch keeps on this machine.
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
        """`host:port` where workers meet for what they do among themselves. Raises UsageError when that is
        unknown.
        """
        if not self.master:
            raise UsageError(
                f"the {self.worker_num} workers of this job have to meet, and {self.source} does not say "
                "where; give UserDefinedRoleMaker worker_endpoints, set PADDLE_TRAINER_ENDPOINTS, or start "
                "with fleetrun"
            )
        return self.master


@runtime_checkable
class RoleMaker(Protocol):
    """Anything that knows this process's identity. One that also has `is_collective` (a bool) decides by it
    which kind of training `fleet.init` begins.
    """

    def identity(self) -> Identity: ...
