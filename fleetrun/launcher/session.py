"""Hold everything around the pods of one launch on this node: event log, control socket, progress socket, and
the parts for the options. Decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fleetrun import files
from fleetrun.aliases import Document
from fleetrun.console.narrator import Narrator, logs_pattern, progress_facts, restarts_in_words
from fleetrun.console.text import describe_duration, format_speed
from fleetrun.control.server import Control
from fleetrun.envs.channels import error_file, write_error
from fleetrun.envs.contract import Role
from fleetrun.errors import LaunchError
from fleetrun.launcher.facts import container_fields, launch_fields, logs_of
from fleetrun.launcher.parts import PARTS, End, Event, Launch, Part, Reach
from fleetrun.launcher.ranks import Ranks
from fleetrun.pod.container import Pod
from fleetrun.pod.events import record_lines
from fleetrun.pod.spec import PodSpec

if TYPE_CHECKING:
    from fleetrun.launcher.notices import Notices
    from fleetrun.launcher.warm import Warm


def _report_to_parent(report: Sequence[str]) -> None:
    """Write the error file that a parent launcher has named, as torchrun does."""
    path = error_file(os.environ)
    headlines = (line for line in report if line.startswith(("Cause: ", "First failure: ", "Hang: ")))
    if path:
        text = write_error(next(headlines, report[0]), "\n".join(report), time.time_ns())
        with contextlib.suppress(OSError):
            Path(path).write_text(text, encoding="utf-8")


class LaunchSession(Launch):
    """The session of one launch: made before the first pod, and closed after the last."""

    _parts: Mapping[str, Part] = {}
    _narrator: Narrator | None = None
    _control: Control | None = None
    _pod: Pod | None = None
    _over = False

    def open(self, reach: Reach, *more: Part) -> None:
        """Open the session before the first process of the first pod starts. `more`: parts besides `PARTS`.

        Raises LaunchError if a part cannot start.
        """
        if (problem := self.progress.open()) is not None:
            show = self.console.debug if self.settings.hang_timeout is None else self.warn
            show(
                f"scripts cannot report progress: {problem}. --hang_timeout counts only output as "
                "activity. Set XDG_RUNTIME_DIR to a directory of this user"
            )
        if (problem := self.memory.open()) is not None:
            self.console.debug(f"scripts cannot keep checkpoints in memory: {problem}")
        self._parts = parts = {type(part).__name__: part for part in more}
        for name, wanted in PARTS.items():
            if wanted(self.settings):
                made = getattr(import_module(f"fleetrun.launcher.{name}"), name.title())
                parts[name] = part = made(self, reach)
                self.journal.subscribe(part.noted)
        self.journal.write("launch", **launch_fields(self.resolved, self.spec, os.environ))
        self._control = Control(
            self.loop,
            self.status,
            self.interrupts.stop,
            self.interrupts.restart,
            self.console.info,
            reach.others,
            self.ranks.why,
        )
        self._control.open(self.runtime, (self.progress.renew, self.memory.renew))
        self.show_status()

    @property
    def ranks(self) -> Ranks:
        return cast("Ranks", self._parts["ranks"])

    @property
    def notices(self) -> Notices | None:
        """The notifications of --notify, or None if this node sends none. With several nodes, one node sends
        them.
        """
        return cast("Notices | None", self._parts.get("notices"))

    @property
    def warm(self) -> Warm | None:
        return cast("Warm | None", self._parts.get("warm"))

    def set_store(self, address: Document, url: str) -> None:
        """Set the address of the store, for commands that look for the nodes of this job.

        `address` includes secrets, and serves commands of this user on this node. `url` serves commands on
        other hosts.
        """
        assert self._control is not None
        self._control.address = address
        self.status.launch["url"] = url

    def publish(self, event: Event) -> None:
        """Pass an event to all receivers. The order matters: the console comes first, and the last progress
        report of a process is recorded before its exit.
        """
        if self._narrator is not None:
            self._narrator.handle(event)
        self.progress.handle(event)
        for name, fields in record_lines(event):
            self.journal.write(name, **fields)
        for part in self._parts.values():
            part.handle(event)

    def set_pod(self, pod: Pod, restarts: int, narrator: Narrator) -> None:
        """Prepare for the next pod, after this many restarts."""
        self._pod, self._narrator = pod, narrator
        self.status.set_pod(pod)
        self.progress.pod(pod.spec)
        for part in self._parts.values():
            part.set_pod(pod, restarts)
        self.journal.write(
            "ready",
            attempt=max((each.restarts for each in pod.containers), default=0),
            restarts=restarts,
            containers=container_fields(pod.spec),
        )
        self.marks.start(logs_of(pod.spec))

    def summary(self, spec: PodSpec, restarts: int = 0) -> str:
        """Summarize a job that completed or was stopped on this node."""
        return f"{self.reached(spec, restarts)}; logs: {logs_pattern(spec, self.settings.log_dir)}"

    def reached(self, spec: PodSpec, restarts: int = 0) -> str:
        """Return `12m34s, 800 steps, loss 0.21, 1 restart`."""
        progress = self.progress
        progress.settle()
        names = [each.name for each in spec.containers if each.role is Role.TRAINER]
        reports = [report for name in names if (report := progress.latest(name)) is not None]
        rates, paces = zip(*map(progress.averages, names), strict=True) if names else ((), ())
        speed = format_speed(rates, min(filter(None, paces), default=None))
        facts = [
            describe_duration(self.status.elapsed),
            *progress_facts([(each.step, each.loss) for each in reports], speed),
            *([restarts_in_words(restarts)] if restarts else []),
        ]
        return ", ".join(facts)

    def over(self, end: End) -> None:
        """Record and report the end of the job on this node."""
        self._over = True
        self.marks.close()
        self.progress.settle()
        reached = self.reached(self._pod.spec, end.restarts) if self._pod is not None else ""
        self.journal.write(
            "over",
            code=end.code,
            reason=end.reason,
            restarts=end.restarts,
            report=end.report,
            container=end.first.name if end.first is not None else None,
            rank=end.first.rank if end.first is not None else None,
            goodput=self.status.goodput_fields(),
            reached=reached,
        )
        if end.code and end.report:
            _report_to_parent(end.report)
        for part in self._parts.values():
            part.over(end, reached)

    def close(self) -> None:
        """Close the session after the last process. You may call it twice. If an exception is being handled,
        the event log gets it as the reason.
        """
        error = sys.exception()
        if error is not None and not self._over:
            bug = LaunchError(f"{type(error).__name__}: {error}")
            reported = error if isinstance(error, LaunchError) else bug
            self.over(End(code=reported.exit_code, reason=reported.message))
        self.marks.close()
        if self._control is not None:
            self._control.close()
        self.progress.close()
        self.memory.close()
        files.remove_probe_sockets(self.runtime, self.spec.name)
        for part in self._parts.values():
            part.close(self.interrupts.urgent)
        self.journal.close()
