"""The role maker of whoever was started by a launcher: everything is in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainers.errors import UsageError
from trainers.roles.environment import EnvironmentRoleMaker
from trainers.roles.identity import Identity


class PaddleCloudRoleMaker:
    """For processes of fleetrun, torchrun, mpirun (collective) and Paddle's launchers.

    `is_collective` says which kind of training the job is for. `environ` replaces the process's environment.
    `fleet.init` takes this one when it is given none.
    """

    def __init__(self, is_collective: bool = False, *, environ: Mapping[str, str] | None = None) -> None:
        if not isinstance(is_collective, bool):
            raise UsageError(
                f"PaddleCloudRoleMaker is_collective is {is_collective!r}; it must be True or False"
            )
        self.is_collective = is_collective
        self._environ = os.environ if environ is None else environ

    def identity(self) -> Identity:
        """Raises UsageError naming the variable that is missing, malformed or contradicts another."""
        return EnvironmentRoleMaker(self._environ).identity()
