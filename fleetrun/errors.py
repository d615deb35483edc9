"""The errors of the launcher: what happened, what to do about it, and the exit code."""

from __future__ import annotations

from collections.abc import Iterable


def similar(word: str, words: Iterable[str], most: int = 1, cutoff: float = 0.7) -> list[str]:
    """The `words` that are spelled almost like `word`, best first: suggestions for a hint."""
    from difflib import get_close_matches  # late: needed for mistakes only

    return get_close_matches(word, list(words), most, cutoff)


class LaunchError(Exception):
    """An error with a `message` for the user. `hint` is one more line, or None: what to do about it.
    `exit_code` is what the command ends with.
    """

    exit_code = 125  # only `cli.py` prints an error and exits

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(LaunchError):
    """The command line, a variable or a job file is invalid. Nothing was started."""

    exit_code = 2


class NotSupportedError(UsageError):
    """Valid, but not supported by this version."""


class PortError(LaunchError):
    """A requested port is in use, or a range has no free port."""


class ReservedPortError(PortError):
    """A port that is reserved by another fleetrun."""


class ScriptNotFoundError(LaunchError):
    """The script, module or program does not exist."""

    exit_code = 127


class ScriptNotExecutableError(LaunchError):
    """The script exists but cannot be executed."""

    exit_code = 126


class SpawnError(LaunchError):
    """The kernel refused a process, a file descriptor or memory."""


class RendezvousError(LaunchError):
    """The machines of a job did not meet in time, or this one was rejected."""

    exit_code = 124


class NotNeededError(LaunchError):
    """The job has no place for this machine, or goes on, or has ended, without it: none is to be started for
    it.
    """

    exit_code = 123  # below all others of fleetrun's: srun ends with the highest of its tasks


class PluginError(LaunchError):
    """A plug-in is missing, cannot be loaded, or does not do what its kind has to."""


class StoreError(LaunchError):
    """The store cannot be opened, or rejects this node."""


class StoreLostError(StoreError):
    """The connection to the rendezvous store is lost."""


class StoreSilentError(StoreLostError):
    """It has not answered for as long as a lease: others may go on without this node."""
