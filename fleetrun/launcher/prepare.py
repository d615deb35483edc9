"""Check this node before a launch: its program, its rank, its devices and its ports. Starts nothing."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Collection, MutableMapping
from pathlib import Path

from fleetrun.aliases import Environ, ShowText, Strings
from fleetrun.envs.contract import (
    TOKEN,
    Role,
    is_guessable,
    join_endpoint,
    split_endpoint,
    token_flaw,
)
from fleetrun.envs.settings.options import NOTIFY, LaunchSettings, Resolved, normal
from fleetrun.envs.settings.parsing import EMBEDDED, STORE_PORT, written_notifiers, written_ranks
from fleetrun.errors import LaunchError, ScriptNotExecutableError, ScriptNotFoundError, UsageError, similar
from fleetrun.host import devices, numa
from fleetrun.host.cgroups import Groups
from fleetrun.host.network import (
    LOOPBACK,
    Ports,
    address_of,
    addresses,
    host_addresses,
    is_this_host,
    same_host,
    source_address,
)
from fleetrun.plan.topology import Host, Offer, offer, process_command
from fleetrun.pod.spec import PodSpec
from fleetrun.shadow import Shadow, shadow_of_script
from fleetrun.values import replace

# ---- The directory of the logs


def with_writable_logs(resolved: Resolved, warn: ShowText) -> Resolved:
    """Replace the default log directory with a temporary one if the working directory is read-only. A
    container may run a script in such a directory.
    """
    here = Path(resolved.settings.log_dir)
    if "log_dir" in resolved.origins or here.exists() or os.access(here.parent, os.W_OK):
        return resolved
    import tempfile  # late: few launches need it

    folder = tempfile.mkdtemp(prefix="fleetrun-log-")
    warn(f"this directory is read-only, so the logs are in {folder}; --log_dir chooses another directory")
    return replace(resolved, settings=replace(resolved.settings, log_dir=folder))


def with_debugger(resolved: Resolved, environ: Environ) -> Resolved:
    """Let breakpoints wait if a user is probably at this terminal, unless --debug decides."""
    there = any(map(os.isatty, range(3))) and not environ.get("CI")
    if resolved.settings.debug != "auto" or not there:
        return resolved
    return replace(resolved, settings=replace(resolved.settings, debug="on"))


# ---- Checks of the script, before anything starts


def check_python_script(script: str) -> None:
    """Check that the script can run. Raises ScriptNotFoundError (exit code 127) or ScriptNotExecutableError
    (126).
    """
    path = Path(script)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ScriptNotExecutableError(f"{script} is a directory, not a script")
    if not path.exists():
        raise ScriptNotFoundError(f"the script {script} does not exist", hint=_nearby(path))
    if not os.access(path, os.R_OK):
        raise ScriptNotExecutableError(f"{script} cannot be read: permission denied")


def check_module(module: str) -> None:
    """Check that the top-level package of the module exists. A complete check would import the package."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    top = module.partition(".")[0]
    here = str(Path.cwd())  # an absolute path, because Python caches the meaning of "."
    if not top.isidentifier() or top == "__main__":
        raise ScriptNotFoundError(
            f"-m {module}: this is not the name of a module", hint="Without -m, SCRIPT is a file."
        )
    if PathFinder.find_spec(top, [here]) is None and find_spec(top) is None:
        raise ScriptNotFoundError(
            f"the module {top} does not exist",
            hint="fleetrun searches for modules from the current directory.",
        )


def check_executable(program: str, path_variable: str) -> None:
    """Check `program` as the kernel will start it: with a slash a file, else a name on PATH."""
    if "/" in program:
        path = Path(program)
        if path.is_dir():
            raise ScriptNotExecutableError(f"{program} is a directory, not a program")
        if not path.exists():
            raise ScriptNotFoundError(f"the program {program} does not exist", hint=_nearby(path))
        if not os.access(path, os.X_OK):
            raise ScriptNotExecutableError(
                f"{program} is not executable",
                hint=f"Try `chmod +x {program}`; Python scripts need a name in .py or --run_path.",
            )
        return
    if not any(os.access(Path(folder or ".") / program, os.X_OK) for folder in path_variable.split(":")):
        raise ScriptNotFoundError(f"the program {program} is neither on PATH nor in this directory")


