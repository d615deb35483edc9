"""Find this process's identity in the job from the environment variables of each launcher.

`identity_of` reads fleetrun's contract, or the variables of torchrun, Paddle's launchers or mpirun. Without
any of them, the process is on its own. `current_identity` uses the result of `fleet.init` first, if a script
has called it.

Servers of Paddle's launchers have TRAINING_ROLE, PADDLE_PSERVERS_IP_PORT_LIST, POD_IP and PADDLE_PORT.
Trainers have PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM and PADDLE_TRAINER_ENDPOINTS. An error reports variables
that contradict each other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path

from fleetrun.aliases import Environ, Strings
from fleetrun.envs import contract, mpi
from fleetrun.envs.channels import CONTAINER_VARIABLE, inside_container
from trainers.errors import NotSupportedError, UsageError
from trainers.roles.identity import EVALUATOR, Identity
from trainers.roles.parsing import Variables, apart, endpoints, position, whole

# ---- The identity from the variables of Paddle's launchers, and of platforms that start Paddle's jobs

_PADDLE_SERVERS, _PADDLE_TRAINERS = "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_TRAINER_ENDPOINTS"
PADDLES_LAUNCHER = "Paddle's launcher"


def paddle_identity(environ: Environ) -> Identity:
    """Return the identity. Raises UsageError for variables that are missing, malformed or contradictory."""
    found = Variables(
        environ, "TRAINING_ROLE or PADDLE_TRAINER_ID is set. Paddle's launchers set all of these variables."
    )
    servers = endpoints(_PADDLE_SERVERS, found.listed(_PADDLE_SERVERS))
    trainers = endpoints(_PADDLE_TRAINERS, found.listed(_PADDLE_TRAINERS))
    apart(servers, trainers, (_PADDLE_SERVERS, _PADDLE_TRAINERS))
    role = environ.get("TRAINING_ROLE") or "TRAINER"
    if role not in ("TRAINER", "PSERVER"):
        raise NotSupportedError(f"TRAINING_ROLE is {role!r}; trainers supports TRAINER and PSERVER")
    if environ.get("TRAINING_ROLE"):
        found.text(_PADDLE_SERVERS)  # only jobs with servers have roles
    count = found.number("PADDLE_TRAINERS_NUM", len(trainers) or None)
    if trainers and count != len(trainers):
        raise UsageError(
            f"PADDLE_TRAINERS_NUM is {count}, but {_PADDLE_TRAINERS} has {len(trainers)} endpoints"
        )
    if not count:
        raise UsageError("PADDLE_TRAINERS_NUM is 0; it must be at least 1")
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


def _trainer_index(found: Variables, trainers: Strings, count: int) -> int:
    index = found.number("PADDLE_TRAINER_ID")
    if index >= count:
        raise UsageError(f"PADDLE_TRAINER_ID is {index}; it must be from 0 to {count - 1}")
    own = found.environ.get("PADDLE_CURRENT_ENDPOINT")
    if own and trainers and trainers[index] != own:
        raise UsageError(
            f"PADDLE_TRAINER_ID is {index}, which is {trainers[index]} in {_PADDLE_TRAINERS}, but "
            f"PADDLE_CURRENT_ENDPOINT is {own}"
        )
    for name, mine in (("RANK", index), ("WORLD_SIZE", count)):
        if found.environ.get(name) not in (None, "", str(mine)):
            raise UsageError(
                f"{name} is {found.environ[name]!r}, but PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM mean "
                f"{mine}, so two launchers contradict each other. Unset the environment variables of one "
                "launcher, or pass a role maker to fleet.init."
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
    given = endpoints("PADDLE_MASTER", found.listed("PADDLE_MASTER"))
    master = (given or trainers or ("",))[0]
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
    if environ.get("TRAINING_ROLE") or environ.get("PADDLE_TRAINER_ID"):
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
            f"mpirun started {process.size} processes on several nodes, which need an address to connect "
            "at. Set PADDLE_MASTER=host:port to the node of the first process."
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
    needed = Variables(
        environ, "RANK or WORLD_SIZE is set. torchrun and fleetrun set all of these variables."
    )
    host, port = needed.text("MASTER_ADDR").strip("[]"), needed.number("MASTER_PORT")
    rank, size = needed.number("RANK"), needed.number("WORLD_SIZE")
    if rank >= size:
        raise UsageError(f"RANK is {rank}, but WORLD_SIZE is {size}; ranks are from 0 to {size - 1}")
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
    given = Variables(_with_long_values(environ), "FLEETRUN_CONTAINER is set. fleetrun sets both.")
    pod, _, rest = given.text(CONTAINER_VARIABLE).partition(".")
    role, _, rank = rest.rpartition(".")
    common = Identity(
        device=given.first("FLAGS_selected_gpus"),
        restart_count=given.number("PADDLE_RESTART_COUNT"),
        source=EVALUATOR,
        scratch=f"{given.text('PADDLE_LOG_DIR')}/ps.{pod}",
    )
    if role == contract.Role.EVALUATOR:
        return common  # a process on its own, without a rank among the trainers; servers do not wait for it
    if role not in (contract.Role.SERVER, contract.Role.TRAINER):
        raise NotSupportedError(f"This process is a {role}, but trainers supports only servers and trainers.")
    trainers = tuple(given.listed(_PADDLE_TRAINERS))
    return replace(
        common,
        index=whole(CONTAINER_VARIABLE, rank),
        worker_num=len(trainers),
        trainers=trainers,
        servers=tuple(given.listed(_PADDLE_SERVERS)),
        is_server=role == contract.Role.SERVER,
        launched_as_ps="TRAINING_ROLE" in environ,
        local_rank=whole("FLEETRUN_LOCAL", given.text("FLEETRUN_LOCAL").partition("/")[0]),
        master=given.text("FLEETRUN_MASTER"),
        backend=environ.get("PADDLE_DISTRI_BACKEND"),
        source="fleetrun",
    )


def _with_long_values(environ: Environ) -> Environ:
    """Add the variables that fleetrun writes into a file, because an environment cannot hold them."""
    path = environ.get(contract.LONG_VALUES_VARIABLE)
    try:
        return {**json.loads(Path(path).read_text()), **environ} if path else environ
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"cannot read the file {path!r} of {contract.LONG_VALUES_VARIABLE}: {error}"
        ) from None


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
