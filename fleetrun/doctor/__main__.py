"""`python -m fleetrun.doctor LOG_DIR [DEVICE ...]`: the facts of a machine on which a job runs, as JSON: what
is measured without disturbing it, in a second at most. For `fleetrun bundle` on another node.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from fleetrun import __version__
from fleetrun.doctor import measure
from fleetrun.doctor.facts import Folder, Machine, Torch
from fleetrun.doctor.visit import at_once, jsonable

_PATIENCE = 1.0  # seconds


def glance(log_dir: Path, devices: Sequence[str]) -> Machine:
    """Nothing is written, and torch is not imported."""
    tasks: dict[str, Callable[[], Any]] = {
        "cores": measure.cores,
        "memory": measure.memory,
        "shm": measure.shm,
        "limits": measure.limits,
        "logs": lambda: Folder(path=str(log_dir), space=measure.space(log_dir)),
        "network": lambda: measure.network(os.uname().nodename),
        "torch": _installed_torch,
    }
    if devices:
        tasks["driver"] = lambda: measure.ask_driver(devices)
    found = at_once(tasks, dict.fromkeys(tasks, _PATIENCE))
    late = tuple(name for name in tasks if name not in found)
    return Machine(python=platform.python_version(), fleetrun=__version__, **found, late=late)


def _installed_torch() -> Torch:
    """For the Python of the launcher."""
    try:
        return Torch(version=metadata.version("torch"))
    except metadata.PackageNotFoundError as error:
        return Torch(error=str(error))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(jsonable(asdict(glance(Path(sys.argv[1]), sys.argv[2:])))) + "\n")
