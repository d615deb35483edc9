"""Launch distributed training. fleetrun starts and watches processes, and leaves torch to them.

    result = fleetrun.run(train, nproc_per_node=4)            # a function, in four processes: their values
    job = fleetrun.launch("train.py", nproc_per_node=4)       # a script, in the background

Start a job with `run` or `launch`. A `Job` is a running job, and a `Result` describes how it ended.
`JobError` is raised if the job failed, `LaunchError` and `UsageError` if it could not start. `from fleetrun
import fleet` imports `trainers.fleet`, even beside another package named `trainers`. See docs/python.md.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` takes milliseconds, and Ctrl-C in that time would print a traceback
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


if not TYPE_CHECKING:  # so that type checkers find wrong names

    def __getattr__(name: str) -> "Any":
        if name == "fleet":
            from fleetrun.shadow import load_fleet  # late: the launcher works without it

            return load_fleet()
        if name in _PLACES:
            from importlib import import_module  # late, like the modules that it imports

            return getattr(import_module(f"fleetrun.{_PLACES[name]}"), name)
        raise AttributeError(f"module 'fleetrun' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__doc__", "fleet"])