def _nearby(path: Path) -> str | None:
    """Return a file of this directory with a similar name."""
    try:
        names = [each.name for each in path.parent.iterdir() if each.is_file()]
    except OSError:
        return None
    near = similar(path.name, names, cutoff=0.75)
    return f"Did you mean {path.parent / near[0]}?" if near else None


# ---- Checks of this node: program, devices, ports


def check_program(settings: LaunchSettings) -> None:
    """Check that the script, module or program of each process can run. Raises LaunchError if one cannot, and
    FileNotFoundError if the current directory was deleted.
    """
    Path.cwd()  # if the directory was deleted, this raises the error that `cli.py` reports
    search = dict(settings.environment).get("PATH", os.environ.get("PATH", os.defpath))
    for argv in dict.fromkeys(process_command(settings, role) for role in _roles(settings)):
        if argv[:3] == (sys.executable, "-u", "-m"):
            check_module(argv[3])
        elif argv[:2] == (sys.executable, "-u"):
            check_python_script(argv[2])
        else:
            check_executable(argv[0], search)
            flag = "--warm" if settings.warm else "--watch" if settings.watch else ""
            if flag:
                from fleetrun.pod.zygote import is_python  # late: most launches need none

                if not is_python(argv):
                    raise UsageError(
                        f"{flag} needs a Python script, but {argv[0]} is a program",
                        hint=f"Name the Python script, or remove {flag}.",
                    )


def runs_python(settings: LaunchSettings) -> bool:
    """Return True if a process of this job runs under this Python."""
    return any(process_command(settings, role)[0] == sys.executable for role in _roles(settings))


def name_clash(settings: LaunchSettings, environ: Environ) -> Shadow | None:
    """Find another `trainers` package that hides ours from a script of this job."""
    environ = {**environ, **dict(settings.environment)}
    commands = dict.fromkeys(process_command(settings, role) for role in _roles(settings))
    return next(filter(None, (shadow_of_script(argv, environ) for argv in commands)), None)


def _roles(settings: LaunchSettings) -> list[Role]:
    """Return the roles that may have processes on this node, trainers first."""
    servers = [Role.SERVER] if settings.run_mode.has_servers else []
    return [Role.TRAINER, *servers, *(own.role for own in settings.roles)]


def take_token(settings: LaunchSettings, environ: MutableMapping[str, str], warn: ShowText) -> None:
    """Read the job's token from --token_file into the environment, where the processes of the job find it.

    Raises UsageError if the file cannot be read or holds no valid token.
    """
    if settings.token_file is not None:
        try:
            path = Path(settings.token_file)
            token = path.read_text().strip()
            if path.stat().st_mode & 0o077:
                warn(f"--token_file {path}: other users can read the file; run `chmod 600` on it")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "the file is not valid UTF-8"
            raise UsageError(f"--token_file {settings.token_file} cannot be read: {why}") from None
        environ[TOKEN] = token
        if not token:
            raise UsageError(f"--token_file {settings.token_file} is empty")
    source = TOKEN if settings.token_file is None else f"--token_file {settings.token_file}"
    token = environ.get(TOKEN, "")
    flaw = token_flaw(token, source) if token else None
    if flaw is not None:
        raise UsageError(flaw)
    if token and is_guessable(token):
        warn(f"the token of {source} looks easy to guess; `fleetrun token` prints a random token")


def take_notify(settings: LaunchSettings, environ: MutableMapping[str, str]) -> None:
    """Set FLEETRUN_NOTIFY to the value of --notify, for the launchers that a scheduler starts. The command
    line of these launchers never holds the value, because it may contain secrets.
    """
    if settings.notify and settings.scheduler != "local":
        texts = (text if name == "webhook" else f"{name}:{text}" for name, text in settings.notify)
        environ[NOTIFY] = "\n".join(texts)


# ---- This node: its rank in the job, its devices, its ports

_EVERYWHERE = ("localhost", "::1")
_SOMEWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737): any remote address


