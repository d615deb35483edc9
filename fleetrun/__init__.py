"""A launcher for distributed training: starts and watches processes, and never imports torch.

    result = fleetrun.run(train, nproc_per_node=4)            # a function, in four processes: their values
    job = fleetrun.launch("train.py", nproc_per_node=4)       # a script, in the background

`run` and `launch` start a job, `Job` is one that runs, `Result` is how it ended, `JobError` that it failed;
`LaunchError` and `UsageError` say that it could not begin. `from fleetrun import fleet` is `from trainers
import fleet`, also beside another package named `trainers`. See docs/python.md.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes milliseconds to import, and Ctrl-C in it would end in a traceback
    from typing import Any

    from fleetrun.api import launch, run
    from fleetrun.errors import LaunchError, UsageError
    from fleetrun.job import Job, JobError, Result

    fleet: Any

__all__ = ["Job", "JobError", "LaunchError", "Result", "UsageError", "__version__", "launch", "run"]

_PLACES = {
    "Job": "job",
    "JobError": "job",
    "LaunchError": "errors",
    "Result": "job",
    "UsageError": "errors",
    "launch": "api",
    "run": "api",
}


if not TYPE_CHECKING:  # a checker then knows a wrong name

    def __getattr__(name: str) -> "Any":
        if name == "fleet":
            from fleetrun.shadow import load_fleet  # late: the launcher does not need it

            return load_fleet()
        if name in _PLACES:
            from importlib import import_module  # late, as what it imports

            return getattr(import_module(f"fleetrun.{_PLACES[name]}"), name)
        raise AttributeError(f"module 'fleetrun' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "fleet"])
