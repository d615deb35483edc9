"""MPI starters. `mpirun fleetrun train.py` makes each of its processes a node of the job."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fleetrun.aliases import Environ
from fleetrun.envs import mpi
from fleetrun.envs.settings.command_line import EngineValue
from fleetrun.errors import UsageError


def place(environ: Environ, but: Collection[str] = ()) -> Mapping[str, EngineValue]:
    """Make each rank of mpirun one node of the job."""
    try:
        process = mpi.read(environ)
    except mpi.MpiError as error:
        raise UsageError(str(error)) from None
    if process is None or process.size == 1:
        return {}
    size = "OMPI_COMM_WORLD_SIZE" if process.starter.startswith("OMPI") else "PMI_SIZE"
    found = {
        "nnodes": EngineValue(str(process.size), size),
        "rank": EngineValue(str(process.rank), process.starter),
    }
    if "master" not in but:
        if process.master is None:
            raise UsageError(
                f"mpirun started {process.size} processes ({size}), but their master is unknown",
                hint=f"Add --nnodes {process.size} --master HOST:PORT, with the host of the first process.",
            )
        found["master"] = EngineValue(process.master, "mpirun")
    return found
