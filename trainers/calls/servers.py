"""The fleet API's calls for jobs with parameter servers."""

from __future__ import annotations

from trainers.calls.begun import Begun
from trainers.ps.tables.shrink import ShrinkPolicy


class Servers(Begun):
    """The life of a server, and that of a trainer with servers."""

    def init_server(self, dirname: str | None = None) -> None:
        """Bind this server's endpoint, and begin with the tables saved in `dirname`, if given: a folder that
        every server can read.
        """
        self._ready("init_server").init_server(dirname)

    def run_server(self) -> None:
        """Serve until every trainer has called stop_worker, or SIGTERM."""
        self._ready("run_server").run_server()

    def init_worker(self) -> None:
        """Connect to the servers; all trainers start from trainer 0's initial values."""
        self._ready("init_worker").init_worker()

    def shrink(self, policy: ShrinkPolicy | None = None) -> int:
        """A day has passed: age the statistics of all tables that keep them, and remove the rows that are
        not worth their memory. For one trainer to call; returns how many rows went.
        """
        return self._ready("shrink").shrink(policy or ShrinkPolicy())

    def stop_worker(self) -> None:
        """Say that this trainer has finished, wait for the others, and bring the trained values into the
        model. When fleetrun is ending this process (`stop_requested`), it has not finished: its pushes are
        waited for, nobody else is.
        """
        self._ready("stop_worker").stop_worker()
