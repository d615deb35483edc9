"""From settings to members: role, rank, endpoint and devices of every process. Pure: what there is of ports
and devices is given. Ranks and shares follow Paddle's launchers (which of them, where they differ, is said at
each rule).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fleetrun.envs.contract import Cluster, Gloo, Member, Mode, Role
from fleetrun.envs.network import join_endpoint, split_endpoint
from fleetrun.envs.settings import LaunchSettings
from fleetrun.errors import PortError, UsageError

PADDLES_GLOO_PORT = 6767


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What this machine offers: the devices chosen for the job (ids of the visibility variable), cores, its
    address.

    `wanted_devices` is how many --devices named, whether they are there or not.
    """

    address: str
    devices: tuple[str, ...] = ()
    device_kind: str = "gpu"
    wanted_devices: int = 0
    cores: int = 1


Reserve = Callable[[int | None], int]
"""Holds the port that is asked for, or any (None), and tells which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many processes of each role; `heter` per stage from stage 2 on."""

    servers: int = 0
    trainers: int = 1
    heter: tuple[int, ...] = ()
    coordinators: int = 0

    @property
    def total(self) -> int:
        return self.servers + self.trainers + sum(self.heter) + self.coordinators


def counts(settings: LaunchSettings, host: Host) -> Counts:
    if settings.run_mode.has_servers:
        return Counts(
            servers=len(settings.servers) or settings.server_num or 1,
            trainers=len(settings.trainers) or settings.trainer_num or 1,
            heter=tuple(map(len, settings.heter_workers)) or settings.heter_worker_num,
            coordinators=len(settings.coordinators) or settings.coordinator_num or 0,
        )
    return Counts(trainers=_nproc(settings, host))


def _nproc(settings: LaunchSettings, host: Host) -> int:
    """--nproc_per_node, else one per device (wanted or, if none was named, there), else 1. The words are
    torchrun's.
    """
    wanted = settings.nproc_per_node
    if isinstance(wanted, int):
        return wanted
    if wanted == "cpu" or (wanted == "auto" and not host.devices):
        return host.cores
    if wanted == "gpu" and not host.devices:
        raise UsageError(
            "--nproc_per_node gpu: there is no GPU on this machine", hint="Give a number, or cpu."
        )
    return len(host.devices) or host.wanted_devices or 1


def build(settings: LaunchSettings, host: Host, reserve: Reserve) -> list[Member]:
    """The members, servers first, in the order in which they start.

    With a start port, ports follow one another: servers, trainers, heter trainers, coordinators, then the
    master's or Gloo's (the order of Paddle's legacy launcher).
    """
    number = counts(settings, host)
    ports = _PortPlan(settings, host.address, reserve)
    servers = ports.endpoints(settings.servers, number.servers)
    trainers = ports.endpoints(settings.trainers, number.trainers)
    given = settings.heter_workers or ((),) * len(number.heter)
    heter = tuple(ports.endpoints(stage, size) for stage, size in zip(given, number.heter, strict=True))
    coordinators = ports.endpoints(settings.coordinators, number.coordinators)
    cluster = Cluster(
        mode=settings.run_mode,
        servers=servers,
        trainers=trainers,
        heter=heter,
        coordinators=coordinators,
        stage_devices=_stage_devices(settings, heter),
        gloo=_gloo(settings, ports, servers) if settings.run_mode.has_servers else None,
        master=join_endpoint(settings.master_addr or host.address, ports.one(settings.master_port)),
        job_id=settings.job_id,
        max_restart=settings.max_restart,
    )
    return _members(settings, host, cluster)


class _PortPlan:
    """Hands out ports: as typed, one after the other from the start port, or any."""

    def __init__(self, settings: LaunchSettings, address: str, reserve: Reserve) -> None:
        self._address = address
        self._reserve = reserve
        self._next = settings.start_port

    def one(self, wanted: int | None = None) -> int:
        if wanted is None and self._next is not None:
            wanted, self._next = self._next, self._next + 1
        if wanted is not None and wanted > 65535:
            raise UsageError(
                f"--start_port leaves no room: port {wanted} would be needed and 65535 is the last"
            )
        return self._reserve(wanted)

    def endpoints(self, given: tuple[str, ...], number: int) -> tuple[str, ...]:
        if given:
            for endpoint in given:
                self._reserve(split_endpoint(endpoint)[1])
            return given
        return tuple(join_endpoint(self._address, self.one()) for _ in range(number))


