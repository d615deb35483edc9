"""What a launch has besides its pods: exports, notifications, standbys, watches. Each is a `Part`.

To add one, write a module with a subclass of `Part` and a line of `PARTS`.
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
"""What happens on this machine, and between the nodes of the job: one stream, `LaunchSession.publish`."""

PARTS: Mapping[str, Callable[[LaunchSettings], object]] = {
    "ranks": lambda its: True,
    "warm": lambda its: its.warm,
    "served": lambda its: its.run_mode.has_servers,
    "exports": lambda its: its.tensorboard or its.metrics_port is not None or its.export,
    "notices": lambda its: its.notify,
}
"""By the module in this folder, whose class has the same name: when the settings of a launch ask for it. They
are closed in this order, and the last two may wait.
"""


@frozen
class Reach:
    """The other nodes of a job. `others` asks for their status, and `ask` for where their ranks are. With
    --warm, `listed` gets what spares may import.
    """

    others: Others | None = None
    ask: AskOthers | None = None
    listed: Callable[[bytes], None] | None = None


@frozen_by_name
class End:
    """The end of the job on this machine. `first` is the process of the first failure, if that was here.
    `requested`: the user ended the job.
    """

    code: int
    reason: str
    restarts: int = 0
    report: Strings = ()
    first: ContainerSpec | None = None
    requested: bool = False


class Launch:
    """What the parts of a launch share. `spec` is the first pod, or the one that this node expects."""

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
        """Seconds since the epoch. It goes on as before if someone sets the clock of the machine."""
        self.log_dir = Path(settings.log_dir).absolute()
        self.journal = Journal(journal_path(self.log_dir, settings.job_id, spec.name), self.wall)
        self.progress = ProgressReceiver(
            loop, files.progress_socket(self.runtime, spec.name), self.journal.write
        )
        self.companions: set[int] = set()
        """Pids of the launcher's own processes. They are spared when what containers left is ended."""
        self.status = JobStatus(self.progress, self.wall)
        self.memory = MemoryStore(loop, files.memory_socket(self.runtime, spec.name))
        self.marks = Marks(marks_path(self.log_dir, settings.job_id, spec.name), loop, self.wall)
        for listener in (self.marks.heard, self.status.handle):
            self.journal.subscribe(listener)
        if (hear := console.listener) is not None:
            self.journal.subscribe(lambda event: hear(encoded(event)))

    def warn(self, text: str) -> None:
        self.console.warning(printable(text))

    def show_status(self) -> None:
        """Begin to show the state of the job, where the console does so."""
        if not self.console.shows_status:
            return
        from fleetrun.console.status_text import status_fields  # late: few launches show it

        most, status = self.settings.nnodes[1], self.status
        silent, stopping, waits = status.silent_for, status.stopping_for, status.waits_for
        self.console.begin(
            self.loop, lambda: status_fields(status.fields(), most, silent(), stopping(), waits())
        )
        self.progress.subscribe(lambda container, report: self.console.refresh())


class Part:
    """Hears what happens to a launch. All methods but `close` must return at once."""

    def __init__(self, launch: Launch, reach: Reach) -> None:
        """Begin, before the first process starts. Raises LaunchError for what cannot be."""

    def set_pod(self, pod: Pod, restarts: int) -> None:
        """This pod is next, after so many restarts."""

    def handle(self, event: Event) -> None:
        """What has happened."""

    def noted(self, line: Fields) -> None:
        """A line of the record."""

    def over(self, end: End, reached: str) -> None:
        """The job is over on this machine. `reached`: `12m34s, 800 steps, loss 0.21`."""

    def close(self, urgent: int) -> None:
        """After the last process. A wait ends when `urgent` becomes readable. May be called twice."""
