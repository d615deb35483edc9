"""What surrounds the processes of a launch: the record of what happens, the socket at which others ask, what
trainers report. One for a launch, over all its pods. Decides nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fleetrun import files
from fleetrun.console.console import Console
from fleetrun.console.text import printable
from fleetrun.control.board import Board, facts_of_launch
from fleetrun.control.service import Control
from fleetrun.envs.settings.options import LaunchSettings, Resolved
from fleetrun.errors import LaunchError
from fleetrun.pod.loop import Loop
from fleetrun.pod.observer import Observer
from fleetrun.pod.pod import Pod
from fleetrun.pod.spec import PodSpec
from fleetrun.progress.desk import Desk
from fleetrun.progress.observing import DeskObserver
from fleetrun.record.journal import Journal, encoded, journal_path
from fleetrun.record.launched import containers, launch_fields, logs_of
from fleetrun.record.marks import Marks, marks_path
from fleetrun.record.recorder import Recorder

if TYPE_CHECKING:
    from fleetrun.exporters.feed import Feed
    from fleetrun.pod.hangwatch import HangWatch


class Scene:
    """Made before the first pod, closed after the last."""

    def __init__(self, resolved: Resolved, pod: str, console: Console, loop: Loop) -> None:
        self.settings: LaunchSettings = resolved.settings
        self.pod_name = pod
        self._resolved = resolved
        self._console = console
        self._loop = loop
        self._runtime = files.run_folder(os.environ)
        log_dir = Path(self.settings.log_dir).absolute()
        self.journal = Journal(journal_path(log_dir, self.settings.job_id, pod))
        self.marks = Marks(marks_path(log_dir, self.settings.job_id, pod), loop)
        self.journal.listen(self.marks.heard)
        if (hear := console.listener) is not None:
            self.journal.listen(lambda event: hear(encoded(event)))
        self.desk = Desk(loop, files.progress_socket(self._runtime, pod), self.journal.write)
        self.companions: set[int] = set()
        """The processes beside the job, by pid: what sweeps up behind containers spares them."""
        self.hurry: int | None = None
        """Readable when nothing is to be waited for any more."""
        self._feed: Feed | None = None
        self._hangs: HangWatch | None = None
        self._over = False
        settings = self.settings
        facts = facts_of_launch(settings.job_id, pod, settings.run_mode, log_dir, settings.max_restart)
        self.control = Control(loop, Board(facts, self.desk), console.info)

    def opened(self, spec: PodSpec) -> None:
        """Before the first process of the first pod starts. Raises LaunchError for what cannot be."""
        if self.settings.tensorboard is not None or self.settings.metrics_port is not None:
            self._export(spec)
        if (problem := self.desk.open()) is not None:
            self._console.debug(f"no progress can be reported: {problem}")
        self.journal.write("launch", **launch_fields(self._resolved, spec, os.environ))
        self.control.open(self._runtime)
        if self._console.stands:
            from fleetrun.console.status_text import facts_of  # late: few launches show it

            self._console.begin(self._loop, lambda: facts_of(self.control.board.status()))

    def observers(self) -> list[Observer]:
        """Who is told, besides the console, what happens to a pod."""
        return [DeskObserver(self.desk), Recorder(self.journal), self.control.board]

    def hangs(self) -> HangWatch | None:
        """Who watches for hangs, over all pods; nobody, unless that was asked for."""
        if self._hangs is None and self.settings.hang_timeout is not None:
            from fleetrun.stacks.watching import watch_for_hangs  # late: most launches watch for none

            limit = self.settings.hang_timeout
            self._hangs = watch_for_hangs(self._loop, self.companions, limit, self._tell_places)
            reported = self._hangs.reported
            self.desk.listen(lambda container, report: reported(container))
        return self._hangs

    def _tell_places(self, lines: Sequence[str]) -> None:
        self._console.block([f"  {printable(line)}" for line in lines], level="ERROR")

    def plays(self, pod: Pod, restarts: int) -> None:
        """This pod is next, after so many restarts."""
        self.control.board.plays(pod, restarts)
        self.desk.pod(pod.spec)
        if self._feed is not None:
            self._feed.pod(pod.spec)
        self.journal.write(
            "ready",
            attempt=max((each.restarts for each in pod.containers), default=0),
            containers=containers(pod.spec),
        )
        self.marks.start(logs_of(pod.spec))

    def over(self, code: int, reason: str, restarts: int, report: list[str]) -> None:
        """The job is over on this machine."""
        self._over = True
        self.marks.close()
        self.desk.settle()
        self.journal.write("over", code=code, reason=reason, restarts=restarts, report=report)

    def close(self) -> None:
        """Nothing runs any more. May be called twice. While an error is handled, it is over because of it."""
        error = sys.exception()
        if error is not None and not self._over:
            bug = LaunchError(f"{type(error).__name__}: {error}")
            told = error if isinstance(error, LaunchError) else bug
            self.over(told.exit_code, told.message, 0, [])
        self.marks.close()
        self.control.close()
        self.desk.close()
        if self._feed is not None:
            self._feed.close(self.hurry)
        self.journal.close()

    def _export(self, spec: PodSpec) -> None:
        from fleetrun.exporters.feed import Feed  # late: most launches export nothing

        def warn(text: str) -> None:
            self._console.warning(printable(text))

        self._feed = Feed(self._loop, self.companions, self.desk, self._console.info, warn)
        self._feed.open(self.settings, spec)
        self.journal.listen(self._feed.event)
