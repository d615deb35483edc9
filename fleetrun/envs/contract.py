"""Write the environment contract, the variables that fleetrun sets for each process.

The values match Paddle's launchers (both generations) and torchrun, so scripts written for either run
unmodified. `trainers.roles.environment` reads the ones that it needs.

`trainers` imports only this module, `envs.channels` and `envs.mpi` of the launcher. All three use only the
standard library.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

from fleetrun.aliases import Document, Integers, Strings, Texts
from fleetrun.envs.channels import CONTAINER_VARIABLE, container_id
from fleetrun.values import frozen

VISIBLE_VARIABLE = {
    "gpu": "CUDA_VISIBLE_DEVICES",
    "xpu": "XPU_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
}

LONG_VALUES_VARIABLE = "PADDLE_BACKUP_ENV_PATH"
"""Path of a JSON file with the variables that are too long for an environment. Paddle uses the same variable.
"""

LONGEST_VALUE = 120 << 10
"""Bytes of the longest value that stays in the environment. Linux limits name and value together to 128 KiB.
"""


# ---- Modes, roles, a job's cluster and one member of it


class Mode(StrEnum):
    """How the processes of a job work together. The words match Paddle's `--run_mode`."""

    COLLECTIVE = "collective"
    PS = "ps"
    PS_HETER = "ps-heter"
    RPC = "rpc"

    @property
    def has_servers(self) -> bool:
        return self in (Mode.PS, Mode.PS_HETER)


class NodeLoss(StrEnum):
    """The reaction to a lost node: end the job, wait for another node, or continue without it."""

    FAIL = "fail"
    WAIT = "wait"
    SHRINK = "shrink"


class Role(StrEnum):
    """The role of one process. The value is the word in log file names and labels."""

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


@frozen(kw_only=True)
class Gloo:
    """Paddle's CPU barrier service in ps modes. A `rendezvous` of 1 is hdfs, 2 is file, 3 is http."""

    endpoint: str
    fs_path: str
    with_gloo: int = 0
    rendezvous: int = 3


@frozen(kw_only=True)
class Cluster:
    """The values that are equal in all processes of one job. Endpoints are `host:port`, in rank order.

    `heter` holds the endpoints of stages 2, 3, ... in that order (stage 1 is the trainers). `stage_devices`
    holds the device word of every stage, trainers first.
    """

    mode: Mode
    trainers: Strings
    master: str
    servers: Strings = ()
    heter: tuple[Strings, ...] = ()
    coordinators: Strings = ()
    stage_devices: Strings = ()
    nnodes: int = 1
    gloo: Gloo | None = None
    job_id: str = "default"
    max_restart: int = 0
    role_name: str = "default"

    @property
    def heter_flat(self) -> Strings:
        return tuple(endpoint for stage in self.heter for endpoint in stage)

    def stage(self, number: int) -> Strings:
        """Return the endpoints of stage `number`, where 1 is the trainers. Past either end, return `()`."""
        if number == 1:
            return self.trainers
        return self.heter[number - 2] if 2 <= number <= len(self.heter) + 1 else ()


