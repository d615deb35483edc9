"""Detect a scheduler that started this process, and read its placement.

Every launch imports this module, so a scheduler's module is imported only if its variables are set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module

from fleetrun.aliases import Environ
from fleetrun.envs.channels import inside_container
from fleetrun.envs.settings.command_line import EngineValue

_PLACERS: Mapping[str, Collection[str]] = {
    "mpi": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "slurm": ("SLURM_JOB_ID",),
    "kubernetes": ("FLEETRUN_PLACE_NNODES",),
}
"""Schedulers that place processes, with the variables that reveal them. They are imported only if such a
variable is set.

The innermost starter comes first, because mpirun may run inside a Slurm job but never around one.
"""


def place(environ: Environ, but: Collection[str] = ()) -> Mapping[str, EngineValue]:
    """Return the placement from the scheduler that started this process, by option name: nnodes, rank,
    master, job_id.

    The result holds `scheduler` instead if the scheduler allocated nodes but started this process on only one
    of them. It is empty for a process started without a scheduler.

    Options in `but` are set elsewhere. They are omitted, and values that only they need are not looked up.
    Raises UsageError for malformed variables, and if nodes cannot determine where to join.
    """
    if inside_container(environ):  # a launch inside a trainer is a separate job
        return {}
    for name, variables in _PLACERS.items():
        if any(environ.get(variable) for variable in variables):
            found: Mapping[str, EngineValue] = import_module(f"fleetrun.schedulers.{name}").place(
                environ, but
            )
            if found:
                return {option: placed for option, placed in found.items() if option not in but}
    return {}
