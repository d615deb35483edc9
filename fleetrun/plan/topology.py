"""Plan which processes run where, in three pure steps.

First, each node's offer: how many processes of each role, and at which endpoints. Second, the members, from
the offers of all nodes: role, rank, endpoint and devices of every process. Third, this node's run, from its
members: commands, environments and files.

Ranks and shares follow Paddle's launchers. If the launchers differ, each rule names the one that it follows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fleetrun import files
from fleetrun.aliases import Environ, Integers, Strings, Texts
from fleetrun.envs import contract
from fleetrun.envs.channels import (
    MEMORY_VARIABLE,
    NOTICE_VARIABLE,
    PROBE_VARIABLE,
    PROGRESS_VARIABLE,
    ZYGOTE_VARIABLE,
    container_id,
)
from fleetrun.envs.contract import Cluster, Gloo, Member, Mode, Role, join_endpoint, split_endpoint
from fleetrun.envs.settings.options import LaunchSettings, RoleSettings
from fleetrun.envs.settings.parsing import written_ranks
from fleetrun.errors import PortError, ReservedPortError, UsageError
from fleetrun.host.devices import share
from fleetrun.pod.spec import ContainerSpec, PodSpec, log_path
from fleetrun.values import frozen_by_name, replace

# ---- Offers: processes and endpoints of one node. Shares follow Paddle's launchers

PADDLES_GLOO_PORT = 6767


@frozen_by_name
class Host:
    """This node: its place among the nodes of the job, and its equipment for the job's processes."""

    address: str  # this node's address
    nnodes: tuple[int, int] = (1, 1)  # the fewest and the most nodes
    machines: Strings = ()  # the nodes of a list (--ips or endpoint lists), in order
    hosts: Strings | None = None  # the entries of `machines` that are this node
    rank: int = -1  # this node's position in `machines`, or else the value of --rank
    master: str | None = None  # where the nodes join; with None, this node chooses
    cores: int = 1
    devices: Strings = ()  # the ids of the visibility variable that were chosen for the job
    device_kind: str = "gpu"
    wanted_devices: int = 0  # how many devices --devices named, present or not
    evaluator_devices: Strings = ()  # the devices that a job file names for evaluators
    device_cores: Strings = ()  # for each of `devices`, the cores of its process (empty: unbound)

    @property
    def alone(self) -> bool:
        """True if this is the job's only node."""
        return self.nnodes == (1, 1) and not (self.master or "").startswith("etcd://")


Reserve = Callable[[int | None], int]
"""A function that reserves the requested port, or any port for None, and returns it."""


@frozen_by_name
class Offer:
    """The endpoints of one node by role."""

    servers: Strings = ()
    trainers: Strings = ()
    heter: tuple[Strings, ...] = ()
    coordinators: Strings = ()
    service: str = ""  # for the trainers' store; counts on the first node of the job
    gloo: str = ""  # in ps modes; counts on the first node of the job

    @property
    def size(self) -> int:
        """The number of processes."""
        return sum(map(len, (self.servers, self.trainers, *self.heter, self.coordinators)))

    @property
    def serves(self) -> bool:
        """True if trainers of other nodes need this node."""
        return bool(self.servers or self.coordinators or any(self.heter))

    def packed(self) -> list[object]:
        """Return the offer as JSON values for `unpacked`."""
        return [self.servers, self.trainers, self.heter, self.coordinators, self.service, self.gloo]

    @classmethod
    def unpacked(cls, row: Sequence[Any]) -> Offer:
        """Read the values of `packed`. Raises ValueError or TypeError for other values."""
        servers, trainers, heter, coordinators, service, gloo = row
        return cls(
            servers=_texts(servers),
            trainers=_texts(trainers),
            heter=tuple(map(_texts, heter)),
            coordinators=_texts(coordinators),
            service=_text(service),
            gloo=_text(gloo),
        )


