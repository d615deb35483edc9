"""How a job stands on this machine, as a launcher answers who asks. Told by the supervisor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fleetrun.envs.contract import Role
from fleetrun.pod.container import Container, Ended
from fleetrun.pod.pod import Pod
from fleetrun.pod.restarts import Restart
from fleetrun.pod.result import Failure, Hang
from fleetrun.values import dataclass

if TYPE_CHECKING:
    from fleetrun.progress.reports import Report

VERSION = 1
"""Of the answer. A later one may have more fields, and has all of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What does not change while a launcher runs. `started` is seconds since the epoch."""

    job: str
    pod: str
    mode: str
    log_dir: Path
    cwd: str
    max_restart: int
    started: float
    pid: int
    guard: int


class Reports(Protocol):
    """Where the reports of processes arrive; containers go by their names (`trainer.0`)."""

    def latest(self, container: str, /) -> Report | None: ...
    def rate(self, container: str, /) -> float | None: ...


class Board:
    """An observer of the supervisor, over all pods of a launch."""

    def __init__(
        self,
        facts: JobFacts,
        reports: Reports | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.facts = facts
        self._reports = reports
        self._clock = clock
        self._wall = wall
        self._began = clock()
        self._state = "meeting"
        self._why = ""
        self._restarts = 0
        self._nodes: list[dict[str, Any]] = []
        self._waiting: dict[str, Any] | None = None
        self._pod: Pod | None = None
        self._started: dict[str, float] = {}
        self._ended: dict[str, Ended] = {}

    # ---- what it is told

    def plays(self, pod: Pod, restarts: int) -> None:
        """This pod is next, after so many restarts."""
        self._pod, self._restarts = pod, restarts
        self._state, self._why = "starting", ""

    def waiting(self, present: int, wanted: int, missing: Sequence[str]) -> None:
        """The machines of the job meet."""
        self._waiting = {"present": present, "wanted": wanted, "missing": list(missing)}
        self._state = "meeting"

    def met(self, titles: Sequence[str], rank: int) -> None:
        """The machines of this round, in the order of their ranks; `rank` is this one's."""
        self._waiting = None
        self._nodes = [
            {"rank": number, "title": title, "this": number == rank} for number, title in enumerate(titles)
        ]

    def started(self, containers: list[Container]) -> None:
        self._state = "running"
        self._started.update((each.spec.name, self._wall()) for each in containers)

    def exited(self, ended: Ended) -> None:
        self._ended[ended.spec.name] = ended

    def failed(self, failure: Failure) -> None:
        if failure.beside:
            return
        if isinstance(failure.decision, Restart):
            self._restarts += 1
            self._state = "restarting"
        else:
            self._ending(str(failure.ended.exit))

    def hung(self, hang: Hang) -> None:
        if isinstance(hang.decision, Restart):
            self._restarts += 1
            self._state = "restarting"
        else:
            self._ending(hang.headline)

    def restarting(self, containers: list[Container]) -> None:
        if any(each.spec.role is not Role.EVALUATOR for each in containers):
            self._state = "restarting"

    def leaving(self, rest: list[Container]) -> None:
        self._state = "leaving"

    def ending(self, why: str) -> None:
        self._ending(why)

    def _ending(self, why: str) -> None:
        self._state, self._why = "ending", why

    def stopping(self, why: str, restart: bool) -> None:
        """The pod of this machine, for what happened on one of the job's."""
        self._state, self._why = "restarting" if restart else "ending", why

    # ---- what it tells

    @property
    def nodes(self) -> int:
        """How many machines have met."""
        return len(self._nodes)

    def status(self) -> dict[str, Any]:
        """The answer to `status`; see docs/monitoring-a-job.md."""
        facts = self.facts
        return {
            "version": VERSION,
            "job": facts.job,
            "pod": facts.pod,
            "mode": facts.mode,
            "pid": facts.pid,
            "guard": facts.guard,
            "log_dir": str(facts.log_dir),
            "cwd": facts.cwd,
            "started": facts.started,
            "elapsed": round(self._clock() - self._began, 3),
            "state": self._state,
            "why": self._why,
            "restarts": self._restarts,
            "max_restart": facts.max_restart,
            "nodes": self._nodes,
            "waiting": self._waiting,
            "containers": [self._container(each) for each in self._shown()],
        }

    def _shown(self) -> list[Container]:
        if self._pod is None:
            return []
        hook = self._pod.hook
        return [*self._pod.containers, *([hook] if hook is not None and hook.alive else [])]

    def _container(self, container: Container) -> dict[str, Any]:
        spec, name = container.spec, container.spec.name
        process = container.process
        alive = process is not None and process.exit is None
        ended = None if alive else self._ended.get(name)
        return {
            "name": name,
            "role": spec.label or str(spec.role),
            "rank": spec.rank,
            "index": spec.index,
            "state": str(container.status),
            "alive": alive,
            "pid": process.pid if process is not None and alive else None,
            "attempt": container.restarts,
            "started": self._started.get(name),
            "log": str(spec.log),
            "gpus": _gpus(spec.env),
            "ended": None if ended is None else ended.ended,
            "exit": None if ended is None else ended.exit.code,
            **self._progress(name if alive else ""),
        }

    def _progress(self, name: str) -> dict[str, Any]:
        report = self._reports.latest(name) if self._reports is not None and name else None
        activity = None if report is None else report.activity
        return {
            "step": None if report is None else report.step,
            "samples": None if report is None else report.samples,
            "loss": None if report is None else report.loss,
            "rate": None if self._reports is None or not name else self._reports.rate(name),
            "activity": activity and {"what": activity.what, "done": activity.done, "of": activity.of},
        }


def _gpus(env: Mapping[str, str]) -> str:
    """Those of a process, as the machine calls them: it counts its own among those that it sees."""
    seen = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    own = env.get("FLAGS_selected_gpus", "").split(",")
    return ",".join(seen[int(each)] for each in own if each.isdecimal() and int(each) < len(seen))


def facts_of_launch(job: str, pod: str, mode: str, log_dir: Path, max_restart: int) -> JobFacts:
    """For a launch that this process begins."""
    return JobFacts(
        job=job,
        pod=pod,
        mode=mode,
        log_dir=log_dir,
        cwd=str(Path.cwd()),
        max_restart=max_restart,
        started=round(time.time(), 3),
        pid=os.getpid(),
        guard=os.getppid(),
    )
