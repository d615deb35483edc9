"""The fleet API's calls that write what has been trained."""

from __future__ import annotations

from trainers.calls.begun import Begun
from trainers.errors import UsageError
from trainers.runtime import Where


class Saving(Begun):
    """Models and tables as files, for serving and for another job."""

    def save_persistables(self, dirname: Where, mode: int = 0) -> None:
        """Save all tables to a folder that every server can write: a path of a shared disk, or a URL that
        fsspec knows. For one trainer to call; the others may go on training.

        mode: 0 everything; 1 the rows changed since the last save, beside it; 2 values only, for serving; 3
        as 0, when a day has passed in the tables' statistics. Raises SaveError or ServerError; the former
        save stays current then.
        """
        if mode not in (0, 1, 2, 3):
            raise UsageError(f"save_persistables mode is {mode!r}; it must be 0, 1, 2 or 3")
        self._ready("save_persistables").save(dirname, mode)

    def save_inference_model(self, dirname: Where) -> None:
        """Save what serving needs: the values of all tables, without optimizer state and statistics.
        `trainers.ps.read_values(dirname)` reads them without servers.
        """
        self._ready("save_inference_model").save(dirname, 2)