def _texts(row: object) -> Strings:
    if not isinstance(row, list | tuple):
        raise ValueError(f"a list of endpoints is {type(row).__name__}")
    return tuple(map(_text, row))


def _text(value: object) -> str:
    """Check a text for environment variables. It must be printable, without NUL or line breaks."""
    text = str(value)
    if not text.isprintable():
        raise ValueError(f"{text!r} is not an endpoint")
    return text


def _of_this_host(endpoints: Strings, host: Host) -> Strings:
    """Return the endpoints of this node, whose host is exactly one of the node's own."""
    if host.hosts is None:
        return endpoints
    return tuple(each for each in endpoints if split_endpoint(each)[0] in host.hosts)


def _nproc(settings: LaunchSettings, host: Host) -> int:
    """Return the number of processes: --nproc_per_node, or one per device, or 1.

    "Devices" are the devices that --devices named, or else the present ones. The words such as `auto` come
    from torchrun.
    """
    wanted = settings.nproc_per_node
    if isinstance(wanted, int):
        return wanted
    if wanted == "cpu" or (wanted == "auto" and not host.devices):
        return host.cores
    if wanted in ("gpu", "xpu") and not host.devices:
        raise UsageError(
            f"--nproc_per_node {wanted}: this node has no {wanted.upper()}",
            hint="Use a number, or cpu.",
        )
    return len(host.devices) or host.wanted_devices or 1


def offer(settings: LaunchSettings, host: Host, reserve: Reserve) -> Offer:
    """Make this node's offer and reserve its ports.

    From a start port on, ports are consecutive, in the order of Paddle's legacy launcher. Servers come first,
    then trainers, heter trainers, coordinators, and the port of the master or of Gloo.
    """
    ports = _PortPlan(settings, host, reserve)
    if not settings.run_mode.has_servers:
        trainers = ports.endpoints((), _nproc(settings, host))
        return Offer(trainers=trainers, service=_service(settings, host, ports))
    servers = ports.endpoints(settings.servers, settings.server_num)
    trainers = ports.endpoints(settings.trainers, settings.trainer_num)
    heter = tuple(ports.endpoints(stage, 0) for stage in settings.heter_workers) or tuple(
        ports.endpoints((), number) for number in settings.heter_worker_num
    )
    coordinators = ports.endpoints(settings.coordinators, settings.coordinator_num or 0)
    gloo = join_endpoint(host.address, _gloo_port(settings, host, ports))
    return Offer(
        servers=servers,
        trainers=trainers,
        heter=heter,
        coordinators=coordinators,
        service=_service(settings, host, ports),
        gloo=gloo,
    )


class _PortPlan:
    """Assign ports: the given ones, consecutive ones from the start port, or any."""

    def __init__(self, settings: LaunchSettings, host: Host, reserve: Reserve) -> None:
        self._host = host
        self._reserve = reserve
        self._next = settings.start_port

    def one(self, wanted: int | None = None) -> int:
        if wanted is None and self._next is not None:
            wanted, self._next = self._next, self._next + 1
        if wanted is not None and wanted > 65535:
            raise UsageError(
                f"--start_port is too high: the job needs port {wanted}, and 65535 is the last port"
            )
        return self._reserve(wanted)

    def endpoints(self, listed: Strings, number: int | None) -> Strings:
        """Return the listed endpoints that are on this node, or else `number` new ones (None: one)."""
        if listed:
            here = _of_this_host(listed, self._host)
            for endpoint in here:
                self._reserve(split_endpoint(endpoint)[1])
            return here
        number = 1 if number is None else number
        return tuple(join_endpoint(self._host.address, self.one()) for _ in range(number))


def _service(settings: LaunchSettings, host: Host, ports: _PortPlan) -> str:
    """Return the endpoint for --master_port.

    The port belongs to the first node. Another launcher on this node may be that first node, so the port may
    be reserved already.
    """
    try:
        port = ports.one(settings.master_port if host.rank <= 0 else None)
    except ReservedPortError:
        if host.alone or host.rank == 0:
            raise
        port = ports.one()
    return join_endpoint(host.address, port)


