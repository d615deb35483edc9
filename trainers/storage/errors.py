"""Errors of saving and loading. Every message names the directory or file."""

from __future__ import annotations

import errno

from trainers.errors import FleetError


class SaveError(FleetError):
    """A save was not completed. The former save in the directory is unchanged."""


class LoadError(FleetError):
    """A save cannot be loaded, or does not fit this model. No table was changed unless the message reports
    it.
    """


NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a file that cannot grow. The disk is full, or a quota or the process's file size limit (ulimit
-f) is reached.
"""


def save_error(error: OSError, where: str, free: int | None) -> SaveError:
    """Return a SaveError for an OSError. `free` is the number of free bytes there, or None if unknown."""
    if error.errno in NO_SPACE:
        room = "" if free is None else f"; {free / 1e6:,.1f} MB are free there"
        return SaveError(
            f"The save to {where} was stopped and removed: {error.strerror}{room}. Free some space, raise "
            "the quota, or choose another directory. The former save is unchanged."
        )
    if isinstance(error, PermissionError):
        return SaveError(
            f"No permission to save to {where}: {error}. Choose a directory that the servers can write to."
        )
    return SaveError(f"The save to {where} failed and was removed: {error}")


def load_error(error: OSError, where: str) -> LoadError:
    if isinstance(error, FileNotFoundError):
        return LoadError(
            f"{where} is missing, although the manifest lists it. Copy the whole directory again."
        )
    if isinstance(error, PermissionError):
        return LoadError(f"No permission to read {where}: {error}")
    return LoadError(f"{where} cannot be read: {error}")
