"""The supervisor's observer that writes everything down. Decides nothing."""

from __future__ import annotations

from fleetrun.pod.container import Container, Ended
from fleetrun.pod.restarts import Restart
from fleetrun.pod.result import Failure
from fleetrun.record.journal import Journal


class Recorder:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def started(self, containers: list[Container]) -> None:
        for each in containers:
            if each.process is not None:
                self._journal.write(
                    "started", container=each.spec.name, pid=each.process.pid, attempt=each.restarts
                )

    def exited(self, ended: Ended) -> None:
        self._journal.write(
            "exited",
            container=ended.spec.name,
            pid=ended.pid,
            code=ended.exit.code,
            how=str(ended.exit),
            asked=ended.asked,
            attempt=ended.attempt,
        )

    def failed(self, failure: Failure) -> None:
        decision = failure.decision
        again = isinstance(decision, Restart)
        self._journal.write(
            "failed",
            container=failure.ended.spec.name,
            restart=again,
            after=decision.after if isinstance(decision, Restart) else None,
            reason="" if isinstance(decision, Restart) else decision.reason,
        )

    def restarting(self, containers: list[Container]) -> None:
        self._journal.write("restarting", containers=[each.spec.name for each in containers])

    def leaving(self, rest: list[Container]) -> None:
        self._journal.write("leaving", containers=[each.spec.name for each in rest])

    def ending(self, why: str) -> None:
        self._journal.write("ending", reason=why)
