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


class ScriptNotFoundError(LaunchError):
    """The script, module or program does not exist."""

    exit_code = 127


class ScriptNotExecutableError(LaunchError):
    """The script exists but the kernel will not run it."""

    exit_code = 126


class SpawnError(LaunchError):
    """The kernel refused a process, a file descriptor or memory."""
