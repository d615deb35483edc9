"""Lines as the launcher says them, read back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from fleetrun.aliases import Fields
from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.progress_report import Activity, Report
from fleetrun.exporters import job_state
from fleetrun.exporters.job_state import Line
from fleetrun.launcher.exports import Exports
from fleetrun.launcher.facts import container_fields
from fleetrun.pod.spec import ContainerSpec, PodSpec
from fleetrun.record.journal import plain


def sent(kind: str, **fields: object) -> Line:
    """A message as it arrives."""
    found = job_state.read_message(job_state.message(kind, fields))
    assert found is not None
    return found


def spec(*who: tuple[Role, int]) -> PodSpec:
    """A pod of these roles and ranks."""
    counted: dict[Role, int] = {}
    containers = []
    for role, rank in who:
        index = counted[role] = counted.get(role, -1) + 1
        containers.append(
            ContainerSpec(
                role=role, rank=rank, index=index, argv=("true",), env={}, log=Path(f"{role}.{index}")
            )
        )
    return PodSpec(
        name="abcdef", job_id="ads", mode=Mode.COLLECTIVE, containers=tuple(containers), log_dir=Path("log")
    )


def begin(**how: object) -> Line:
    facts = {"job": "ads", "pod": "abcdef", "mode": "ps", "host": "node1"}
    return sent("begin", facts=facts, exporters=[], **how)


def pod(*ranks: int) -> Line:
    containers = container_fields(spec(*((Role.TRAINER, rank) for rank in ranks or (0, 1))))
    return event("ready", attempt=0, containers=containers)


def event(name: str, **fields: object) -> Line:
    return sent("event", **plain({"event": name, "time": 100.0, **fields}))


def started(container: str = "trainer.0", pid: int = 7, attempt: int = 0) -> Line:
    return event("started", container=container, pid=pid, attempt=attempt)


def exited(container: str = "trainer.0", code: int = 0, asked: int | None = None) -> Line:
    return event("exited", container=container, pid=7, attempt=0, code=code, asked=asked, how="")


def failed(*, restart: bool) -> Line:
    return event("failed", container="trainer.0", beside=False, restart=restart)


def hung() -> Line:
    return event("hung", reason="no trainer printed anything", restart=True)


def report(container: str = "trainer.0", rate: float | None = None, **said: object) -> Line:
    made = Report(pod="abcdef", role="trainer", rank=0, **said)  # type: ignore[arg-type]
    messages: list[tuple[str, Fields]] = []
    exports = SimpleNamespace(
        _speeds=lambda name: (rate, None, None), _send=lambda *message: messages.append(message)
    )
    Exports._report(exports, container, made)  # type: ignore[arg-type]
    ((kind, fields),) = messages
    return sent(kind, **fields)


BUSY = Activity("loading tables", 3.0, 12.0)