def locate(settings: LaunchSettings) -> Host:
    """Find this node in the list of nodes. Raises UsageError if it is missing, or matches more than one
    entry.
    """
    listed = settings.ips or _listed(settings)
    if not listed:
        master = _store(settings, ()) if _several(settings) else None
        address = _address(settings, master)
        return Host(address=address, nnodes=settings.nnodes, rank=settings.rank, master=master)
    mine = _mine(settings, listed, time.monotonic() + min(30.0, patience(settings, os.environ)))
    if set(mine) == set(listed) and not (settings.ips and len(listed) > 1):
        return Host(address=settings.host or listed[0], hosts=None, machines=listed)
    if len(mine) > 1:
        raise UsageError(
            f"{' and '.join(mine)} are both this node, but {_origin(settings)} also lists other nodes",
            hint="Name each node once, or choose the name of this node with --host.",
        )
    # A list must not mix loopback addresses, which every node has, with others.
    own = [each for each in listed if each in _EVERYWHERE or each.startswith("127.")]
    if own and len(own) < len(listed):
        others = [each for each in listed if each not in own]
        raise UsageError(
            f"{own[0]} in {_origin(settings)} means a different node on every node, "
            f"and {', '.join(others)} {'does' if len(others) == 1 else 'do'} not",
            hint="Use the address at which the other nodes reach this node.",
        )
    rank = listed.index(mine[0])
    if settings.rank not in (-1, rank):
        raise UsageError(
            f"--rank {settings.rank} does not agree with {_origin(settings)}: this node, {mine[0]}, has "
            f"rank {rank} there"
        )
    return Host(
        address=settings.host or mine[0],
        nnodes=(len(listed), len(listed)),
        machines=listed,
        hosts=mine,
        rank=rank,
        master=_store(settings, listed) or join_endpoint(listed[0], STORE_PORT),
    )


def is_first(host: Host) -> bool:
    """Return True if this node is certainly node 0, and no other node of the list has the address of the
    store.
    """
    store = (
        split_endpoint(host.master)[0] if host.master and host.rank == 0 and "://" not in host.master else ""
    )
    return bool(store) and (not host.machines or store == host.machines[0])


def patience(settings: LaunchSettings, environ: Environ) -> float:
    """Return how many seconds the names of nodes may take to get addresses. In Kubernetes they get addresses
    when their pods run.
    """
    return settings.rdzv_timeout if "KUBERNETES_SERVICE_HOST" in environ else _NAMES


_NAMES = 5.0  # outside of Kubernetes


def _store(settings: LaunchSettings, listed: Strings) -> str | None:
    """Return --master. `embedded:3` stands for the first three nodes of the list."""
    master = settings.master or ""
    if not master.startswith(EMBEDDED):
        return settings.master
    count = int(master.removeprefix(EMBEDDED))
    if len(listed) < count:
        have = f"the list has {len(listed)}" if listed else "no nodes are listed"
        raise UsageError(
            f"--master {master} needs the first {count} nodes of --ips, but {have}",
            hint="Name the nodes that serve the store: --master H1,H2,H3",
        )
    return ",".join(join_endpoint(each, STORE_PORT) for each in listed[:count])


def _several(settings: LaunchSettings) -> bool:
    return settings.nnodes != (1, 1) or (settings.master or "").startswith("etcd://")


def _listed(settings: LaunchSettings) -> Strings:
    """Return the hosts of the endpoint lists, in order of appearance."""
    stages = tuple(endpoint for stage in settings.heter_workers for endpoint in stage)
    endpoints = (*settings.servers, *settings.trainers, *stages, *settings.coordinators)
    return tuple(dict.fromkeys(split_endpoint(each)[0] for each in endpoints))


def _origin(settings: LaunchSettings) -> str:
    return "--ips" if settings.ips else "the endpoint lists"


