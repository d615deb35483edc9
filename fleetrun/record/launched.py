"""What the record says of a launch and of each of its pods: who launched what, where, and which processes
that made. Pure but for the look at who and where this is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetrun.envs.settings.options import LaunchSettings, Resolved
from fleetrun.envs.settings.show import job_file_parts, words
from fleetrun.pod.spec import ContainerSpec, PodSpec

VERSION = "0.1.0"
"""As in pyproject.toml; to ask the installed package for it takes longer than to launch."""


def launch_fields(resolved: Resolved, spec: PodSpec, environ: Mapping[str, str]) -> dict[str, Any]:
    """Of the event `launch`. `argv` is what to type after `fleetrun` for the same launch, wherever its
    options came from, but for what only the `job_file` said; `typed` is what was typed.
    """
    settings = resolved.settings
    return {
        "job": settings.job_id,
        "pod": spec.name,
        "version": VERSION,
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "user": environ.get("USER") or str(os.getuid()),
        "cwd": _cwd(),
        "python": sys.executable,
        "typed": sys.argv[1:],
        "argv": list(words(resolved, but=resolved.engine)),
        "job_file": job_file_parts(settings),
        "mode": str(spec.mode),
        "nnodes": _machines(settings, spec),
        "log_dir": str(spec.log_dir),
        "max_restart": settings.max_restart,
        "containers": containers(spec),
    }


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # deleted a moment ago
        return ""


def _machines(settings: LaunchSettings, spec: PodSpec) -> list[int]:
    """The fewest and the most. They may be given by number, or as a list of addresses."""
    if settings.nnodes != (1, 1):
        return list(settings.nnodes)
    number = next((each.env.get("FLEETRUN_NODE", "") for each in spec.containers), "").rpartition("/")[2]
    return [int(number or 1)] * 2


def containers(spec: PodSpec) -> list[dict[str, Any]]:
    """The processes of a pod; one that runs before them has no rank."""
    hook = [spec.pre_hook] if spec.pre_hook is not None else []
    return [_container(each) for each in (*hook, *spec.containers)]


def logs_of(spec: PodSpec) -> dict[str, Path]:
    """The log of each, by its name."""
    hook = [spec.pre_hook] if spec.pre_hook is not None else []
    return {each.name: each.log for each in (*hook, *spec.containers)}


def _container(spec: ContainerSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "role": spec.label or str(spec.role),
        "rank": None if spec.label else spec.rank,
        "index": spec.index,
        "log": str(spec.log),
        "endpoint": spec.endpoint,
    }