@frozen(kw_only=True)
class Member:
    """One process of the job, with its cluster and its ranks.

    `rank` counts within the role over the whole job, and `local_rank` within the role on this node.
    `local_size` is the number of processes of that role on this node. `devices` are indices into the devices
    visible to the process. `visible` is the value of the visibility variable, or None to keep the launcher's
    value.
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
    devices: Integers = ()
    visible: str | None = None
    backend: str | None = None
    pod: str = ""
    log_dir: str = "log"
    error_file: str = ""
    restart_count: int = 0
    omp_threads: int | None = None


# ---- Endpoints


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port` into the host without brackets and the port."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def join_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ---- Writing


def write(member: Member) -> dict[str, str]:
    """Return the variables of one process.

    The values are complete. Remove all other variables of the contract from the environment of the process.
    An evaluator is not part of the training, so it gets the endpoints of the trainers without a rank.
    """
    values = _common(member)
    of_mode = {
        Mode.COLLECTIVE: _collective,
        Mode.RPC: _rpc,
        Mode.PS: _parameter_server,
        Mode.PS_HETER: _parameter_server,
    }[member.cluster.mode]
    values |= _evaluator(member) if member.role is Role.EVALUATOR else of_mode(member)
    if member.role in (Role.TRAINER, Role.HETER, Role.EVALUATOR):
        values |= _devices(member)
    if member.role is Role.TRAINER:
        values |= _torch(member)
    if member.omp_threads is not None:
        values["OMP_NUM_THREADS"] = member.omp_threads
    return {name: str(value) for name, value in values.items()}


def _join(endpoints: Strings) -> str:
    return ",".join(endpoints)


def _common(member: Member) -> Document:
    return {
        "POD_NAME": member.pod,
        "PADDLE_JOB_ID": member.cluster.job_id,
        "PADDLE_LOG_DIR": member.log_dir,
        "PADDLE_RESTART_COUNT": member.restart_count,
        "PADDLE_TRAINERS_NUM": len(member.cluster.trainers),
        "PADDLE_TRAINER_ENDPOINTS": _join(member.cluster.trainers),
        "PADDLE_CURRENT_ENDPOINT": member.endpoint,
        CONTAINER_VARIABLE: container_id(member.pod, member.role, member.rank),
        "FLEETRUN_LOCAL": f"{member.local_rank}/{member.local_size}",
        "FLEETRUN_NODE": f"{member.node_rank}/{member.cluster.nnodes}",
        "FLEETRUN_MASTER": member.cluster.master,
        "FLEETRUN_ERROR_FILE": member.error_file,
    }


def _evaluator(member: Member) -> Document:
    cluster = member.cluster
    return {
        "TRAINING_ROLE": member.role.training_role,
        "PADDLE_ROLE": member.role.training_role,
        "PADDLE_PSERVERS_IP_PORT_LIST": _join(cluster.servers),
        "PADDLE_NNODES": cluster.nnodes,
    }


def _collective(member: Member) -> Document:
    cluster = member.cluster
    values = {
        "PADDLE_MASTER": cluster.master,
        "PADDLE_TRAINER_ID": member.rank,
        "PADDLE_GLOBAL_RANK": member.rank,
        "PADDLE_GLOBAL_SIZE": len(cluster.trainers),
        "PADDLE_LOCAL_RANK": member.local_rank,
        "PADDLE_LOCAL_SIZE": member.local_size,
        "PADDLE_RANK_IN_NODE": member.local_rank,
        "PADDLE_NNODES": cluster.nnodes,
    }
    if member.backend is not None:
        values["PADDLE_DISTRI_BACKEND"] = member.backend
    return values


def _rpc(member: Member) -> Document:
    return {
        "PADDLE_MASTER_ENDPOINT": member.cluster.master,
        "PADDLE_WORKER_ENDPOINT": member.endpoint,
        "PADDLE_TRAINER_ID": member.rank,
    }


def _parameter_server(member: Member) -> Document:
    cluster = member.cluster
    host, port = split_endpoint(member.endpoint)
    values = {
        "PADDLE_PSERVERS_IP_PORT_LIST": _join(cluster.servers),
        "PADDLE_HETER_TRAINER_IP_PORT_LIST": _join(cluster.heter_flat),
        "PADDLE_COORDINATOR_ENDPOINTS": _join(cluster.coordinators),
        "PADDLE_COORDINATOR_NUM": len(cluster.coordinators),
        "PADDLE_PORT": port,
        "POD_IP": host,
        "TRAINING_ROLE": member.role.training_role,
        "PADDLE_ROLE": member.role.training_role,
        "PADDLE_NNODES": cluster.nnodes,
    }
    if member.role is not Role.SERVER:
        values["PADDLE_TRAINER_ID"] = member.rank
    if cluster.gloo is not None:
        values |= {
            "PADDLE_WITH_GLOO": cluster.gloo.with_gloo,
            "PADDLE_GLOO_RENDEZVOUS": cluster.gloo.rendezvous,
            "PADDLE_GLOO_FS_PATH": cluster.gloo.fs_path,
            "PADDLE_GLOO_HTTP_ENDPOINT": cluster.gloo.endpoint,
        }
    if cluster.mode is Mode.PS_HETER:
        values |= _stages(member)
    return values


def _stages(member: Member) -> Document:
    cluster = member.cluster
    values = {
        "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST": _join(cluster.heter_flat),
        "PADDLE_STAGE_TRAINERS_NUM": [len(cluster.trainers), *map(len, cluster.heter)],
        "STAGE_NUM": len(cluster.heter) + 1,
    }
    if member.stage:
        values |= {
            "STAGE_ID": member.stage,
            "HETER_DEVICE_TYPE": cluster.stage_devices[member.stage - 1],
            "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST": _join(cluster.stage(member.stage - 1)),
            "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST": _join(cluster.stage(member.stage + 1)),
        }
    return values


def _devices(member: Member) -> Document:
    if not member.devices:
        return {}
    own = ",".join(map(str, member.devices))
    values = {f"FLAGS_selected_{member.device_kind}s": own, "FLAGS_selected_accelerators": own}
    values["PADDLE_LOCAL_DEVICE_IDS"] = own
    if member.visible is not None:
        values[VISIBLE_VARIABLE[member.device_kind]] = member.visible
    return values


def _torch(member: Member) -> Document:
    cluster = member.cluster
    host, port = split_endpoint(cluster.master)
    return {
        "RANK": member.rank,
        "WORLD_SIZE": len(cluster.trainers),
        "LOCAL_RANK": member.local_rank,
        "LOCAL_WORLD_SIZE": member.local_size,
        "GROUP_RANK": member.node_rank,
        "GROUP_WORLD_SIZE": cluster.nnodes,
        "NNODES": cluster.nnodes,
        "ROLE_NAME": cluster.role_name,
        "ROLE_RANK": member.rank,
        "ROLE_WORLD_SIZE": len(cluster.trainers),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": member.restart_count,
        "TORCHELASTIC_MAX_RESTARTS": cluster.max_restart,
        "TORCHELASTIC_RUN_ID": cluster.job_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": member.error_file,
    }


# ---- Variables that are never inherited: variables of the contract, and leftovers of earlier launchers. A
# process gets the launcher's environment without these variables, plus the result of `write`. A launcher that
# runs inside a trainer, or after one in the same shell, therefore starts clean.

OWNED_PREFIXES = ("TORCHELASTIC_", "FLAGS_selected_", "FLEETRUN_")
INHERITED = frozenset({"FLEETRUN_TOKEN"})
"""The job's token belongs to the user, so a nested run uses the same token."""
OWNED = frozenset(
    """
    POD_NAME POD_IP PADDLE_JOB_ID PADDLE_LOG_DIR PADDLE_RESTART_COUNT PADDLE_TRAINERS_NUM
    PADDLE_TRAINER_ENDPOINTS PADDLE_CURRENT_ENDPOINT PADDLE_MASTER PADDLE_TRAINER_ID PADDLE_GLOBAL_RANK
    PADDLE_GLOBAL_SIZE PADDLE_LOCAL_RANK PADDLE_LOCAL_SIZE PADDLE_RANK_IN_NODE PADDLE_NNODES
    PADDLE_DISTRI_BACKEND PADDLE_MASTER_ENDPOINT PADDLE_WORKER_ENDPOINT PADDLE_PSERVERS_IP_PORT_LIST
    PADDLE_HETER_TRAINER_IP_PORT_LIST PADDLE_COORDINATOR_ENDPOINTS PADDLE_COORDINATOR_NUM PADDLE_PORT
    TRAINING_ROLE PADDLE_ROLE PADDLE_WITH_GLOO PADDLE_GLOO_RENDEZVOUS PADDLE_GLOO_FS_PATH
    PADDLE_GLOO_HTTP_ENDPOINT PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST PADDLE_STAGE_TRAINERS_NUM
    PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST STAGE_ID STAGE_NUM
    HETER_DEVICE_TYPE PADDLE_BACKUP_ENV_PATH PADDLE_WORLD_DEVICE_IDS PADDLE_LOCAL_DEVICE_IDS
    DISTRIBUTED_TRAINER_ENDPOINTS RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK
    GROUP_WORLD_SIZE NNODES ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT
    """.split()  # noqa: SIM905  (a list of 53 lines says no more)
)