def _mine(settings: LaunchSettings, listed: Strings, deadline: float) -> Strings:
    """Return the listed hosts that are this node.

    These are the value of --host, else the hosts with an address of this node, else the host at --rank. Names
    may get their addresses until the deadline.
    """
    if settings.host is not None:
        if settings.host in listed:
            others = [each for each in listed if each != settings.host]
            local = not settings.ips and all(is_this_host(each) for each in others)
            return listed if local else (settings.host,)
        mine = tuple(each for each in listed if same_host(each, settings.host))
        known = settings.host
    else:
        own = None if settings.nic is None else address_of(settings.nic)
        mine = tuple(each for each in listed if (is_this_host(each) if own is None else same_host(each, own)))
        known = own or ", ".join(addresses())
    if not mine:
        unknown = [each for each in listed if not host_addresses(each)]
        if 0 <= settings.rank < len(listed):  # this node is behind another address
            return (listed[settings.rank],)
        if unknown and time.monotonic() < deadline:
            time.sleep(0.25)
            return _mine(settings, listed, deadline)
        hint = "Choose this node with --host, or add its address."
        raise UsageError(
            f"this node ({known}) is not in {_origin(settings)}: {', '.join(listed)}",
            hint=f"{', '.join(unknown)}: this name cannot be resolved on this node. {hint}"
            if unknown
            else hint,
        )
    return mine


def _address(settings: LaunchSettings, master: str | None) -> str:
    """Return --host, else the address of --nic, else the address that reaches the rendezvous endpoint."""
    if settings.host is not None:
        if not is_this_host(settings.host):
            raise UsageError(
                f"{settings.host} is not an address of this node, which has {', '.join(addresses())}",
                hint="--host and POD_IP must be an address of this node.",
            )
        return settings.host
    if settings.nic is not None:
        return address_of(settings.nic)
    if not _several(settings):
        return LOOPBACK
    target = (master or "").removeprefix("etcd://").partition("?")[0].split(",")[0]
    there = split_endpoint(target)[0] if target else _SOMEWHERE
    return source_address(there) or source_address(_SOMEWHERE) or (*addresses(), LOOPBACK)[0]


def equipped(host: Host, resolved: Resolved, warn: ShowText, environ: Environ) -> Host:
    """Return `host` with its cores and devices. Raises UsageError for addresses of another host, and for
    missing devices.
    """
    settings = resolved.settings
    named = [host.address] if host.alone else []
    if settings.master_addr and (host.alone or host.rank == 0):
        named.append(settings.master_addr)
    for address in (*named, *(host.machines if host.alone else ())):
        if not is_this_host(address):
            raise UsageError(
                f"{address} is not an address of this node",
                hint="--nnodes and --master, or --ips, start a job on several nodes.",
            )
    ids = devices.detect(settings.device_kind, environ)
    if settings.devices and not ids:
        warn(
            f"{resolved.origins['devices']} {','.join(settings.devices)}: this node has no "
            f"{settings.device_kind.upper()}; computing on CPUs (Gloo)"
        )
    origin = resolved.origins.get("devices", "--devices")
    chosen = devices.choose(settings.devices, ids, settings.device_kind, environ, origin) if ids else ()
    return replace(
        host,
        cores=Groups().cores(),
        devices=chosen,
        device_cores=(
            device_cores(settings.numa_binding, chosen, ids, warn) if settings.numa_binding != "off" else ()
        ),
        device_kind=settings.device_kind,
        wanted_devices=len(settings.devices),
        evaluator_devices=evaluator_devices(settings, ids, warn, environ),
    )


def device_cores(
    binding: str,
    chosen: Collection[str],
    ids: Collection[str],
    warn: ShowText,
    root: Path = Path("/"),
) -> Strings:
    """Return the cores of the process of each `chosen` device. `ids` are all devices that this launcher may
    use.

    The cores are among the cores that this process may use. A result is empty if the NUMA node is unknown.
    Raises UsageError if taskset is missing, and if a NUMA node has too few cores.
    """
    if shutil.which("taskset") is None:
        raise UsageError("--numa_binding needs taskset, which is not on PATH (Debian: util-linux)")
    bound = numa.bound_cores(binding, chosen, ids, os.sched_getaffinity(0), root)
    if not any(bound):
        warn(f"--numa_binding {binding} has no effect, because the NUMA nodes of the GPUs are unknown")
    return tuple(map(written_ranks, bound))


