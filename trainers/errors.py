"""Define the errors of a training script. Messages contain the event, the value, and the remedy.

The module imports nothing.
"""


class FleetError(RuntimeError):
    """The base of all errors that the runtime raises on purpose.

    `restart_helps` is True if the next attempt of this process may succeed. If it is False, the message is
    complete. It is printed without a traceback, and the launcher ends the job.
    """

    restart_helps: bool = True


class UsageError(FleetError):
    """A call in the wrong order or role, or with an invalid value."""


class NotSupportedError(FleetError):
    """A valid request that this version does not support."""


class DataError(FleetError):
    """A data file that is missing or invalid. The message names it."""


class ServerError(FleetError):
    """A parameter server that refused a request or did not answer it. The message has its index and
    endpoint.
    """


class ServerFullError(ServerError):
    """A parameter server without memory for more rows."""

    restart_helps = False


class TablesLostError(ServerError):
    """Some servers have lost their tables, while others still have theirs."""

    restart_helps = False


class BrokenError(FleetError):
    """The state of a parameter server contradicts itself. The server stops instead of training on with it."""


class TrainerLostError(FleetError):
    """Another trainer of this job has ended, and a step cannot be completed without it."""