def is_owned(name: str) -> bool:
    """Return True if fleetrun sets this variable for each process, so that an inherited value is dropped."""
    return name in OWNED or name.startswith(OWNED_PREFIXES)


def without_contract(environ: Texts) -> dict[str, str]:
    """Return a copy of an environment without the variables of the contract."""
    return {name: value for name, value in environ.items() if name in INHERITED or not is_owned(name)}


# ---- The job's token

TOKEN = "FLEETRUN_TOKEN"
"""The environment variable with the job's token. Any text of at least 16 characters is valid."""

_SHORTEST = 16


def token_flaw(token: str, source: str = TOKEN) -> str | None:
    """Return the flaw of a token from `source`, or None if the token is valid. The text does not show the
    token.
    """
    if len(token) >= _SHORTEST:
        return None
    return (
        f"{source} has {len(token)} characters; use at least {_SHORTEST}, so that nobody can guess the "
        "token (`fleetrun token` prints one)"
    )


def is_guessable(token: str) -> bool:
    """Return True if a token looks like words or a pattern, which a program can guess."""
    return token.isalpha() or len(set(token)) < 8


@cache
def derive_key(token: str, person: bytes) -> bytes:
    """Derive a key of 32 bytes for one party of the job (`person`, at most 8 bytes, such as `server`).

    The token and the keys of other parties cannot be derived from the key. Each guess of the token costs 16
    MiB of memory and about 50 ms.
    """
    # late, because they load OpenSSL, which only a job with a token needs
    from hashlib import blake2b, scrypt

    if person:
        return blake2b(derive_key(token, b""), digest_size=32, person=b"fleetrun" + person).digest()
    return scrypt(token.encode(), salt=b"fleetrun", n=1 << 14, r=8, p=1)


# ---- A port that all processes compute from a common number

FIRST_PORT = 20_000
PORT_COUNT = 10_000
"""Ports 20000 to 29999 lie above the services and below the client ports of Linux (32768 and up)."""


def agreed_port(number: int) -> int:
    """Return the port for the number of a job. Consecutive numbers get different ports."""
    return FIRST_PORT + number % PORT_COUNT
