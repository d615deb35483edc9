"""Find this process's identity in the job from the environment variables of each launcher.

`identity_of` reads fleetrun's contract, or the variables of torchrun, Paddle's launchers or mpirun. Without
any of them, the process is on its own. `current_identity` uses the result of `fleet.init` first, if a script
has called it.

Servers of Paddle's launchers have TRAINING_ROLE, PADDLE_PSERVERS_IP_PORT_LIST, POD_IP and PADDLE_PORT.
Trainers have PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM and PADDLE_TRAINER_ENDPOINTS. An error reports variables
that contradict each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum

from fleetrun.aliases import Environ, Strings
from fleetrun.envs import contract, mpi
from fleetrun.envs.channels import inside_container
from trainers.errors import NotSupportedError, UsageError
from trainers.roles.identity import EVALUATOR, Identity
from trainers.roles.parsing import Variables, apart, endpoints, position

# ---- The identity from the variables of Paddle's launchers, and of platforms that start Paddle's jobs

_PADDLE_SERVERS, _PADDLE_TRAINERS = "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_TRAINER_ENDPOINTS"
PADDLES_LAUNCHER = "Paddle's launcher"


def has_paddles_variables(environ: Environ) -> bool:
    """Return True if this process was started as one of Paddle's."""
    return bool(environ.get("TRAINING_ROLE") or environ.get("PADDLE_TRAINER_ID"))


def paddle_identity(environ: Environ) -> Identity:
    """Return the identity. Raises UsageError for variables that are missing, malformed or contradictory."""
    found = Variables(environ, "TRAINING_ROLE or PADDLE_TRAINER_ID is; Paddle's launchers set all of them")
    servers = endpoints(_PADDLE_SERVERS, found.listed(_PADDLE_SERVERS))
    trainers = endpoints(_PADDLE_TRAINERS, found.listed(_PADDLE_TRAINERS))
    apart(servers, trainers, (_PADDLE_SERVERS, _PADDLE_TRAINERS))
    role = environ.get("TRAINING_ROLE") or "TRAINER"
    if role not in ("TRAINER", "PSERVER"):
        raise NotSupportedError(
            f"TRAINING_ROLE is {role!r}; this version of trainers runs TRAINER and PSERVER"
        )
    if environ.get("TRAINING_ROLE"):
        found.text(_PADDLE_SERVERS)  # only jobs with servers have roles
    count = _trainers_num(found, trainers)
    index = _server_index(found, servers) if role == "PSERVER" else _trainer_index(found, trainers, count)
    return Identity(
        index=index,
        worker_num=count,
        trainers=trainers,
        servers=servers,
        is_server=role == "PSERVER",
        launched_as_ps=bool(servers),
        local_rank=position(trainers[index], trainers) if trainers and role == "TRAINER" else 0,
        master=_paddle_master(found, trainers, count),
        device=found.first("FLAGS_selected_gpus"),
        backend=environ.get("PADDLE_DISTRI_BACKEND"),
        restart_count=found.number("PADDLE_RESTART_COUNT", 0),
        source=PADDLES_LAUNCHER,
    )


def _trainers_num(found: Variables, trainers: Strings) -> int:
    count = found.number("PADDLE_TRAINERS_NUM", len(trainers) or None)
    if trainers and count != len(trainers):
        raise UsageError(
            f"PADDLE_TRAINERS_NUM is {count}, but {_PADDLE_TRAINERS} has {len(trainers)} endpoints"
        )
    if not count:
        raise UsageError("PADDLE_TRAINERS_NUM is 0; a job has at least one trainer")
    return count


def _trainer_index(found: Variables, trainers: Strings, count: int) -> int:
    index = found.number("PADDLE_TRAINER_ID")
    if index >= count:
        raise UsageError(f"PADDLE_TRAINER_ID is {index} of {count} trainers; they are counted from 0")
    own = found.environ.get("PADDLE_CURRENT_ENDPOINT")
    if own and trainers and trainers[index] != own:
        raise UsageError(
            f"PADDLE_TRAINER_ID is {index}, which is {trainers[index]} in {_PADDLE_TRAINERS}, but "
            f"PADDLE_CURRENT_ENDPOINT is {own}"
        )
    for name, mine in (("RANK", index), ("WORLD_SIZE", count)):
        if found.environ.get(name) not in (None, "", str(mine)):
            raise UsageError(
                f"{name} is {found.environ[name]!r}, but by PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM it is "
                f"{mine}: two launchers contradict each other. Unset the variables of one, or give "
                "fleet.init a role maker"
            )
    return index


def _server_index(found: Variables, servers: Strings) -> int:
    own = found.environ.get("PADDLE_CURRENT_ENDPOINT") or (
        f"{found.text('POD_IP')}:{found.number('PADDLE_PORT')}"
    )
    if own not in servers:
        raise UsageError(f"this server is {own}, which is not in {_PADDLE_SERVERS}: {', '.join(servers)}")
    return servers.index(own)


def _paddle_master(found: Variables, trainers: Strings, count: int) -> str:
    """Return PADDLE_MASTER, where trainers meet, else the first trainer's endpoint, else an empty string.

    With a single trainer and no TRAINING_ROLE, the result is empty.
    """
    told = endpoints("PADDLE_MASTER", found.listed("PADDLE_MASTER"))
    master = (told or trainers or ("",))[0]
    return master if count > 1 or found.environ.get("TRAINING_ROLE") else ""


# ---- The identity from the variables of any launcher

MpiProcess = mpi.MpiProcess


