"""Whether a scheduler started this process, and which place in the job it gave it. Every launch imports this
module, so a scheduler's module is imported only if its variables are set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module

from fleetrun.envs.channels import inside_container
from fleetrun.envs.settings.command_line import EngineValue

_PLACERS: Mapping[str, Collection[str]] = {
    "mpi": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "slurm": ("SLURM_JOB_ID",),
    "kubernetes": ("FLEETRUN_PLACE_NNODES",),
}
"""Engines that place, the innermost starter first (mpirun may run inside a Slurm job, never around one), with
the variables of which one must be there: without an engine none is imported.
"""


def place(environ: Mapping[str, str], but: Collection[str] = ()) -> Mapping[str, EngineValue]:
    """The place that the scheduler which started this process gave it, by the option's name: nnodes, rank,
    master, job_id; or scheduler, where it gave machines but started this process on one only. Empty: no
    scheduler did.

    `but` are options that are set elsewhere: they are left out, and what only they need is not looked up.
    Raises UsageError for variables that are malformed, and where machines cannot know where to meet.
    """
    if inside_container(environ):  # a launch inside a trainer is a job of its own
        return {}
    for name, variables in _PLACERS.items():
        if any(environ.get(variable) for variable in variables):
            found: Mapping[str, EngineValue] = import_module(f"fleetrun.schedulers.{name}").place(
                environ, but
            )
            if found:
                return {option: placed for option, placed in found.items() if option not in but}
    return {}