def evaluator_devices(settings: LaunchSettings, ids: Strings, warn: ShowText, environ: Environ) -> Strings:
    """Return the devices among `ids` that the job file gives to evaluators."""
    own, kind = settings.role_settings(Role.EVALUATOR), settings.device_kind
    if own.devices and not ids:
        warn(f"{own.where}: roles.evaluator: this node has no {kind.upper()}; evaluators compute on CPUs")
    if not own.devices or not ids:
        return ()
    origin = f"{own.where}: roles.evaluator.resources.devices"
    return devices.choose(own.devices, ids, kind, environ, origin)


def offer_of(settings: LaunchSettings, host: Host, ports: Ports) -> Offer:
    """Return the offer of this node, with reserved ports. Raises PortError."""
    return offer(settings, host, lambda port: ports.any() if port is None else ports.fixed(port))


def imagined(host: Host, offer: Offer) -> tuple[list[Offer], int]:
    """Return the expected offers of all nodes and the rank of this node, before the nodes join.

    Every node is assumed to make the same offer, under its own address. If the address is unknown, the nodes
    are node0, node1 and so on. A spare has a rank beyond the ranks of the job, and could get any of them. It
    gets 0.
    """
    if host.alone:
        return [offer], 0
    rank = host.rank if 0 <= host.rank < max(host.nnodes[1], len(host.machines)) else 0
    machines = host.machines or tuple(f"node{number}" for number in range(host.nnodes[1]))

    def moved(endpoints: Strings, to: str) -> Strings:
        return tuple(f"{to}:{split_endpoint(each)[1]}" for each in endpoints)

    offers = [
        Offer(
            servers=moved(offer.servers, machine),
            trainers=moved(offer.trainers, machine),
            heter=tuple(moved(runner, machine) for runner in offer.heter),
            coordinators=moved(offer.coordinators, machine),
            service=moved((offer.service,), machine)[0],
            gloo=moved((offer.gloo,), machine)[0] if offer.gloo else "",
        )
        for machine in machines
    ]
    offers[rank] = offer
    return offers, rank


def pod_name() -> str:
    return "".join(chr(ord("a") + byte % 26) for byte in os.urandom(6))


_FILTERS = ("local_ranks_filter", "tee", "redirects", "-t", "-r")


def check_followed(resolved: Resolved, spec: PodSpec) -> None:
    """Raise UsageError if --follow names a process that does not exist. torchrun's filters may name more
    ranks than the job has.
    """
    settings, origin = resolved.settings, resolved.origins.get("follow", "--follow")
    if normal(origin) in _FILTERS:
        return
    origin = origin if origin.startswith("-") else f"{origin}: follow"
    if {role for role, _ in settings.follow} == set(Role):  # `all`
        return
    for role, numbers in settings.follow:
        there = [each.index for each in spec.containers if each.role is role]
        if role is Role.EVALUATOR:  # the evaluator may run on another node of the job
            there = list(range(settings.role_settings(role).count))
        missing = [number for number in numbers or there[:1] or (0,) if number not in there]
        if missing and not (role is Role.TRAINER and not there and numbers == (0,)):
            last = f" to {role}:{len(there) - 1}" if len(there) > 1 else " only"
            have = f"this job has {role}:0{last}" if there else f"this job has no {role}"
            raise UsageError(f"{origin} {role}:{missing[0]}: this process does not exist; {have}")


def print_plan(settings: LaunchSettings, spec: PodSpec) -> None:
    """Print the plan of --dry_run. Raises LaunchError if the output cannot be written."""
    from fleetrun.console import dry_run  # late: only --dry_run prints a plan

    notifiers, moments = written_notifiers(settings.notify), ", ".join(settings.notify_on)
    notified = f"{notifiers} ({moments})" if notifiers else ""
    text = (
        dry_run.plan_as_json(spec, os.environ, notified)
        if settings.json
        else "\n".join(dry_run.plan_as_text(spec, os.environ, notified))
    )
    try:
        sys.stdout.buffer.write(f"{text}\n".encode("utf-8", "surrogateescape"))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LaunchError(f"cannot write the plan to standard output: {error.strerror}") from None
