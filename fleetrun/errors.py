"""What can go wrong on the launcher's side: what happened, what to do, and the exit code. Ground: imports
nothing.
"""


class LaunchError(Exception):
    """An error with a message for the person at the terminal. Only `cli.py` prints it and exits.

    `hint` is one more line: what to do about it. `exit_code` is what the process ends with.
    """

    exit_code = 125

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(LaunchError):
    """The command line, a variable or a file says something that cannot be done. Nothing was started."""

    exit_code = 2


class NotSupportedError(UsageError):
    """Understood, but not something that this version does."""


class PortError(LaunchError):
    """A port that was asked for is taken, or a range has no room."""


class ReservedPortError(PortError):
    """A port that another fleetrun holds."""


class ScriptNotFoundError(LaunchError):
    """The script, module or program does not exist."""

    exit_code = 127


class ScriptNotExecutableError(LaunchError):
    """The script exists but the kernel will not run it."""

    exit_code = 126


class SpawnError(LaunchError):
    """The kernel refused a process, a file descriptor or memory."""


class RendezvousError(LaunchError):
    """The machines of a job did not meet in time, or this one is not wanted there."""

    exit_code = 124


class StoreError(LaunchError):
    """The store cannot be opened, or does not take this node."""


class StoreLostError(StoreError):
    """The store that the machines of a job met in is gone."""
