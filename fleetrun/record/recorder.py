"""The supervisor's observer that writes everything down. Decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleetrun.pod.restarts import GiveUp, Restart
from fleetrun.record.journal import Journal

if TYPE_CHECKING:  # commands that read a record import this file, and start no process
    from fleetrun.pod.container import Container, Ended
    from fleetrun.pod.result import Failure, Hang


class Recorder:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def started(self, containers: list[Container]) -> None:
        for each in containers:
            if each.process is not None:
                self._journal.write(
                    "started",
                    container=each.spec.name,
                    rank=each.spec.rank,
                    pid=each.process.pid,
                    attempt=each.restarts,
                )

    def exited(self, ended: Ended) -> None:
        record = ended.record
        self._journal.write(
            "exited",
            container=ended.spec.name,
            rank=ended.spec.rank,
            pid=ended.pid,
            attempt=ended.attempt,
            code=ended.exit.code,
            signal=ended.exit.signal,
            how=str(ended.exit),
            seconds=round(ended.ended - ended.started, 3),
            asked=ended.asked,
            out_of_memory=ended.out_of_memory,
            error=record.message[:2000] if record is not None else "",
        )

    def failed(self, failure: Failure) -> None:
        decision = failure.decision
        self._journal.write(
            "failed",
            container=failure.ended.spec.name,
            rank=failure.ended.spec.rank,
            attempt=failure.ended.attempt,
            beside=failure.beside,
            **_restart(decision),
            reason="" if isinstance(decision, Restart) else decision.reason,
        )

    def hung(self, hang: Hang) -> None:
        decision = hang.decision
        self._journal.write(
            "hung",
            containers=[each.name for each in hang.containers],
            silent_for=hang.silent_for,
            stacks=list(hang.stacks),
            **_restart(decision),
            reason=hang.reason,
        )

    def restarting(self, containers: list[Container]) -> None:
        self._journal.write("restarting", containers=[each.spec.name for each in containers])

    def leaving(self, rest: list[Container]) -> None:
        self._journal.write("leaving", containers=[each.spec.name for each in rest])

    def ending(self, why: str) -> None:
        self._journal.write("ending", reason=why)


def _restart(decision: Restart | GiveUp) -> dict[str, Any]:
    if isinstance(decision, GiveUp):
        return {"restart": False, "after": None, "number": None, "limit": None}
    return {"restart": True, "after": decision.after, "number": decision.number, "limit": decision.limit}
