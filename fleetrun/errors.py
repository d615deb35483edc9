"""Define the errors of the launcher. Each has a message, a hint with a remedy, and an exit code."""

from __future__ import annotations

from collections.abc import Iterable


def similar(word: str, words: Iterable[str], most: int = 1, cutoff: float = 0.7) -> list[str]:
    """Return the `words` with a spelling close to `word`, best first, as suggestions for a hint."""
    from difflib import get_close_matches  # late: only mistakes need it

    return get_close_matches(word, list(words), most, cutoff)


class LaunchError(Exception):
    """An error with a `message` for the user."""

    exit_code = 125  # The exit code of the command. Only `cli.py` prints an error and exits.

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        """One more line with a remedy, or None."""


class UsageError(LaunchError):
    """The command line, an environment variable or a job file is invalid. No process was started."""

    exit_code = 2


class NotSupportedError(UsageError):
    """The request is valid, but this version does not support it."""


class PortError(LaunchError):
    """A requested port is in use, or all ports of a range are."""


class ReservedPortError(PortError):
    """Another fleetrun has reserved the port."""


class ScriptNotFoundError(LaunchError):
    """The script, module or program does not exist."""

    exit_code = 127


class ScriptNotExecutableError(LaunchError):
    """The script exists but cannot be executed."""

    exit_code = 126


class SpawnError(LaunchError):
    """The kernel refused a process, a file descriptor or memory."""


class RendezvousError(LaunchError):
    """The nodes of a job did not join in time, or this node was rejected."""

    exit_code = 124


class NotNeededError(LaunchError):
    """The job does not need this node: all ranks are filled, the job continues without it, or the job has
    ended.

    No replacement should be started for this node.
    """

    # below all other exit codes of fleetrun, because srun ends with the highest code of its tasks
    exit_code = 123


class PluginError(LaunchError):
    """A plug-in is missing, cannot be loaded, or does not fulfil the interface of its kind."""


class StoreError(LaunchError):
    """The store cannot be opened, or rejects this node."""


class StoreLostError(StoreError):
    """The connection to the rendezvous store is lost."""


class StoreSilentError(StoreLostError):
    """The store has been silent for a whole lease, so the other nodes may continue without this node."""
