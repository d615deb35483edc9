"""Lines as the launcher says them, read back."""

from __future__ import annotations

from pathlib import Path

from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.progress_report import Activity, Report
from fleetrun.exporters import job_state
from fleetrun.exporters.job_state import Line
from fleetrun.launcher.facts import container_fields
from fleetrun.pod.spec import ContainerSpec, PodSpec


def read(line: bytes | None) -> Line:
    assert line is not None
    found = job_state.read_message(line)
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
    return read(job_state.begin_message(**{"facts": facts, "exporters": [], **how}))


def pod(*ranks: int) -> Line:
    containers = container_fields(spec(*((Role.TRAINER, rank) for rank in ranks or (0, 1))))
    return event("ready", attempt=0, containers=containers)


def event(name: str, **fields: object) -> Line:
    return read(job_state.event_message({"event": name, "time": 100.0, **fields}))


def started(container: str = "trainer.0", pid: int = 7, attempt: int = 0) -> Line:
    return event("started", container=container, pid=pid, attempt=attempt)


def exited(container: str = "trainer.0", code: int = 0, asked: int | None = None) -> Line:
    return event("exited", container=container, pid=7, attempt=0, code=code, asked=asked)


def report(container: str = "trainer.0", rate: float | None = None, **said: object) -> Line:
    made = Report(pod="abcdef", role="trainer", rank=0, **said)  # type: ignore[arg-type]
    return read(job_state.report_message(container, made, rate))


BUSY = Activity("loading tables", 3.0, 12.0)