def _gloo(settings: LaunchSettings, ports: _PortPlan, servers: tuple[str, ...]) -> Gloo:
    """Paddle: at the first server's host; --gloo_port counts with endpoint lists, --http_port or any port
    without.
    """
    wanted = settings.http_port or (settings.gloo_port if settings.servers else None)
    try:
        port = ports.one(wanted)
    except PortError:
        if wanted != PADDLES_GLOO_PORT:  # asked for by name
            raise
        port = ports.one()
    endpoint = join_endpoint(split_endpoint(servers[0])[0], port)
    return Gloo(
        endpoint=endpoint,
        fs_path=f"/tmp/fleetrun-gloo-{split_endpoint(endpoint)[1]}",
        with_gloo=settings.with_gloo,
    )


def _stage_devices(settings: LaunchSettings, heter: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Stage 1, the trainers, computes on CPUs; --heter_devices names the rest."""
    if settings.run_mode is not Mode.PS_HETER:
        return ()
    return ("cpu", *(settings.heter_devices or ("gpu",) * len(heter)))


def _members(settings: LaunchSettings, host: Host, cluster: Cluster) -> list[Member]:
    roles = [(Role.SERVER, 0, cluster.servers), (Role.TRAINER, 1, cluster.trainers)]
    roles += [(Role.HETER, number, stage) for number, stage in enumerate(cluster.heter, start=2)]
    roles.append((Role.COORDINATOR, 0, cluster.coordinators))
    sizes = {Role.HETER: len(cluster.heter_flat)}
    members = []
    ranks = dict.fromkeys(Role, 0)
    for role, stage, endpoints in roles:
        for endpoint in endpoints:
            rank = ranks[role]
            ranks[role] += 1
            part = _devices(settings, host, cluster, role, rank, stage)
            members.append(
                Member(
                    cluster=cluster,
                    role=role,
                    rank=rank,
                    local_rank=rank,
                    local_size=sizes.get(role, len(endpoints)),
                    endpoint=endpoint,
                    stage=stage if cluster.mode is Mode.PS_HETER else 0,
                    backend=_backend(settings, host) if cluster.mode is Mode.COLLECTIVE else None,
                    log_dir=settings.log_dir,
                    device_kind=host.device_kind if part.own else "gpu",
                    devices=part.own,
                    visible=",".join(part.visible) if part.own else None,
                )
            )
    return members


def _backend(settings: LaunchSettings, host: Host) -> str | None:
    """PADDLE_DISTRI_BACKEND: what was asked for, else gloo without a device and nothing with one."""
    if settings.backend != "auto":
        return settings.backend
    return None if host.devices else "gloo"


@dataclass(frozen=True, slots=True)
class Share:
    """What one process gets of the devices: what it may see, and which of that are its own, by position."""

    visible: tuple[str, ...] = ()
    own: tuple[int, ...] = ()


def share(ids: tuple[str, ...], index: int, size: int, *, whole_node: bool) -> Share:
    """The share of process `index` of `size`.

    One device each, seen among all of the node's, so that LOCAL_RANK is its index (torchrun's custom);
    several each, or with `whole_node` off, each process sees its own slice only. Devices that do not divide
    evenly: as many as there are processes are used (Paddle). More processes than devices: none is bound.
    """
    if size > len(ids) or not ids:
        return Share()
    width = len(ids) // size if len(ids) % size == 0 else 1
    slice_ = ids[index * width : (index + 1) * width]
    if width == 1 and whole_node:
        return Share(ids[:size], (index,))
    return Share(slice_, tuple(range(width)))


def _computes_on(kind: str, cluster: Cluster, role: Role, stage: int) -> bool:
    if cluster.mode is Mode.PS_HETER:
        return stage > 0 and cluster.stage_devices[stage - 1] == kind
    return role is Role.TRAINER


def _devices(
    settings: LaunchSettings, host: Host, cluster: Cluster, role: Role, rank: int, stage: int
) -> Share:
    """Collective trainers share the node's devices. In ps modes only --devices binds, one each in turn
    (Paddle's legacy launcher, whose ps-gpu this is); in ps-heter those of stages that compute on it.
    """
    if cluster.mode in (Mode.COLLECTIVE, Mode.RPC):
        return share(host.devices, rank, len(cluster.trainers), whole_node=settings.visible_devices == "node")
    if host.wanted_devices and host.devices and _computes_on(host.device_kind, cluster, role, stage):
        return Share((host.devices[rank % len(host.devices)],), (0,))
    return Share()