def _gloo_port(settings: LaunchSettings, host: Host, ports: _PortPlan) -> int:
    """Return Gloo's port, at the host of the first server (Paddle).

    --gloo_port applies with endpoint lists. Without lists, use --http_port or any port.
    """
    wanted = settings.http_port
    if wanted is None and settings.servers and _of_this_host(settings.servers[:1], host):
        wanted = settings.gloo_port
    try:
        return ports.one(wanted)
    except PortError:
        if wanted != PADDLES_GLOO_PORT:  # the user named this port
            raise
        return ports.one()


# ---- Evaluators: processes without an endpoint


def evaluators(settings: LaunchSettings, host: Host, cluster: Cluster, node_rank: int) -> list[Member]:
    """Return the evaluators of node `node_rank`.

    They run on the first node only, unless the job file requests them on each node. Evaluators divide the
    devices that were named for them, and share devices if there are fewer devices than evaluators.
    """
    wish = settings.role_settings(Role.EVALUATOR)
    if node_rank > 0 and not wish.each:
        return []
    members = []
    parts = min(wish.count, len(host.evaluator_devices)) or 1
    for index in range(wish.count):
        visible, own = share(host.evaluator_devices, index % parts, parts, whole_node=False)
        members.append(
            Member(
                cluster=cluster,
                role=Role.EVALUATOR,
                rank=node_rank * wish.count + index,
                local_rank=index,
                local_size=wish.count,
                node_rank=node_rank,
                endpoint="",
                log_dir=settings.log_dir,
                device_kind=host.device_kind if own else "gpu",
                devices=own,
                visible=",".join(visible) if own else None,
            )
        )
    return members


# ---- From the offers of all nodes to members: role, rank, endpoint and devices of every process. Pure. Ranks
# follow Paddle's launchers. Each rule names its launcher where they differ.

_Everywhere = tuple[Role, int, dict[str, int]]
"""A role, its stage, and the rank of each of its endpoints."""


def build(settings: LaunchSettings, host: Host, offers: Sequence[Offer], node_rank: int = 0) -> list[Member]:
    """Return the members on node `node_rank`, servers first, in the order in which they start.

    `offers` holds the offers of all nodes in rank order. Listed endpoints keep the order of their list across
    all nodes. Raises UsageError if several nodes give the same address.
    """
    cluster = _cluster(settings, offers)
    endpoints = (*cluster.servers, *cluster.trainers, *cluster.heter_flat, *cluster.coordinators)
    if len(set(endpoints)) < len(endpoints):
        twice = next(each for number, each in enumerate(endpoints) if each in endpoints[:number])
        raise UsageError(
            f"{twice} is an endpoint of two processes", hint="Give every node its own address with --host."
        )
    members = _members(settings, host, cluster, offers[node_rank], node_rank)
    return [*members, *evaluators(settings, host, cluster, node_rank)]


def placed(settings: LaunchSettings, offers: Sequence[Offer]) -> list[dict[str, str]]:
    """Return the ranks on each node by role, in the form `0-2,5`."""
    cluster = _cluster(settings, offers)
    everywhere = [*_everywhere(cluster)]
    found = [_placed(everywhere, _offered(each, cluster)) for each in offers]
    wish = settings.role_settings(Role.EVALUATOR)
    for number, ranks in enumerate(found):
        if wish.count and (not number or wish.each):
            ranks[Role.EVALUATOR] = [*range(number * wish.count, (number + 1) * wish.count)]
    return [{role: written_ranks(ranks) for role, ranks in each.items()} for each in found]


