"""What surrounds the processes of a launch: the record of what happens, the socket at which others ask, what
trainers report. One for a launch, over all its pods. Decides nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from fleetrun.console.console import Console
from fleetrun.envs import runfolder
from fleetrun.envs.settings import LaunchSettings, Resolved
from fleetrun.pod.loop import Loop
from fleetrun.pod.observer import Observer
from fleetrun.pod.pod import Pod
from fleetrun.pod.spec import PodSpec
from fleetrun.pod.supervisor import Supervisor
from fleetrun.record.journal import Journal, journal_path
from fleetrun.record.recorder import Recorder


class Scene:
    """Made before the first pod, closed after the last."""

    def __init__(self, resolved: Resolved, pod: str, console: Console, loop: Loop) -> None:
        self.settings: LaunchSettings = resolved.settings
        self.pod_name = pod
        self._resolved = resolved
        self._console = console
        self._loop = loop
        self._runtime = runfolder.folder(os.environ)
        log_dir = Path(self.settings.log_dir).absolute()
        self.journal = Journal(journal_path(log_dir, self.settings.job_id, pod))
        self._pod: Pod | None = None
        self._supervisor: Supervisor | None = None

    def opened(self, spec: PodSpec) -> None:
        """Before the first process of the first pod starts."""

    def observers(self, spec: PodSpec) -> list[Observer]:
        """Who is told, besides the console, what happens to this pod."""
        return [Recorder(self.journal)]

    def plays(self, pod: Pod, supervisor: Supervisor) -> None:
        """This pod is next."""
        self._pod, self._supervisor = pod, supervisor

    def over(self, code: int, reason: str, restarts: int, report: list[str]) -> None:
        """The job is over on this machine."""
        self.journal.write("over", code=code, reason=reason, restarts=restarts, report=report)

    def close(self) -> None:
        """Nothing runs any more. May be called twice."""