class Starter(Enum):
    """The launcher that started this process, by its environment. The value is for messages."""

    FLEETRUN = "fleetrun"
    PADDLE = PADDLES_LAUNCHER
    TORCHRUN = "torchrun"
    MPIRUN = "mpirun"
    NOBODY = "nobody"


def starter(environ: Environ) -> Starter:
    """Return the nearest launcher, because mpirun may have started a torchrun, which started this process.

    Raises UsageError for malformed variables of mpirun.
    """
    if inside_container(environ):
        return Starter.FLEETRUN
    if has_paddles_variables(environ):
        return Starter.PADDLE
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return Starter.TORCHRUN
    return Starter.NOBODY if mpi_process(environ) is None else Starter.MPIRUN


def identity_of(environ: Environ) -> Identity:
    """Return the identity from environment variables.

    Raises UsageError with the name of a missing or malformed variable.
    """
    read = {
        Starter.FLEETRUN: _of_fleetrun,
        Starter.PADDLE: paddle_identity,
        Starter.TORCHRUN: _of_torchrun,
        Starter.MPIRUN: _of_mpi,
        Starter.NOBODY: _of_nobody,
    }
    return read[starter(environ)](environ)


def mpi_process(environ: Environ) -> MpiProcess | None:
    """Return the process of an mpirun with several processes, else None. Raises UsageError for malformed
    variables.
    """
    try:
        process = mpi.read(environ)
    except mpi.MpiError as error:
        raise UsageError(str(error)) from error
    return None if process is None or process.size == 1 else process


def mpi_master(process: MpiProcess, environ: Environ) -> str:
    """Return `host:port` where the processes of an mpirun can meet. Raises UsageError if it is unknown."""
    if environ.get("PADDLE_MASTER"):
        return endpoints("PADDLE_MASTER", [environ["PADDLE_MASTER"]])[0]
    master = process.master
    if master is None:
        raise UsageError(
            f"mpirun started {process.size} processes on several machines, and nothing says where they "
            "can meet: set PADDLE_MASTER=host:port to the host of the first of them"
        )
    return master


def _of_nobody(environ: Environ) -> Identity:
    return Identity()


def _of_mpi(environ: Environ) -> Identity:
    """Return the identity for `mpirun -n 4 python train.py`, without fleetrun."""
    process = mpi_process(environ)
    if process is None:
        raise AssertionError("no process of mpirun")
    return Identity(
        index=process.rank,
        worker_num=process.size,
        local_rank=process.local_rank,
        master=mpi_master(process, environ),
        backend=environ.get("PADDLE_DISTRI_BACKEND"),
        source="mpirun",
    )


def _of_torchrun(environ: Environ) -> Identity:
    needed = Variables(environ, "RANK or WORLD_SIZE is; torchrun and fleetrun set all of them")
    host, port = needed.text("MASTER_ADDR").strip("[]"), needed.number("MASTER_PORT")
    rank, size = needed.number("RANK"), needed.number("WORLD_SIZE")
    if rank >= size:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE {size}; ranks go from 0 to WORLD_SIZE - 1")
    return Identity(
        index=rank,
        worker_num=size,
        local_rank=needed.number("LOCAL_RANK", 0),
        master=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        backend=environ.get("PADDLE_DISTRI_BACKEND"),
        restart_count=needed.number("TORCHELASTIC_RESTART_COUNT", 0),
        source="torchrun",
    )


def _of_fleetrun(environ: Environ) -> Identity:
    try:
        member = contract.read(environ)
    except contract.ContractError as error:
        raise UsageError(str(error)) from error
    if member.role is contract.Role.EVALUATOR:
        return _of_evaluator(member)
    if member.role not in (contract.Role.SERVER, contract.Role.TRAINER):
        raise NotSupportedError(
            f"this process is a {member.role}; this version of trainers runs servers and trainers"
        )
    cluster = member.cluster
    return Identity(
        index=member.rank,
        worker_num=len(cluster.trainers),
        trainers=cluster.trainers,
        servers=cluster.servers,
        is_server=member.role is contract.Role.SERVER,
        launched_as_ps=cluster.mode.has_servers,
        local_rank=member.local_rank,
        master=cluster.master,
        device=_first_gpu(member),
        backend=member.backend,
        restart_count=member.restart_count,
        source="fleetrun",
        scratch=f"{member.log_dir}/ps.{member.pod}",
    )


def _of_evaluator(member: contract.Member) -> Identity:
    """Return a process on its own, without a rank among the trainers. Servers do not wait for it."""
    return Identity(
        device=_first_gpu(member),
        restart_count=member.restart_count,
        source=EVALUATOR,
        scratch=f"{member.log_dir}/ps.{member.pod}",
    )


def _first_gpu(member: contract.Member) -> int | None:
    return member.devices[0] if member.devices and member.device_kind == "gpu" else None


# ---- The identity of this process for functions without a Fleet, from `fleet.init`, else from the
# environment

IdentitySource = Callable[[], Identity | None]

_identity_sources: list[IdentitySource] = []


def ask_first(source: IdentitySource) -> IdentitySource | None:
    """Use `source` before the environment, in place of the returned former source.

    `source` returns None while it has no identity.
    """
    former = _identity_sources.pop() if _identity_sources else None
    _identity_sources.append(source)
    return former


def current_identity() -> Identity:
    """Return the identity of this process. Raises UsageError as `identity_of` does."""
    found = _identity_sources[0]() if _identity_sources else None
    return identity_of(os.environ) if found is None else found
