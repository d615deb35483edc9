"""From settings to the pod that would run on this machine: the program, devices and ports are checked, then
commands, environments and files of all processes are made. Starts nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

from fleetrun import files
from fleetrun.envs import contract
from fleetrun.envs.channels import NOTICE_VARIABLE, PROGRESS_VARIABLE
from fleetrun.envs.contract import TOKEN, Member, Role, token_flaw
from fleetrun.envs.settings.options import LaunchSettings, Resolved, RoleSettings
from fleetrun.errors import LaunchError, ScriptNotExecutableError, ScriptNotFoundError, UsageError, similar
from fleetrun.host import devices
from fleetrun.host.network import Ports, is_this_host
from fleetrun.plan import topology
from fleetrun.plan.site import Site
from fleetrun.plan.topology import Host, Offer, offer
from fleetrun.pod.logs import log_path
from fleetrun.pod.spec import ContainerSpec, JobSpec, PodSpec
from fleetrun.values import replace

# ---- From members to what would run: commands, environments and files

_RESTARTS = ("PADDLE_RESTART_COUNT",)
_RESTARTS_TORCH = (*_RESTARTS, "TORCHELASTIC_RESTART_COUNT")


def process_command(settings: LaunchSettings, role: Role = Role.TRAINER) -> tuple[str, ...]:
    """What the processes of a role run. Python scripts and modules run under this Python, unbuffered;
    anything else is a program of its own.
    """
    own = settings.role_settings(role)
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
            omp_threads=_omp_threads(settings.role_settings(member.role), threads),
        )
        log = log_path(log_dir, settings.job_id, pod, member.role, member.local_rank)
        env = {
            **base,
            **dict(settings.role_settings(member.role).environment),
            PROGRESS_VARIABLE: str(progress),
        }
        containers.append(_container_spec(placed, process_command(settings, member.role), log, env))
    return PodSpec(
        name=pod,
        job_id=settings.job_id,
        mode=settings.run_mode,
        containers=tuple(containers),
        log_dir=log_dir,
        pre_hook=_pre_hook(settings, log_dir, pod, base),
    )


def _omp_threads(wish: RoleSettings, share: int | None) -> int | None:
    """OMP_NUM_THREADS of a process: what the job file says, for those that compute their share of the
    cores.
    """
    if wish.threads is not None:
        return wish.threads
    computes = wish.role in (Role.TRAINER, Role.EVALUATOR)
    return share if computes and "OMP_NUM_THREADS" not in dict(wish.environment) else None


def _container_spec(
    member: Member, argv: tuple[str, ...], log: Path, base: Mapping[str, str]
) -> ContainerSpec:
    """One process; its files stand beside its log."""
    error_file, notice_file = log.with_suffix(".error.json"), log.with_suffix(".notice.json")
    env = contract.write(replace(member, error_file=str(error_file)))
    long = {name: value for name, value in env.items() if len(value) > contract.LONGEST_VALUE}
    long_file = log.with_suffix(".long.json") if long else None
    if long_file is not None:
        env = {name: value for name, value in env.items() if name not in long}
        env[contract.LONG_VALUES_VARIABLE] = str(long_file)
    return ContainerSpec(
        role=member.role,
        rank=member.rank,
        index=member.local_rank,
        argv=argv,
        env={**base, **env, NOTICE_VARIABLE: str(notice_file)},
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


# ---- Checks of the script, before anything starts


def check_python_script(script: str) -> None:
    """Raises ScriptNotFoundError (exit code 127) or ScriptNotExecutableError (126)."""
    path = Path(script)
    if path.is_dir():
        raise ScriptNotExecutableError(f"{script} is a directory, not a script")
    if not path.exists():
        raise ScriptNotFoundError(f"there is no script {script}", hint=_nearby(path))
    if not os.access(path, os.R_OK):
        raise ScriptNotExecutableError(f"{script} cannot be read: permission denied")


def check_module(module: str) -> None:
    """Looks for the top-level package only: finding more would mean importing it."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    top = module.partition(".")[0]
    here = str(Path.cwd())  # not ".": Python remembers what that was
    if not top.isidentifier() or top == "__main__":
        raise ScriptNotFoundError(
            f"-m {module}: that is not the name of a module", hint="Without -m it is a file."
        )
    if PathFinder.find_spec(top, [here]) is None and find_spec(top) is None:
        raise ScriptNotFoundError(
            f"there is no module {top}", hint="Modules are looked for from the current directory."
        )


def check_executable(program: str, path_variable: str) -> None:
    """`program` as it will be started: with a slash a file, without one a name on PATH."""
    if "/" in program:
        path = Path(program)
        if path.is_dir():
            raise ScriptNotExecutableError(f"{program} is a directory, not a program")
        if not path.exists():
            raise ScriptNotFoundError(f"there is no program {program}", hint=_nearby(path))
        if not os.access(path, os.X_OK):
            raise ScriptNotExecutableError(
                f"{program} is not executable",
                hint=f"Try `chmod +x {program}`; Python scripts need a name in .py.",
            )
        return
    if not any(os.access(Path(folder or ".") / program, os.X_OK) for folder in path_variable.split(":")):
        raise ScriptNotFoundError(f"there is no program {program} on PATH, and no file of that name here")


def _nearby(path: Path) -> str | None:
    """A file of that folder with almost that name."""
    try:
        names = [each.name for each in path.parent.iterdir() if each.is_file()]
    except OSError:
        return None
    near = similar(path.name, names, cutoff=0.75)
    return f"Did you mean {path.parent / near[0]}?" if near else None


# ---- Checks of this machine: program, devices, ports


