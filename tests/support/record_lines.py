"""Lines of a record, as a launch writes them, for the status of a job."""

from __future__ import annotations

from fleetrun.control.server import JobStatus
from fleetrun.launcher.facts import container_fields
from fleetrun.pod.container import Pod
from fleetrun.pod.events import PodEvent, record_lines


def line(status: JobStatus, event: str, **fields: object) -> None:
    status.handle({"time": status._clock(), "event": event, **fields})


def happened(status: JobStatus, event: PodEvent) -> None:
    for name, fields in record_lines(event):
        line(status, name, **fields)


def set_pod(status: JobStatus, pod: Pod, restarts: int = 0) -> None:
    status.set_pod(pod)
    line(status, "ready", attempt=0, restarts=restarts, containers=container_fields(pod.spec))


def waits(
    status: JobStatus, present: int, wanted: int, missing: list[str], left: float | None = None, **how: bool
) -> None:
    until = None if left is None else status._clock() + left
    fields = {"present": present, "wanted": wanted, "missing": missing, "until": until, "spare": False, **how}
    line(status, "waiting", **fields)


def met(status: JobStatus, titles: list[str], rank: int) -> None:
    line(status, "node", nodes=titles, rank=rank)
