"""What has to be known and right before anything starts: the program, this machine's devices, its ports."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path

from fleetrun.envs.contract import TOKEN, Role, token_flaw
from fleetrun.envs.settings.options import LaunchSettings, Resolved
from fleetrun.errors import LaunchError, UsageError
from fleetrun.host import devices
from fleetrun.host.network import Ports, is_this_host
from fleetrun.plan import topology
from fleetrun.plan.site import Site
from fleetrun.plan.topology import Host, Offer, offer
from fleetrun.pod import program
from fleetrun.pod.job import command, pod_spec
from fleetrun.pod.spec import PodSpec


def check_program(settings: LaunchSettings) -> None:
    """Raises LaunchError for a script, module or program that cannot be run."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "the current directory does not exist any more", hint="Try `cd .` or another."
        ) from None
    search = dict(settings.environment).get("PATH", os.environ.get("PATH", os.defpath))
    for argv in dict.fromkeys(command(settings, role) for role in _roles(settings)):
        if argv[:3] == (sys.executable, "-u", "-m"):
            program.check_module(argv[3])
        elif argv[:2] == (sys.executable, "-u"):
            program.check_python_script(argv[2])
        else:
            program.check_program(argv[0], search)


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
    wish = settings.wish(Role.EVALUATOR)
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
            there = list(range(settings.wish(role).count))
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
