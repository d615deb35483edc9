"""Print the facts of a node on which a job runs, as JSON: `python -m fleetrun.doctor LOG_DIR [DEVICE ...]`.

It measures for at most a second and does not disturb the job. `fleetrun bundle` runs it on other nodes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from fleetrun.doctor import measure
from fleetrun.doctor.facts import Folder, Machine, Torch
from fleetrun.doctor.visit import jsonable, observed

_PATIENCE = 1.0  # seconds


def glance(log_dir: Path, devices: Sequence[str]) -> Machine:
    """Collect the facts without writing files or importing torch."""
    tasks: measure.Tasks = {
        **measure.OF_THE_HOST,
        "logs": lambda: Folder(path=str(log_dir), space=measure.space(log_dir)),
        "network": lambda: measure.network(os.uname().nodename),
        "torch": _installed_torch,
    }
    if devices:
        tasks["driver"] = lambda: measure.ask_driver(devices)
    return observed(tasks, dict.fromkeys(tasks, _PATIENCE))


def _installed_torch() -> Torch:
    """Return the torch version of the launcher's Python."""
    try:
        return Torch(version=metadata.version("torch"))
    except metadata.PackageNotFoundError as error:
        return Torch(error=str(error))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(jsonable(asdict(glance(Path(sys.argv[1]), sys.argv[2:])))) + "\n")
