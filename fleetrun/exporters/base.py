"""What an exporter is: made once in the exporter process, then given each message of the launcher."""

from __future__ import annotations

import threading
from typing import Protocol

from fleetrun.aliases import Say
from fleetrun.exporters.job_state import Job, Line
from fleetrun.frozen import frozen_by_name


@frozen_by_name
class Context:
    """What an exporter is made with. `argument` is the text after `NAME=`; `warn` shows a line to the user.

    `job` is the state of this machine's part of the job as of the last message. It changes in the thread that
    calls `take`, under `lock`: an exporter with threads of its own reads it under that.
    """

    argument: str
    job: Job
    lock: threading.Lock
    warn: Say


class Exporter(Protocol):
    """Made by calling the plug-in with a `Context`. What it raises, here or there, is told as a warning, and
    the exporter gets no more messages; the job and the other exporters continue.
    """

    def take(self, line: Line, now: float) -> None:
        """A message, as `fleetrun/exporters/job_state.py` makes it; `now` in seconds since the epoch."""

    def close(self) -> None:
        """No message follows: write what waits. The end of the launch waits for it, for 30 s at most."""
