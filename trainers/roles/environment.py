"""This process's place in the job, out of its environment. Knows where each launcher keeps it; leaves what to
do with it to others.

`EnvironmentRoleMaker` reads fleetrun's contract, torchrun's variables, those of mpirun, or nothing at all (a
process on its own). Another source of identity is another object with an `identity` method, given to
`fleet.init(role_maker=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping

from fleetrun.envs import contract, mpi
from trainers.errors import NotSupportedError, UsageError
from trainers.roles.identity import Identity


class EnvironmentRoleMaker:
    """Identity out of environment variables. Raises UsageError naming the variable that is missing or
    malformed.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def identity(self) -> Identity:
        if contract.inside_container(self._environ):
            try:
                return _of_member(contract.read(self._environ))
            except contract.ContractError as error:
                raise UsageError(str(error)) from error
        if "RANK" in self._environ or "WORLD_SIZE" in self._environ:
            return self._torchrun()
        return self._mpi() or Identity()

    def _torchrun(self) -> Identity:
        host, port = self._text("MASTER_ADDR"), self._number("MASTER_PORT")
        rank, size = self._number("RANK"), self._number("WORLD_SIZE")
        if rank >= size:
            raise UsageError(f"RANK is {rank} and WORLD_SIZE {size}; ranks go from 0 to WORLD_SIZE - 1")
        return Identity(
            index=rank,
            worker_num=size,
            local_rank=self._number("LOCAL_RANK", 0),
            master=f"{host}:{port}",
            backend=self._environ.get("PADDLE_DISTRI_BACKEND"),
            restart_count=self._number("TORCHELASTIC_RESTART_COUNT", 0),
            source="torchrun",
        )

    def _mpi(self) -> Identity | None:
        """`mpirun -n 4 python train.py`, without fleetrun."""
        try:
            process = mpi.read(self._environ)
        except mpi.MpiError as error:
            raise UsageError(str(error)) from error
        if process is None or process.size == 1:
            return None
        master = self._environ.get("PADDLE_MASTER") or process.master
        if master is None:
            raise UsageError(
                f"mpirun started {process.size} processes on several machines, and nothing says where they "
                "can meet: set PADDLE_MASTER=host:port to the host of the first of them"
            )
        return Identity(
            index=process.rank,
            worker_num=process.size,
            local_rank=process.local_rank,
            master=master,
            backend=self._environ.get("PADDLE_DISTRI_BACKEND"),
            source="mpirun",
        )

    def _text(self, name: str) -> str:
        value = self._environ.get(name, "")
        if not value:
            raise UsageError(
                f"{name} is not set, but RANK or WORLD_SIZE is; torchrun and fleetrun set all of them"
            )
        return value

    def _number(self, name: str, default: int | None = None) -> int:
        if default is not None and name not in self._environ:
            return default
        value = self._text(name)
        if not (value.isascii() and value.isdigit()):
            raise UsageError(f"{name} is {value!r}; it must be a whole number")
        return int(value)


def _of_member(member: contract.Member) -> Identity:
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
        device=member.devices[0] if member.devices and member.device_kind == "gpu" else None,
        backend=member.backend,
        restart_count=member.restart_count,
        source="fleetrun",
        scratch=f"{member.log_dir}/ps.{member.pod}",
    )
