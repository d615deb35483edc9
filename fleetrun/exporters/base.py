"""Define exporters: the exporter process makes each one once, and then passes it each message of the
launcher.
"""

from __future__ import annotations

import threading
from typing import Protocol

from fleetrun.aliases import ShowText
from fleetrun.exporters.job_state import Job, Line
from fleetrun.frozen import frozen_by_name


@frozen_by_name
class Context:
    """The arguments of an exporter. `argument` is the text after `NAME=`. `warn` shows a line to the user.

    `job` is the state of this node's part of the job, as of the last message. The thread that calls `take`
    changes it under `lock`. An exporter with its own threads must hold `lock` to read it.
    """

    argument: str
    job: Job
    lock: threading.Lock
    warn: ShowText


class Exporter(Protocol):
    """A plug-in's exporter. The exporter process calls the plug-in with a `Context` to make it.

    An exception here or in the plug-in becomes a warning, and the exporter gets no more messages. The job and
    the other exporters continue.
    """

    def take(self, line: Line, now: float) -> None:
        """Handle a message of `fleetrun/exporters/job_state.py`. `now` is in seconds since the epoch."""

    def close(self) -> None:
        """Write all waiting data, because no message follows. The end of the launch waits at most 30 s."""
