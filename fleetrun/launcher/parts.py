"""Define the parts of a launch besides its pods: exports, notifications, warm starts and watches. To add one,
write a module with a subclass of `Part`, and add a line to `PARTS`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fleetrun import files
from fleetrun.aliases import Clock, Fields, Strings
from fleetrun.console.console import Console
from fleetrun.console.text import printable
from fleetrun.control.server import JobStatus, Others
from fleetrun.envs.settings.options import LaunchSettings, Resolved
from fleetrun.launcher.signals import Interrupts
from fleetrun.pod.container import Pod
from fleetrun.pod.events import PodEvent
from fleetrun.pod.loop import Loop
from fleetrun.pod.memory import MemoryStore
from fleetrun.pod.spec import ContainerSpec, PodSpec
from fleetrun.progress.receiver import ProgressReceiver
from fleetrun.record.journal import Journal, Marks, encoded, journal_path, marks_path
from fleetrun.values import frozen, frozen_by_name

if TYPE_CHECKING:
    from fleetrun.elastic.agent import NodeEvent
    from fleetrun.stacks.helper import AskOthers

Event: TypeAlias = "PodEvent | NodeEvent"
"""An event on this node, or between the nodes of the job. `LaunchSession.publish` receives all of them."""

PARTS: Mapping[str, Callable[[LaunchSettings], object]] = {
    "ranks": lambda its: True,
    "warm": lambda its: its.warm,
    "watch": lambda its: its.watch,
    "served": lambda its: its.run_mode.has_servers,
    "exports": lambda its: its.tensorboard or its.metrics_port is not None or its.export,
    "notices": lambda its: its.notify,
}
"""Parts by the name of their module in this directory, with the settings that need them. The class has the
name of the module. The parts close in this order, so that only the last two may wait.
"""


@frozen
class Reach:
    """The links to the other nodes of a job. `others` requests their status, and `ask` the positions of their
    ranks.
    """

    others: Others | None = None
    ask: AskOthers | None = None


@frozen_by_name
class End:
    """The end of the job on this node. `first` is the process of the first failure, if it ran on this node.
    `requested`: the user ended the job.
    """

    code: int
    reason: str
    restarts: int = 0
    report: Strings = ()
    first: ContainerSpec | None = None
    requested: bool = False


class Launch:
    """The objects that the parts of a launch share. `spec` is the first pod, or the pod that this node
    expects.
    """

    def __init__(
        self, resolved: Resolved, spec: PodSpec, console: Console, loop: Loop, interrupts: Interrupts
    ) -> None:
        self.settings = settings = resolved.settings
        self.resolved = resolved
        self.spec = spec
        self.console = console
        self.loop = loop
        self.interrupts = interrupts
        self.runtime = files.run_folder(os.environ)
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        self.wall: Clock = lambda: booted + time.clock_gettime(time.CLOCK_BOOTTIME)
        """Seconds since the epoch. Setting the clock of the machine does not change this clock."""
        self.log_dir = Path(settings.log_dir).absolute()
        self.journal = Journal(journal_path(self.log_dir, settings.job_id, spec.name), self.wall)
        self.progress = ProgressReceiver(
            loop, files.progress_socket(self.runtime, spec.name), self.journal.write
        )
        self.companions: set[int] = set()
        """Process IDs of the launcher's own helper processes. They survive when the launcher ends stray
        processes of the job.
        """
        self.status = JobStatus(self.progress, self.wall)
        self.memory = MemoryStore(loop, files.memory_socket(self.runtime, spec.name))
        self.marks = Marks(marks_path(self.log_dir, settings.job_id, spec.name), loop, self.wall)
        for listener in (self.marks.handle, self.status.handle):
            self.journal.subscribe(listener)
        if (receive := console.listener) is not None:
            self.journal.subscribe(lambda event: receive(encoded(event)))

    def warn(self, text: str) -> None:
        self.console.warning(printable(text))

    def show_status(self) -> None:
        """Start to show the state of the job, if the console shows states."""
        if not self.console.shows_status:
            return
        from fleetrun.console.status_text import status_fields  # late: few launches show the state

        most, status = self.settings.nnodes[1], self.status
        silent, stopping, waits = status.silent_for, status.stopping_for, status.waits_for
        self.console.begin(
            self.loop, lambda: status_fields(status.fields(), most, silent(), stopping(), waits())
        )
        self.progress.subscribe(lambda container, report: self.console.refresh())


class Part:
    """A receiver of the events of a launch. All methods except `close` must return immediately."""

    def __init__(self, launch: Launch, reach: Reach) -> None:
        """Start before the first process. Raises LaunchError if the part cannot start."""

    def set_pod(self, pod: Pod, restarts: int) -> None:
        """Prepare for the next pod. `restarts`: restarts so far."""

    def handle(self, event: Event) -> None:
        """Handle an event."""

    def noted(self, line: Fields) -> None:
        """Handle a line of the event log."""

    def over(self, end: End, reached: str) -> None:
        """Handle the end of the job on this node. `reached`: `12m34s, 800 steps, loss 0.21`."""

    def close(self, urgent: int) -> None:
        """Close after the last process. A wait ends when `urgent` becomes readable. You may call it twice."""
