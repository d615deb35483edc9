"""The nouns of the environment contract: modes, roles, a job's cluster and one member of it. Values only:
what they are called in an environment is `contract.py`'s.
"""

from __future__ import annotations

from enum import StrEnum

from fleetrun.frozen import dataclass


class Mode(StrEnum):
    """How the processes of a job work together; the words are Paddle's `--run_mode`."""

    COLLECTIVE = "collective"
    PS = "ps"
    PS_HETER = "ps-heter"
    RPC = "rpc"

    @property
    def has_servers(self) -> bool:
        return self in (Mode.PS, Mode.PS_HETER)


class Role(StrEnum):
    """What one process does. The value is the word in log file names and labels."""

    SERVER = "ps"
    TRAINER = "trainer"
    HETER = "heter"
    COORDINATOR = "coordinator"
    EVALUATOR = "evaluator"

    @property
    def training_role(self) -> str:
        """The word in TRAINING_ROLE."""
        return _TRAINING_ROLES[self]


_TRAINING_ROLES = {
    Role.SERVER: "PSERVER",
    Role.TRAINER: "TRAINER",
    Role.HETER: "HETER_TRAINER",
    Role.COORDINATOR: "COORDINATOR",
    Role.EVALUATOR: "EVALUATOR",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gloo:
    """Paddle's CPU barrier service in ps modes. `rendezvous`: 1 hdfs, 2 file, 3 http."""

    endpoint: str
    fs_path: str
    with_gloo: int = 0
    rendezvous: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What all processes of one job agree on. Endpoints are `host:port`, in rank order.

    `heter` holds the endpoints of stages 2, 3, ... in that order (stage 1 is the trainers); `stage_devices`
    the device word of every stage, trainers first.
    """

    mode: Mode
    trainers: tuple[str, ...]
    master: str
    servers: tuple[str, ...] = ()
    heter: tuple[tuple[str, ...], ...] = ()
    coordinators: tuple[str, ...] = ()
    stage_devices: tuple[str, ...] = ()
    nnodes: int = 1
    gloo: Gloo | None = None
    job_id: str = "default"
    max_restart: int = 0

    @property
    def heter_flat(self) -> tuple[str, ...]:
        return tuple(endpoint for stage in self.heter for endpoint in stage)

    def stage(self, number: int) -> tuple[str, ...]:
        """Endpoints of stage `number` (1 = trainers); empty past either end."""
        if number == 1:
            return self.trainers
        return self.heter[number - 2] if 2 <= number <= len(self.heter) + 1 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of the job: the cluster and its own place in it.

    `rank` counts within the role over the whole job, `local_rank` within the role on this node; `local_size`
    is the number of processes of that role on this node. `devices` are indices into what the process sees,
    `visible` is what it may see (None: whatever the launcher saw).
    """

    cluster: Cluster
    role: Role
    rank: int
    endpoint: str
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    stage: int = 0
    device_kind: str = "gpu"
    devices: tuple[int, ...] = ()
    visible: str | None = None
    backend: str | None = None
    pod: str = ""
    log_dir: str = "log"
    error_file: str = ""
    restart_count: int = 0
    omp_threads: int | None = None
