"""Writes every event of a pod into the record. Apart from `journal`, which commands import that only read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetrun.pod.container import Container, Ended
from fleetrun.pod.events import Ending, Failure, Hang, Leaving, PodEvent, Restarting, Started
from fleetrun.pod.policy import GiveUp, Restart
from fleetrun.record.journal import Journal


class Recorder:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def handle(self, event: PodEvent) -> None:
        match event:
            case Started():
                self._started(event.containers)
            case Ended():
                self._exited(event)
            case Failure():
                self._failed(event)
            case Hang():
                self._hung(event)
            case Restarting():
                self._restarting(event.containers)
            case Leaving():
                self._leaving(event.rest)
            case Ending():
                self._ending(event.reason)

    def _started(self, containers: Sequence[Container]) -> None:
        for each in containers:
            if each.process is not None:
                self._journal.write(
                    "started",
                    container=each.spec.name,
                    rank=each.spec.rank,
                    pid=each.process.pid,
                    attempt=each.restarts,
                )

    def _exited(self, ended: Ended) -> None:
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

    def _failed(self, failure: Failure) -> None:
        decision = failure.decision
        self._journal.write(
            "failed",
            container=failure.ended.spec.name,
            rank=failure.ended.spec.rank,
            attempt=failure.ended.attempt,
            beside=failure.tolerated,
            **_restart_fields(decision),
            reason="" if isinstance(decision, Restart) else decision.reason,
        )

    def _hung(self, hang: Hang) -> None:
        decision = hang.decision
        self._journal.write(
            "hung",
            containers=[each.name for each in hang.containers],
            silent_for=hang.silent_for,
            stacks=list(hang.stacks),
            **_restart_fields(decision),
            reason=hang.reason,
        )

    def _restarting(self, containers: Sequence[Container]) -> None:
        self._journal.write("restarting", containers=[each.spec.name for each in containers])

    def _leaving(self, rest: Sequence[Container]) -> None:
        self._journal.write("leaving", containers=[each.spec.name for each in rest])

    def _ending(self, why: str) -> None:
        self._journal.write("ending", reason=why)


def _restart_fields(decision: Restart | GiveUp) -> dict[str, Any]:
    if isinstance(decision, GiveUp):
        return {"restart": False, "after": None, "number": None, "limit": None}
    return {"restart": True, "after": decision.after, "number": decision.number, "limit": decision.limit}
