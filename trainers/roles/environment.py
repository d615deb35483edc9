"""This process's place in the job, out of its environment. Knows where each launcher keeps it; leaves what to
do with it to others.

`EnvironmentRoleMaker` reads fleetrun's contract, torchrun's variables, those of Paddle's launchers, those of
mpirun, or nothing at all (a process on its own).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from fleetrun.envs import contract, mpi
from trainers.errors import NotSupportedError, UsageError
from trainers.roles import paddle
from trainers.roles.endpoints import endpoints
from trainers.roles.identity import EVALUATOR, Identity
from trainers.roles.variables import Variables

MpiProcess = mpi.MpiProcess


class Starter(Enum):
    """Who started this process, as far as its environment tells. The value is for messages."""

    FLEETRUN = "fleetrun"
    PADDLE = paddle.SOURCE
    TORCHRUN = "torchrun"
    MPIRUN = "mpirun"
    NOBODY = "nobody"


def starter(environ: Mapping[str, str]) -> Starter:
    """The nearest one: mpirun may have started a torchrun, and that this process.

    Raises UsageError for malformed variables of mpirun.
    """
    if contract.inside_container(environ):
        return Starter.FLEETRUN
    if paddle.speaks(environ):
        return Starter.PADDLE
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return Starter.TORCHRUN
    return Starter.NOBODY if mpi_process(environ) is None else Starter.MPIRUN


class EnvironmentRoleMaker:
    """Identity out of environment variables. Raises UsageError naming the variable that is missing or
    malformed.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def identity(self) -> Identity:
        read = {
            Starter.FLEETRUN: _of_fleetrun,
            Starter.PADDLE: paddle.identity,
            Starter.TORCHRUN: _of_torchrun,
            Starter.MPIRUN: _of_mpi,
            Starter.NOBODY: _of_nobody,
        }
        return read[starter(self._environ)](self._environ)


def mpi_process(environ: Mapping[str, str]) -> MpiProcess | None:
    """The process of an mpirun of several; None elsewhere. Raises UsageError for malformed variables."""
    try:
        process = mpi.read(environ)
    except mpi.MpiError as error:
        raise UsageError(str(error)) from error
    return None if process is None or process.size == 1 else process


def mpi_master(process: MpiProcess, environ: Mapping[str, str]) -> str:
    """`host:port` where the processes of an mpirun can meet."""
    if environ.get("PADDLE_MASTER"):
        return endpoints("PADDLE_MASTER", [environ["PADDLE_MASTER"]])[0]
    master = process.master
    if master is None:
        raise UsageError(
            f"mpirun started {process.size} processes on several machines, and nothing says where they "
            "can meet: set PADDLE_MASTER=host:port to the host of the first of them"
        )
    return master


def _of_nobody(environ: Mapping[str, str]) -> Identity:
    return Identity()


def _of_mpi(environ: Mapping[str, str]) -> Identity:
    """`mpirun -n 4 python train.py`, without fleetrun."""
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


def _of_torchrun(environ: Mapping[str, str]) -> Identity:
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


def _of_fleetrun(environ: Mapping[str, str]) -> Identity:
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
    """A process on its own: it has no rank among the trainers, and no server waits for it."""
    return Identity(
        device=_first_gpu(member),
        restart_count=member.restart_count,
        source=EVALUATOR,
        scratch=f"{member.log_dir}/ps.{member.pod}",
    )


def _first_gpu(member: contract.Member) -> int | None:
    return member.devices[0] if member.devices and member.device_kind == "gpu" else None
