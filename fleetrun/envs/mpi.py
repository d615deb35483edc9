"""Find which process of an mpirun this process is.

The module reads the variables of Open MPI, of Hydra (MPICH, Intel MPI) and of other PMI starters. It works
without an MPI library, so a script may still use one. It imports only the standard library, because
`trainers.roles` uses it too.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path

from fleetrun.aliases import Environ
from fleetrun.envs.contract import agreed_port
from fleetrun.frozen import frozen
from fleetrun.proc import read_stat

_HYDRA = "hydra_pmi_proxy"
_JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")


class MpiError(Exception):
    """A variable of an MPI starter is missing or malformed."""


@frozen
class MpiProcess:
    """One process that an MPI starter started. `starter` names the variable of its rank.

    `job` is the same in all processes of one mpirun and differs between two of them, or None if unknown.
    `head` is the address of the node that runs mpirun, or None if the variables do not contain it.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    starter: str
    job: int | None = None
    head: str | None = None

    @property
    def one_host(self) -> bool:
        return self.local_size == self.size

    @property
    def master(self) -> str | None:
        """`host:port` where the processes can meet, or None if they cannot agree on an endpoint."""
        host = "127.0.0.1" if self.one_host else self.head
        if host is None or self.job is None:
            return None
        return f"{f'[{host}]' if ':' in host else host}:{agreed_port(self.job)}"


def read(environ: Environ, proxy: Callable[[], int | None] | None = None) -> MpiProcess | None:
    """Return the process that the variables describe, or None if no MPI starter started this process.

    `proxy` finds the pid of the Hydra proxy above this process. Raises MpiError.
    """
    if "OMPI_COMM_WORLD_SIZE" in environ:
        name = "OMPI_COMM_WORLD_RANK"
        identity = next((environ[each] for each in _JOB_IDS if environ.get(each)), None)
        return _checked(
            MpiProcess(
                rank=_number(environ, name),
                size=_number(environ, "OMPI_COMM_WORLD_SIZE"),
                local_rank=_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
                local_size=_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 0),
                starter=name,
                job=None if identity is None else zlib.crc32(identity.encode()),
                head=_head(environ),
            )
        )
    if "MPI_LOCALNRANKS" in environ or ("PMI_SIZE" in environ and "SLURM_STEP_ID" not in environ):
        local = "MPI_LOCALRANKID" if "MPI_LOCALRANKID" in environ else "PMI_LOCAL_RANK"
        size = "MPI_LOCALNRANKS" if "MPI_LOCALNRANKS" in environ else "PMI_LOCAL_SIZE"
        return _checked(
            MpiProcess(
                rank=_number(environ, "PMI_RANK"),
                size=_number(environ, "PMI_SIZE"),
                local_rank=_number(environ, local, 0),
                local_size=_number(environ, size, 0),
                starter="PMI_RANK",
                job=(proxy or hydra_proxy)(),
            )
        )
    return None


def _head(environ: Environ) -> str | None:
    """Return the address of the node that runs mpirun.

    The address comes from `4711.0;tcp://192.0.2.2,10.0.0.1:45111`, or from the host name in Open MPI 5's
    `prterun-host1-4711@1`.
    """
    for found in re.findall(r"tcp4?://([\d.,]+)", environ.get("OMPI_MCA_orte_hnp_uri", "")):
        for address in str(found).split(","):
            if not address.startswith("127."):
                return address
    named = re.fullmatch(r"prterun-(.+)-\d+@\d+", environ.get("PMIX_NAMESPACE", ""))
    return named[1] if named else None


def _checked(process: MpiProcess) -> MpiProcess:
    if process.rank >= process.size:
        raise MpiError(
            f"{process.starter} is {process.rank}; there are {process.size} processes, counted from 0"
        )
    return process


def _number(environ: Environ, name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise MpiError(f"{name} is {text!r}; it must be a whole number")
    return int(text)


def hydra_proxy(pid: int | str = "self", proc: Path = Path("/proc")) -> int | None:
    """Return the pid of the nearest Hydra proxy above a process. Each mpirun has one proxy per node."""
    while True:
        try:
            stat = read_stat(pid, proc)
        except ProcessLookupError:
            return None
        if stat.name == _HYDRA:
            return stat.pid
        if stat.parent == 0:
            return None
        pid = stat.parent
