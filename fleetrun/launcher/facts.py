"""Build the fields of the events `launch` and `ready`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fleetrun import __version__
from fleetrun.aliases import Document, Environ
from fleetrun.envs.settings.command_line import without_secret_options
from fleetrun.envs.settings.options import LaunchSettings, Resolved
from fleetrun.envs.settings.show import banner, job_file_parts, program, words
from fleetrun.pod.spec import ContainerSpec, PodSpec


def launch_fields(resolved: Resolved, spec: PodSpec, environ: Environ) -> Document:
    """Return the fields of the event `launch`.

    `typed` is the command line of the user. `argv` holds the arguments that repeat this launch, including
    options from the environment or a job file. It lacks options that only a job file can hold.
    """
    settings = resolved.settings
    return {
        "job": settings.job_id,
        "pod": spec.name,
        "version": __version__,
        "pid": os.getpid(),
        "guard": os.getppid(),
        "host": os.uname().nodename,
        "user": environ.get("USER") or str(os.getuid()),
        "cwd": _cwd(),
        "python": sys.executable,
        "script": program(settings),
        "typed": without_secret_options(sys.argv[1:]),
        "argv": list(words(resolved, but=resolved.engine)),
        "settings": {name: {"value": value, "origin": origin} for name, value, origin in banner(resolved)},
        "job_file": job_file_parts(settings),
        "mode": str(spec.mode),
        "nnodes": _node_range(settings, spec),
        "log_dir": str(spec.log_dir),
        "max_restart": settings.max_restart,
        "containers": container_fields(spec),
    }


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # the directory was deleted a moment ago
        return ""


def _node_range(settings: LaunchSettings, spec: PodSpec) -> list[int]:
    """Return the fewest and the most nodes. The user gives a number, or a list of addresses."""
    if settings.nnodes != (1, 1):
        return list(settings.nnodes)
    number = next((each.env.get("FLEETRUN_NODE", "") for each in spec.containers), "").rpartition("/")[2]
    return [int(number or 1)] * 2


def container_fields(spec: PodSpec) -> list[Document]:
    """Describe the processes of a pod. The pre-hook, which runs before the others, has no rank."""
    return [
        {
            "name": each.name,
            "role": each.label or str(each.role),
            "rank": None if each.label else each.rank,
            "index": each.index,
            "log": str(each.log),
            "endpoint": each.endpoint,
        }
        for each in _with_hook(spec)
    ]


def logs_of(spec: PodSpec) -> dict[str, Path]:
    """Return the log of each process by name."""
    return {each.name: each.log for each in _with_hook(spec)}


def _with_hook(spec: PodSpec) -> Sequence[ContainerSpec]:
    return spec.containers if spec.pre_hook is None else (spec.pre_hook, *spec.containers)
