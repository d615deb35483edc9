"""What can go wrong inside a training script: what happened, with the value, and what to do. Ground:
imports nothing.
"""


class FleetError(RuntimeError):
    """Any error that the runtime raises on purpose.

    `restart_helps`: whether the next attempt of this process may succeed. Where it cannot, the message says
    everything: it is printed without a traceback, and the launcher ends the job.
    """

    restart_helps: bool = True


class UsageError(FleetError):
    """A call in the wrong order, in the wrong role, or with a value that cannot be used."""


class NotSupportedError(FleetError):
    """Understood, but not something that this version does."""


class DataError(FleetError):
    """A data file that is missing, or is not what its name says; the message names it."""


class ServerError(FleetError):
    """A parameter server does not answer, or refused a request; the message names it by index and
    endpoint.
    """


class ServerFullError(ServerError):
    """A parameter server has no memory for more rows."""

    restart_helps = False


class TablesLostError(ServerError):
    """Some servers have lost their tables, and others have theirs."""

    restart_helps = False


class TrainerLostError(FleetError):
    """Another trainer of this job is gone and a step cannot be completed without it."""