def _placed(everywhere: Sequence[_Everywhere], here: Sequence[Strings]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for (role, _, there), endpoints in zip(everywhere, here, strict=True):
        if endpoints:
            ranks.setdefault(role, []).extend(there[each] for each in endpoints if each in there)
    return ranks


def _cluster(settings: LaunchSettings, offers: Sequence[Offer]) -> Cluster:
    servers = settings.servers or _all(each.servers for each in offers)
    heter = settings.heter_workers or _stages(offers)
    return Cluster(
        mode=settings.run_mode,
        servers=servers,
        trainers=settings.trainers or _all(each.trainers for each in offers),
        heter=heter,
        coordinators=settings.coordinators or _all(each.coordinators for each in offers),
        stage_devices=_stage_devices(settings, heter),
        gloo=_gloo(settings, servers, offers) if settings.run_mode.has_servers else None,
        master=_master(settings, offers),
        nnodes=len(offers),
        job_id=settings.job_id,
        max_restart=settings.max_restart,
        role_name=settings.role,
    )


def check_complete(settings: LaunchSettings, offers: Sequence[Offer]) -> None:
    """Raise UsageError if all nodes of a parameter-server job together lack trainers or servers. The job
    would end without any work.
    """
    if not settings.run_mode.has_servers:
        return
    if not settings.trainers and not any(each.trainers for each in offers):
        raise UsageError(
            "no node has a trainer", hint="Start at least one node with --trainer_num 1 or more."
        )
    if not settings.servers and not any(each.servers for each in offers):
        raise UsageError("no node has a server", hint="Start at least one node with --server_num 1 or more.")


def _all(parts: Iterable[Strings]) -> Strings:
    return tuple(endpoint for part in parts for endpoint in part)


def _stages(offers: Sequence[Offer]) -> tuple[Strings, ...]:
    number = max((len(each.heter) for each in offers), default=0)
    return tuple(
        _all(each.heter[stage] for each in offers if stage < len(each.heter)) for stage in range(number)
    )


def _master(settings: LaunchSettings, offers: Sequence[Offer]) -> str:
    """Return the endpoint on the first node, with the address that --master_addr requests, if any."""
    host, port = split_endpoint(offers[0].service)
    return join_endpoint(settings.master_addr or host, port)


def _gloo(settings: LaunchSettings, servers: Strings, offers: Sequence[Offer]) -> Gloo:
    """Return Gloo's settings, at the first server's host (Paddle)."""
    first = next((each for each in offers if servers and servers[0] in each.servers), offers[0])
    host = split_endpoint(servers[0] if servers else first.gloo)[0]
    endpoint = join_endpoint(host, split_endpoint(first.gloo)[1])
    return Gloo(
        endpoint=endpoint,
        fs_path=f"/tmp/fleetrun-gloo-{split_endpoint(endpoint)[1]}",
        with_gloo=settings.with_gloo,
    )


def _stage_devices(settings: LaunchSettings, heter: tuple[Strings, ...]) -> Strings:
    """Return the devices of the stages. Stage 1, the trainers, computes on CPUs, and --heter_devices names
    the rest.
    """
    if settings.run_mode is not Mode.PS_HETER:
        return ()
    return ("cpu", *(settings.heter_devices or ("gpu",) * len(heter)))


def _members(
    settings: LaunchSettings, host: Host, cluster: Cluster, own: Offer, node_rank: int
) -> list[Member]:
    sizes = {Role.HETER: sum(map(len, own.heter))}
    members = []
    placed = dict.fromkeys(Role, 0)  # processes on this node so far
    for (role, stage, ranks), here in zip(_everywhere(cluster), _offered(own, cluster), strict=True):
        for endpoint in here:
            local_rank = placed[role]
            placed[role] += 1
            visible, own_devices = _devices(settings, host, cluster, role, local_rank, len(here), stage)
            members.append(
                Member(
                    cluster=cluster,
                    role=role,
                    rank=ranks[endpoint],
                    local_rank=local_rank,
                    local_size=sizes.get(role, len(here)),
                    node_rank=node_rank,
                    endpoint=endpoint,
                    stage=stage if cluster.mode is Mode.PS_HETER else 0,
                    backend=_backend(settings, host) if cluster.mode is Mode.COLLECTIVE else None,
                    log_dir=settings.log_dir,
                    device_kind=host.device_kind if own_devices else "gpu",
                    devices=own_devices,
                    visible=",".join(visible) if own_devices else None,
                )
            )
    return members


def _everywhere(cluster: Cluster) -> Iterator[_Everywhere]:
    """Yield the endpoints of the job on all nodes, in the order of `_offered`. Ranks continue over the stages
    of a role.
    """
    yield Role.SERVER, 0, _numbered(cluster.servers)
    yield Role.TRAINER, 1, _numbered(cluster.trainers)
    before = 0
    for stage, endpoints in enumerate(cluster.heter, start=2):
        yield Role.HETER, stage, _numbered(endpoints, before)
        before += len(endpoints)
    yield Role.COORDINATOR, 0, _numbered(cluster.coordinators)


def _offered(offer: Offer, cluster: Cluster) -> tuple[Strings, ...]:
    none = ((),) * (len(cluster.heter) - len(offer.heter))
    return (offer.servers, offer.trainers, *offer.heter, *none, offer.coordinators)


def _numbered(endpoints: Sequence[str], before: int = 0) -> dict[str, int]:
    return {endpoint: number for number, endpoint in enumerate(endpoints, start=before)}


def _backend(settings: LaunchSettings, host: Host) -> str | None:
    """Return PADDLE_DISTRI_BACKEND: the requested backend, or gloo without devices, or None with devices."""
    if settings.backend != "auto":
        return settings.backend
    return None if host.devices else "gloo"


def _computes_on(kind: str, cluster: Cluster, role: Role, stage: int) -> bool:
    if cluster.mode is Mode.PS_HETER:
        return stage > 0 and cluster.stage_devices[stage - 1] == kind
    return role is Role.TRAINER


def _devices(
    settings: LaunchSettings, host: Host, cluster: Cluster, role: Role, index: int, size: int, stage: int
) -> tuple[Strings, Integers]:
    """Return the devices that a process may see and the positions of its own devices, as `share` does.

    Collective trainers share the node's devices. In ps modes only --devices assigns devices, one to each
    process in turn (Paddle's legacy launcher, which has ps-gpu). In ps-heter, only the stages that compute on
    the device kind get one.
    """
    if cluster.mode in (Mode.COLLECTIVE, Mode.RPC):
        whole_node = settings.visible_devices == "node" and not settings.virtual_local_rank
        return share(host.devices, index, size, whole_node=whole_node)
    if host.wanted_devices and host.devices and _computes_on(host.device_kind, cluster, role, stage):
        return (host.devices[index % len(host.devices)],), (0,)
    return (), ()


# ---- From members to commands, environments and files

_RESTARTS = ("PADDLE_RESTART_COUNT",)
_RESTARTS_TORCH = (*_RESTARTS, "TORCHELASTIC_RESTART_COUNT")


def process_command(settings: LaunchSettings, role: Role = Role.TRAINER) -> Strings:
    """Return the command for the processes of a role.

    This Python runs scripts, modules, and directories and archives with a `__main__.py`, unbuffered.
    Everything else is started as a program.
    """
    own = settings.role_settings(role)
    script, module, no_python = settings.script, settings.module, settings.no_python
    arguments = settings.script_args if own.args is None else own.args
    if own.script is not None:
        script, module, no_python, arguments = own.script, own.module, own.no_python, own.args or ()
    if module:
        return (sys.executable, "-u", "-m", script, *arguments)
    python = script.endswith((".py", ".pyz", ".zip")) or Path(script, "__main__.py").is_file()
    if (python and not no_python) or settings.run_path:
        return (sys.executable, "-u", script, *arguments)
    program = script if "/" in script or not Path(script).is_file() else f"./{script}"
    return (program, *arguments)


def pod_spec(
    settings: LaunchSettings,
    host: Host,
    offers: Sequence[Offer],
    node_rank: int = 0,
    *,
    pod: str,
    environ: Environ,
) -> PodSpec:
    """Return the processes to run on this node, which has rank `node_rank` among the nodes of `offers`.

    `environ` is the launcher's own environment. Its contract variables are not passed on.
    """
    members = build(settings, host, offers, node_rank)
    base = {**contract.without_contract(environ), **dict(settings.environment)}
    local_trainers = sum(member.role is Role.TRAINER for member in members)
    threads = None if "OMP_NUM_THREADS" in base else max(1, host.cores // max(1, local_trainers))
    log_dir = Path(settings.log_dir).absolute()
    runtime = files.run_folder(environ)
    containers = []
    for member in members:
        own = settings.role_settings(member.role)
        placed = replace(member, pod=pod, log_dir=str(log_dir), omp_threads=_omp_threads(own, threads))
        log = log_path(log_dir, settings.job_id, pod, member.role, member.local_rank)
        env = {**base, **dict(own.environment)}
        env[PROGRESS_VARIABLE] = str(files.progress_socket(runtime, pod))
        env["FLEETRUN_DEBUG"] = settings.debug
        env[MEMORY_VARIABLE] = str(files.memory_socket(runtime, pod))
        if settings.probe == "on":
            address = files.probe_socket(runtime, container_id(pod, member.role, member.local_rank))
            env |= _probe(env, address, imports=settings.warm or settings.watch)
        argv = (*_binding(host, member), *process_command(settings, member.role))
        spec = _container_spec(placed, argv, log, env)
        if settings.virtual_local_rank and member.role is Role.TRAINER:
            spec = replace(spec, env={**spec.env, "LOCAL_RANK": "0"})
        containers.append(spec)
    return PodSpec(
        name=pod,
        job_id=settings.job_id,
        mode=settings.run_mode,
        containers=tuple(containers),
        log_dir=log_dir,
        pre_hook=_pre_hook(settings, log_dir, pod, base),
    )


_PROBE = Path(__file__).parents[1] / "probe" / "inside"


def _probe(env: Environ, address: Path, *, imports: bool) -> dict[str, str]:
    """Return the environment variables that make Python load the probe, which answers at `address`.

    With `imports`, the probe notes the imports of the process.
    """
    paths = env.get("PYTHONPATH")
    return {
        "PYTHONPATH": f"{_PROBE}{os.pathsep}{paths}" if paths else str(_PROBE),
        PROBE_VARIABLE: str(address),
        **({ZYGOTE_VARIABLE: "note"} if imports else {}),
    }


def _binding(host: Host, member: Member) -> Strings:
    """Return the command prefix that binds a process to the cores of the member's first device."""
    if member.role is not Role.TRAINER or not member.devices or member.visible is None:
        return ()
    device = member.visible.split(",")[member.devices[0]]
    cores = dict(zip(host.devices, host.device_cores, strict=False)).get(device)
    return ("taskset", "--cpu-list", cores) if cores else ()


def _omp_threads(own: RoleSettings, share: int | None) -> int | None:
    """Return OMP_NUM_THREADS of a process: the value of the job file, or the share of the cores for a
    computing role.
    """
    if own.threads is not None:
        return own.threads
    computes = own.role in (Role.TRAINER, Role.EVALUATOR)
    return share if computes and "OMP_NUM_THREADS" not in dict(own.environment) else None


def _container_spec(member: Member, argv: Strings, log: Path, base: Texts) -> ContainerSpec:
    """Describe one process. Its files are beside its log."""
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


def _pre_hook(settings: LaunchSettings, log_dir: Path, pod: str, env: Environ) -> ContainerSpec | None:
    if settings.elastic_pre_hook is None:
        return None
    import shlex  # late: few jobs have a pre-hook

    return ContainerSpec(
        role=Role.TRAINER,
        rank=0,
        index=0,
        argv=tuple(shlex.split(settings.elastic_pre_hook)),
        env=env,
        log=log_path(log_dir, settings.job_id, pod, "pre_hook", 0),
        label="pre_hook",
    )
