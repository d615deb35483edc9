"""Find the positions of the ranks of a job: for `fleetrun why`, for reports, and for the watches. The watches
warn about a job that makes no progress, or end it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fleetrun.aliases import Callback, Strings
from fleetrun.console.text import printable
from fleetrun.envs.channels import BREAKPOINT
from fleetrun.envs.contract import Mode, Role
from fleetrun.launcher.parts import Event, Launch, Part, Reach
from fleetrun.pod.container import Container, Ended, Pod
from fleetrun.pod.events import (
    Detail,
    Findings,
    Late,
    Restarting,
    Verdict,
    lateness_fields,
    verdict_fields,
)
from fleetrun.pod.policy import is_symptom

if TYPE_CHECKING:
    from fleetrun.envs.progress_report import Report
    from fleetrun.pod.hangs import HangWatch, PodWatch
    from fleetrun.stacks.helper import State

_SILENT = 3.0  # seconds of silence after which a stopped job may be a job without progress


class Ranks(Part):
    """A part of every launch."""

    def __init__(self, launch: Launch, reach: Reach) -> None:
        self._launch = launch
        self._settings = launch.settings
        self._loop = launch.loop
        self._status = launch.status
        self._ask = reach.ask
        self._pod: Pod | None = None
        self._hangs: HangWatch | None = None
        self._watches: list[PodWatch] = []
        self._activities: dict[str, str] = {}
        launch.progress.subscribe(self._note_breakpoint)

    def set_pod(self, pod: Pod, restarts: int) -> None:
        self._pod = pod
        self._activities.clear()
        if not self._watches and self._has_ranks(pod.containers):
            # One node is enough for the warnings of the whole job: the node of the job's first trainer.
            first = any(each.spec.role is Role.TRAINER and each.spec.rank == 0 for each in pod.containers)
            self._watches = self._watches_of_ranks(first)

    def handle(self, event: Event) -> None:
        if isinstance(event, Restarting):
            for each in event.containers:
                self._activities.pop(each.spec.name, None)
        for watch in self._watches:
            watch.handle(event)

    def close(self, urgent: int) -> None:
        for watch in self._watches:
            watch.close()

    def _note_breakpoint(self, container: str, report: Report) -> None:
        """Print how to attach to a process that waits for a debugger."""
        what = report.activity.what if report.activity is not None else ""
        if what.startswith(BREAKPOINT) and what != self._activities.get(container):
            self._launch.warn(f"{report.role} {report.rank} {what}")
        self._activities[container] = what

    def _watches_of_ranks(self, first: bool) -> list[PodWatch]:
        """Make the watches. The node of the `first` trainer watches the whole job."""
        from fleetrun.pod.hangs import AloneWatch, LateWatch, WaitWatch  # late: one process needs no watch

        watches: list[PodWatch] = []
        if first:
            probes = partial(self._find, detail=Detail.PROBES)
            report = partial(self._warn_of, normal=True)
            watches.append(WaitWatch(self._loop, self._find, report, self._is_busy))
            watches.append(LateWatch(self._loop, probes, self._note_lateness, self._warn_of))
        hangs, limit = self.hangs(), self._settings.hang_timeout
        if hangs is not None and limit is not None:
            watches.append(AloneWatch(self._loop, limit, self._find, hangs.one_hangs, self._is_busy))
        for watch in watches:
            self._launch.progress.subscribe(watch.count_report)
        return watches

    def _is_busy(self, container: str) -> bool:
        report = self._launch.progress.latest(container)
        return report is not None and report.activity is not None

    def _has_ranks(self, here: Sequence[object]) -> bool:
        """Return True if the job has several ranks, and probes that report what the ranks wait for."""
        several = len(here) > 1 or self._ask is not None
        mode = self._settings.run_mode
        return several and (mode is Mode.COLLECTIVE or mode.has_servers) and self._settings.probe == "on"

    def _find(
        self,
        containers: Sequence[Container],
        then: Callable[[Findings], None],
        detail: Detail = Detail.OUTSIDE,
    ) -> Callback:
        """Find the positions of all ranks, here and on the other nodes."""
        from fleetrun.stacks.helper import Finder, quick_taker  # late: few jobs need it

        taker = quick_taker(self._loop, self._launch.companions, detail)
        return Finder(taker, self._ask, detail).begin(containers, then)

    def _note_lateness(self, late: tuple[Late, ...]) -> None:
        if (fields := lateness_fields(late)) or self._status.late:
            self._launch.journal.write("lateness", late=fields)

    def _warn_of(self, verdict: Verdict, *, normal: bool = False) -> None:
        if any("fleetrun_debug.py" in row for row in verdict.stack):  # a process is debugged, on any node
            return
        report = self._launch.console.info if normal else self._launch.console.warning
        hint = " (normal while a rank evaluates, compiles or reads data)" if normal else ""
        report(printable(f"{verdict.sentence}{hint}; see `fleetrun why`"))
        self._launch.journal.write("verdict", **verdict_fields(verdict))

    def hangs(self) -> HangWatch | None:
        """Return the watch for hangs, the same for all pods. Return None without --hang_timeout."""
        limit = self._settings.hang_timeout
        if self._hangs is None and limit is not None:
            from fleetrun.stacks.helper import watch_for_hangs  # late: most launches do not watch for hangs

            self._hangs = watch_for_hangs(
                self._loop,
                self._launch.companions,
                limit,
                lambda findings: self._launch.console.block(
                    [f"  {printable(line)}" for line in findings.stacks], level="ERROR"
                ),
                self._ask,
            )
            reported = self._hangs.reported
            self._launch.progress.subscribe(lambda container, report: reported(container))
        return self._hangs

    def inspect(
        self, containers: Sequence[Container], ended: Ended | None, then: Callable[[Verdict | None], None]
    ) -> Callback | None:
        """Inspect the ranks, as `Inspect` of a supervisor: after a failure that may follow from another
        rank's failure, and after silence.
        """
        silent, detail = (self._status.silent_for() or 0.0) >= _SILENT, Detail.PROBES
        if ended is not None:
            silent, detail = is_symptom(ended.exit, ended.message), Detail.OUTSIDE
        if not silent or not self._has_ranks(containers):
            return None
        return self._find(containers, lambda findings: then(findings.verdict), detail)

    @property
    def _containers(self) -> Sequence[Container]:
        return self._pod.containers if self._pod is not None else ()

    def why(self, detail: Detail, then: Callable[[Findings], None]) -> None:
        """Find the positions of all ranks, for `fleetrun why` and `bundle`."""
        self._find(self._containers, then, detail)

    def answer(self, most: int, detail: Detail, then: Callable[[bytes], None]) -> None:
        """Answer another node: pass the positions of this node's ranks, or the time of their silence, to
        `then`.
        """
        from fleetrun.stacks.helper import pack_states, quick_taker, with_logs  # late: few jobs need it

        containers = self._containers
        asked, whole = time.time(), detail is Detail.ALL
        if detail is Detail.SIGNS:
            then(pack_states([{"quiet": self._status.silent_for()}], most, asked))
            return

        def taken(lines: Strings, states: list[State]) -> None:
            complete = with_logs(states, containers) if whole else states
            then(pack_states(complete, most, asked))

        quick_taker(self._loop, self._launch.companions, detail, facts=whole).take(containers, taken)
