"""The lines at the start of a launch, as in Paddle's documents: the configuration and, for debugging, the
environments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fleetrun.console.secrets import masked
from fleetrun.envs.contract import OWNED, OWNED_PREFIXES, Role
from fleetrun.pod.spec import ContainerSpec, JobSpec, PodSpec

_TABLE_WIDTH = 89


def configuration(rows: Sequence[tuple[str, str, str | None]], *, rule: int = 50) -> list[str]:
    """One line per setting; what is not a default says where it comes from. `rule`: width of the rules."""
    lines = ["-----------  Configuration  ----------------------"[:rule]]
    lines += [f"{name}: {value}" + (f"  (from {origin})" if origin else "") for name, value, origin in rows]
    lines.append("-" * rule)
    return lines


def job_line(job: JobSpec) -> str:
    span = f"{job.replicas}[{job.replicas_min}:{job.replicas_max}]"
    return f"Job: {job.job_id}, mode {job.mode}, replicas {span}, elastic {job.elastic}"


def pod_line(verb: str, spec: PodSpec, status: str) -> str:
    return f"{verb} Pod: {spec.name}, replicas {spec.replicas}, status {status}"


def environments(spec: PodSpec) -> list[str]:
    """A table for the first container of each role, as Paddle's launcher prints it."""
    lines: list[str] = []
    for role in Role:
        group = [each for each in spec.containers if each.role is role]
        if group:
            lines += [
                f"Local {role} start {len(group)} processes. "
                "First process distributed environment info (Only For Debug):",
                *_table(_contract_of(group[0])),
                "",
            ]
    return lines


def _contract_of(spec: ContainerSpec) -> dict[str, str]:
    shown = {
        name: value
        for name, value in spec.env.items()
        if name in OWNED or name.startswith(OWNED_PREFIXES) or name in _ALSO
    }
    return masked(dict(sorted(shown.items())))


_ALSO = frozenset(
    {"CUDA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "OMP_NUM_THREADS"}
)


def _table(rows: Mapping[str, str]) -> list[str]:
    inner = _TABLE_WIDTH - 2
    rule = "    +" + "=" * inner + "+"
    lines = [
        rule,
        "    |" + f"{'Distributed Envs':>40}{'Value':^{inner - 40}}" + "|",
        "    +" + "-" * inner + "+",
    ]
    for name, value in rows.items():
        room = inner - 42
        shown = value if len(value) <= room else f"... {value[-(room - 4) :]}"
        lines.append("    |" + f"{name:>40}  {shown:^{room}}" + "|")
    return [*lines, rule]
