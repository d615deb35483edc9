"""The engine that is none: fleetrun itself starts the processes of this machine. Its `submit` is given."""

from __future__ import annotations

from fleetrun.errors import LaunchError
from fleetrun.schedulers.base import Submission


class Local:
    """What --scheduler local (the default) names; `launch/local.py` does its work, and hands nothing over."""

    name = "local"

    def submit(self, job: Submission) -> int:
        raise LaunchError("--scheduler local hands no job over: fleetrun runs it")


ENGINE = Local()
