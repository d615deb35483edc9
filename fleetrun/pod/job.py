"""From members to what would run: commands, environments and files. Pure but for the look at this machine's
Python.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetrun import files
from fleetrun.envs import contract
from fleetrun.envs.contract import Member, Role
from fleetrun.envs.settings.options import LaunchSettings, RoleWish
from fleetrun.pod.logfiles import log_path
from fleetrun.pod.spec import ContainerSpec, JobSpec, PodSpec
from fleetrun.values import replace

_RESTARTS = ("PADDLE_RESTART_COUNT",)
_RESTARTS_TORCH = (*_RESTARTS, "TORCHELASTIC_RESTART_COUNT")


def command(settings: LaunchSettings, role: Role = Role.TRAINER) -> tuple[str, ...]:
    """What the processes of a role run. Python scripts and modules run under this Python, unbuffered;
    anything else is a program of its own.
    """
    own = settings.wish(role)
    script, module, no_python = settings.script, settings.module, settings.no_python
    arguments = settings.script_args if own.args is None else own.args
    if own.script is not None:
        script, module, no_python, arguments = own.script, own.module, own.no_python, own.args or ()
    if module:
        return (sys.executable, "-u", "-m", script, *arguments)
    if script.endswith(".py") and not no_python:
        return (sys.executable, "-u", script, *arguments)
    program = script if "/" in script or not Path(script).is_file() else f"./{script}"
    return (program, *arguments)


def job_spec(settings: LaunchSettings, nnodes: tuple[int, int]) -> JobSpec:
    """`nnodes`: the fewest and the most machines."""
    fewest, most = nnodes
    return JobSpec(
        job_id=settings.job_id,
        mode=settings.run_mode,
        replicas=most,
        replicas_min=fewest,
        replicas_max=most,
    )


def pod_spec(
    settings: LaunchSettings, members: Sequence[Member], *, pod: str, cores: int, environ: Mapping[str, str]
) -> PodSpec:
    """`environ` is the launcher's own; of the contract nothing of it is handed down."""
    base = {**contract.without_contract(environ), **dict(settings.environment)}
    threads = None if "OMP_NUM_THREADS" in base else max(1, cores // _local_trainers(members))
    log_dir = Path(settings.log_dir).absolute()
    progress = files.progress_socket(files.run_folder(environ), pod)
    containers = []
    for member in members:
        placed = replace(
            member,
            pod=pod,
            log_dir=str(log_dir),
            omp_threads=_threads(settings.wish(member.role), threads),
        )
        log = log_path(log_dir, settings.job_id, pod, member.role, member.local_rank)
        env = {**base, **dict(settings.wish(member.role).environment), contract.PROGRESS: str(progress)}
        containers.append(_container(placed, command(settings, member.role), log, env))
    return PodSpec(
        name=pod,
        job_id=settings.job_id,
        mode=settings.run_mode,
        containers=tuple(containers),
        log_dir=log_dir,
        pre_hook=_pre_hook(settings, log_dir, pod, base),
    )


def _threads(wish: RoleWish, share: int | None) -> int | None:
    """OMP_NUM_THREADS of a process: what the job file says, for those that compute their share of the
    cores.
    """
    if wish.threads is not None:
        return wish.threads
    computes = wish.role in (Role.TRAINER, Role.EVALUATOR)
    return share if computes and "OMP_NUM_THREADS" not in dict(wish.environment) else None


def _container(member: Member, argv: tuple[str, ...], log: Path, base: Mapping[str, str]) -> ContainerSpec:
    """One process; its files stand beside its log."""
    error_file, notice_file = log.with_suffix(".error.json"), log.with_suffix(".notice.json")
    env = contract.write(replace(member, error_file=str(error_file)))
    long = {name: value for name, value in env.items() if len(value) > contract.LONGEST}
    long_file = log.with_suffix(".long.json") if long else None
    if long_file is not None:
        env = {name: value for name, value in env.items() if name not in long}
        env[contract.LONG] = str(long_file)
    return ContainerSpec(
        role=member.role,
        rank=member.rank,
        index=member.local_rank,
        argv=argv,
        env={**base, **env, contract.NOTICE: str(notice_file)},
        log=log,
        endpoint=member.endpoint,
        error_file=error_file,
        notice_file=notice_file,
        long_file=long_file,
        long_values=long,
        restart_variables=_RESTARTS_TORCH if member.role is Role.TRAINER else _RESTARTS,
    )


def _local_trainers(members: Sequence[Member]) -> int:
    return max(1, sum(member.role is Role.TRAINER for member in members))


def _pre_hook(
    settings: LaunchSettings, log_dir: Path, pod: str, env: Mapping[str, str]
) -> ContainerSpec | None:
    if settings.elastic_pre_hook is None:
        return None
    import shlex  # late: few jobs have one

    return ContainerSpec(
        role=Role.TRAINER,
        rank=0,
        index=0,
        argv=tuple(shlex.split(settings.elastic_pre_hook)),
        env=env,
        log=log_path(log_dir, settings.job_id, pod, "pre_hook", 0),
        label="pre_hook",
    )