def check_program(settings: LaunchSettings) -> None:
    """Raises LaunchError for a script, module or program that cannot be run."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "the current directory does not exist any more", hint="Try `cd .` or another."
        ) from None
    search = dict(settings.environment).get("PATH", os.environ.get("PATH", os.defpath))
    for argv in dict.fromkeys(process_command(settings, role) for role in _roles(settings)):
        if argv[:3] == (sys.executable, "-u", "-m"):
            check_module(argv[3])
        elif argv[:2] == (sys.executable, "-u"):
            check_python_script(argv[2])
        else:
            check_executable(argv[0], search)


def _roles(settings: LaunchSettings) -> list[Role]:
    """Those that may have processes here, trainers first."""
    servers = [Role.SERVER] if settings.run_mode.has_servers else []
    return [Role.TRAINER, *servers, *(wish.role for wish in settings.roles)]


def take_token(
    settings: LaunchSettings, environ: MutableMapping[str, str], warn: Callable[[str], None]
) -> None:
    """The job's secret out of --token_file into the environment, where the processes of the job look for it.

    Raises UsageError for a file that cannot be read, or holds no secret.
    """
    if settings.token_file is not None:
        try:
            path = Path(settings.token_file)
            token = path.read_text().strip()
            if path.stat().st_mode & 0o077:
                warn(f"--token_file {path}: other users can read it; `chmod 600` it")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UsageError(f"--token_file {settings.token_file} cannot be read: {why}") from None
        environ[TOKEN] = token
        if not token:
            raise UsageError(f"--token_file {settings.token_file} is empty")
    source = TOKEN if settings.token_file is None else f"--token_file {settings.token_file}"
    flaw = token_flaw(environ[TOKEN], source) if environ.get(TOKEN) else None
    if flaw is not None:
        raise UsageError(flaw)


def host_of(resolved: Resolved, site: Site, warn: Callable[[str], None], environ: Mapping[str, str]) -> Host:
    """This machine. Raises UsageError for addresses that are another's, and devices that are not there."""
    settings = resolved.settings
    named = [site.address] if site.alone else []
    if settings.master_addr and (site.alone or site.rank == 0):
        named.append(settings.master_addr)
    for host in (*named, *(site.machines if site.alone else ())):
        if not is_this_host(host):
            raise UsageError(
                f"{host} is not an address of this machine",
                hint="--nnodes and --master, or --ips, start a job on several machines.",
            )
    found = devices.detect(settings.device_kind, environ)
    if settings.devices and not found.ids:
        warn(
            f"{resolved.origins['devices']} {','.join(settings.devices)}: "
            f"there is no {settings.device_kind.upper()} here; "
            "computing on CPUs (Gloo)"
        )
    return Host(
        address=site.address,
        devices=devices.choose(settings.devices, found) if found.ids else (),
        device_kind=settings.device_kind,
        wanted_devices=len(settings.devices),
        cores=len(os.sched_getaffinity(0)),
        evaluator_devices=evaluator_devices(settings, found, warn),
        hosts=site.hosts,
    )


def evaluator_devices(
    settings: LaunchSettings, found: devices.Devices, warn: Callable[[str], None]
) -> tuple[str, ...]:
    """The devices that the job file names for evaluators."""
    wish = settings.role_settings(Role.EVALUATOR)
    if wish.devices and not found.ids:
        kind = settings.device_kind.upper()
        warn(f"{wish.where}: roles.evaluator: there is no {kind} here; evaluators compute on CPUs")
    if not wish.devices or not found.ids:
        return ()
    return devices.choose(wish.devices, found, f"{wish.where}: roles.evaluator.resources.devices")


def offer_of(settings: LaunchSettings, host: Host, ports: Ports) -> Offer:
    """What this machine brings; its ports are reserved. Raises PortError."""
    return offer(settings, host, lambda port: ports.any() if port is None else ports.fixed(port))


def pod_name() -> str:
    return "".join(chr(ord("a") + byte % 26) for byte in os.urandom(6))


def spec_of(
    settings: LaunchSettings,
    host: Host,
    offers: Sequence[Offer],
    node_rank: int,
    *,
    pod: str,
    environ: Mapping[str, str],
) -> PodSpec:
    """What would run on this machine, rank `node_rank` of those that make these offers."""
    members = topology.build(settings, host, offers, node_rank)
    return pod_spec(settings, members, pod=pod, cores=host.cores, environ=environ)


def check_followed(resolved: Resolved, spec: PodSpec) -> None:
    """Raises UsageError for a process that --follow names and that there is not."""
    settings, origin = resolved.settings, resolved.origins.get("follow", "--follow")
    origin = origin if origin.startswith("-") else f"{origin}: follow"
    if {role for role, _ in settings.follow} == set(Role):  # all
        return
    for role, numbers in settings.follow:
        there = [each.index for each in spec.containers if each.role is role]
        if role is Role.EVALUATOR:  # perhaps on another machine of the job
            there = list(range(settings.role_settings(role).count))
        missing = [number for number in numbers or there[:1] or (0,) if number not in there]
        if missing and not (role is Role.TRAINER and not there and numbers == (0,)):
            have = f"there are {role}:0 to {role}:{len(there) - 1}" if there else f"this job has no {role}"
            raise UsageError(f"{origin} {role}:{missing[0]}: there is no such process; {have}")


def print_plan(settings: LaunchSettings, spec: PodSpec) -> None:
    """Raises LaunchError when it cannot be written."""
    from fleetrun.console import dry_run  # late: only --dry_run prints one

    text = (
        dry_run.plan_as_json(spec, os.environ)
        if settings.json
        else "\n".join(dry_run.plan_as_text(spec, os.environ))
    )
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LaunchError(f"the plan could not be written: {error.strerror}") from None
