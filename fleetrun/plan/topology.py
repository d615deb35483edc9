"""Who runs where: what each machine offers (how many processes of each role, at which endpoints), and from
the offers of all machines the members: role, rank, endpoint and devices of every process. Pure.

Ranks and shares follow Paddle's launchers; where those differ, each rule says which of them it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fleetrun.envs.contract import Cluster, Gloo, Member, Mode, Role, join_endpoint, split_endpoint
from fleetrun.envs.settings.options import LaunchSettings
from fleetrun.envs.settings.parsing import written_ranks
from fleetrun.errors import PortError, UsageError
from fleetrun.host.devices import Share, share
from fleetrun.values import dataclass

# ---- Offers: processes and endpoints of one machine. Shares follow Paddle's launchers

PADDLES_GLOO_PORT = 6767


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What this machine offers: the devices chosen for the job (ids of the visibility variable), cores, its
    address.

    `wanted_devices` is how many --devices named, whether they are there or not. `hosts` are the hosts of the
    endpoint lists that are this machine. `evaluator_devices` are those that a job file names for evaluators.
    """

    address: str
    devices: tuple[str, ...] = ()
    device_kind: str = "gpu"
    wanted_devices: int = 0
    cores: int = 1
    hosts: tuple[str, ...] | None = None
    evaluator_devices: tuple[str, ...] = ()


Reserve = Callable[[int | None], int]
"""Holds the port that is asked for, or any (None), and tells which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How many processes of each role on this machine; `heter` per stage from stage 2 on."""

    servers: int = 0
    trainers: int = 1
    heter: tuple[int, ...] = ()
    coordinators: int = 0

    @property
    def total(self) -> int:
        return self.servers + self.trainers + sum(self.heter) + self.coordinators


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The endpoints of one machine by role, and two that count if it is the job's first: `service`, for the
    trainers' store, and `gloo` in ps modes.
    """

    servers: tuple[str, ...] = ()
    trainers: tuple[str, ...] = ()
    heter: tuple[tuple[str, ...], ...] = ()
    coordinators: tuple[str, ...] = ()
    service: str = ""
    gloo: str = ""

    @property
    def serves(self) -> bool:
        """Whether trainers of other machines need this one."""
        return bool(self.servers or self.coordinators or any(self.heter))

    def packed(self) -> list[Any]:
        """As JSON; `unpacked` reads it."""
        return [self.servers, self.trainers, self.heter, self.coordinators, self.service, self.gloo]

    @classmethod
    def unpacked(cls, row: Sequence[Any]) -> Offer:
        """Raises ValueError or TypeError for what `packed` has not made."""
        servers, trainers, heter, coordinators, service, gloo = row
        return cls(
            servers=_texts(servers),
            trainers=_texts(trainers),
            heter=tuple(map(_texts, heter)),
            coordinators=_texts(coordinators),
            service=_text(service),
            gloo=_text(gloo),
        )


def _texts(row: Any) -> tuple[str, ...]:
    if not isinstance(row, list | tuple):
        raise ValueError(f"a list of endpoints is {type(row).__name__}")
    return tuple(map(_text, row))


def _text(value: Any) -> str:
    """It goes into environments of processes: no NUL, no line breaks."""
    text = str(value)
    if not text.isprintable():
        raise ValueError(f"{text!r} is no endpoint")
    return text


def process_counts(settings: LaunchSettings, host: Host) -> Counts:
    if settings.run_mode.has_servers:
        heter = tuple(len(_of_this_host(stage, host)) for stage in settings.heter_workers)
        return Counts(
            servers=_number(settings.servers, settings.server_num, host),
            trainers=_number(settings.trainers, settings.trainer_num, host),
            heter=heter or settings.heter_worker_num,
            coordinators=len(_of_this_host(settings.coordinators, host)) or settings.coordinator_num or 0,
        )
    return Counts(trainers=_nproc(settings, host))


def _number(listed: tuple[str, ...], counted: int | None, host: Host) -> int:
    """Of a list what is here, else what was said, else one."""
    if listed:
        return len(_of_this_host(listed, host))
    return 1 if counted is None else counted


def _of_this_host(endpoints: tuple[str, ...], host: Host) -> tuple[str, ...]:
    """The endpoints of this machine: those whose host is exactly one of its own."""
    if host.hosts is None:
        return endpoints
    return tuple(each for each in endpoints if split_endpoint(each)[0] in host.hosts)


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


def offer(settings: LaunchSettings, host: Host, reserve: Reserve) -> Offer:
    """This machine's offer; its ports are reserved.

    With a start port, ports follow one another: servers, trainers, heter trainers, coordinators, then the
    master's or Gloo's (the order of Paddle's legacy launcher).
    """
    number = process_counts(settings, host)
    ports = _PortPlan(settings, host, reserve)
    servers = ports.endpoints(settings.servers, number.servers)
    trainers = ports.endpoints(settings.trainers, number.trainers)
    given = settings.heter_workers or ((),) * len(number.heter)
    heter = tuple(ports.endpoints(stage, size) for stage, size in zip(given, number.heter, strict=True))
    coordinators = ports.endpoints(settings.coordinators, number.coordinators)
    gloo = ""
    if settings.run_mode.has_servers:
        gloo = join_endpoint(host.address, _gloo_port(settings, host, ports))
    return Offer(
        servers=servers,
        trainers=trainers,
        heter=heter,
        coordinators=coordinators,
        service=join_endpoint(host.address, ports.one(settings.master_port)),
        gloo=gloo,
    )


class _PortPlan:
    """Hands out ports: as typed, one after the other from the start port, or any."""

    def __init__(self, settings: LaunchSettings, host: Host, reserve: Reserve) -> None:
        self._host = host
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
            here = _of_this_host(given, self._host)
            for endpoint in here:
                self._reserve(split_endpoint(endpoint)[1])
            return here
        return tuple(join_endpoint(self._host.address, self.one()) for _ in range(number))


def _gloo_port(settings: LaunchSettings, host: Host, ports: _PortPlan) -> int:
    """Paddle: at the first server's host; --gloo_port counts with endpoint lists, --http_port or any port
    without.
    """
    wanted = settings.http_port
    if wanted is None and settings.servers and _of_this_host(settings.servers[:1], host):
        wanted = settings.gloo_port
    try:
        return ports.one(wanted)
    except PortError:
        if wanted != PADDLES_GLOO_PORT:  # asked for by name
            raise
        return ports.one()


# ---- Evaluators: processes without endpoint


def evaluators(settings: LaunchSettings, host: Host, cluster: Cluster, node_rank: int) -> list[Member]:
    """Those of machine `node_rank`: on the first machine only, unless the job file wants them on each. They
    have no endpoint, and divide the devices that were named for them; of more evaluators than devices several
    have the same one.
    """
    wish = settings.role_settings(Role.EVALUATOR)
    if node_rank > 0 and not wish.each:
        return []
    members = []
    parts = min(wish.count, len(host.evaluator_devices)) or 1
    for index in range(wish.count):
        part = share(host.evaluator_devices, index % parts, parts, whole_node=False)
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
                device_kind=host.device_kind if part.own else "gpu",
                devices=part.own,
                visible=",".join(part.visible) if part.own else None,
            )
        )
    return members


# ---- From the offers of all machines to members: role, rank, endpoint and devices of every process. Pure.
# Ranks follow Paddle's launchers (which of them, where they differ, is said at each rule).

_Everywhere = tuple[Role, int, dict[str, int]]
"""A role, its stage, and the rank of each of its endpoints."""


def build(settings: LaunchSettings, host: Host, offers: Sequence[Offer], node_rank: int = 0) -> list[Member]:
    """The members on machine `node_rank`, servers first, in the order in which they start.

    `offers` are those of all machines, in the order of their ranks. Endpoints that were listed keep the order
    of the list over all machines. Raises UsageError for machines that give themselves the same address.
    """
    cluster = _cluster(settings, offers)
    _check_unique((*cluster.servers, *cluster.trainers, *cluster.heter_flat, *cluster.coordinators))
    members = _members(settings, host, cluster, offers[node_rank], node_rank)
    return [*members, *evaluators(settings, host, cluster, node_rank)]


def placed(settings: LaunchSettings, offers: Sequence[Offer]) -> list[dict[str, str]]:
    """What runs on each machine: by role, the ranks as `0-2,5`."""
    cluster = _cluster(settings, offers)
    everywhere = [*_everywhere(cluster)]
    found = [_placed(everywhere, _offered(each, cluster)) for each in offers]
    wish = settings.role_settings(Role.EVALUATOR)
    for number, ranks in enumerate(found):
        if wish.count and (not number or wish.each):
            ranks[Role.EVALUATOR] = [*range(number * wish.count, (number + 1) * wish.count)]
    return [{role: written_ranks(ranks) for role, ranks in each.items()} for each in found]


def _placed(everywhere: Sequence[_Everywhere], here: Sequence[tuple[str, ...]]) -> dict[str, list[int]]:
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
    )


def check_complete(settings: LaunchSettings, offers: Sequence[Offer]) -> None:
    """Raise UsageError for a parameter-server job of which all machines together lack trainers or servers: it
    would end before it has done anything.
    """
    if not settings.run_mode.has_servers:
        return
    if not settings.trainers and not any(each.trainers for each in offers):
        raise UsageError("no machine has a trainer", hint="Give one of them --trainer_num 1 or more.")
    if not settings.servers and not any(each.servers for each in offers):
        raise UsageError("no machine has a server", hint="Give one of them --server_num 1 or more.")


def _check_unique(endpoints: Sequence[str]) -> None:
    if len(set(endpoints)) < len(endpoints):
        twice = next(each for number, each in enumerate(endpoints) if each in endpoints[:number])
        raise UsageError(
            f"{twice} is an endpoint of two processes", hint="Give every machine its own address with --host."
        )


def _all(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(endpoint for part in parts for endpoint in part)


def _stages(offers: Sequence[Offer]) -> tuple[tuple[str, ...], ...]:
    number = max((len(each.heter) for each in offers), default=0)
    return tuple(
        _all(each.heter[stage] for each in offers if stage < len(each.heter)) for stage in range(number)
    )


def _master(settings: LaunchSettings, offers: Sequence[Offer]) -> str:
    """What the first machine serves, under the address that was asked for, if one was."""
    host, port = split_endpoint(offers[0].service)
    return join_endpoint(settings.master_addr or host, port)


def _gloo(settings: LaunchSettings, servers: tuple[str, ...], offers: Sequence[Offer]) -> Gloo:
    """At the first server's host (Paddle)."""
    first = next((each for each in offers if servers and servers[0] in each.servers), offers[0])
    host = split_endpoint(servers[0] if servers else first.gloo)[0]
    endpoint = join_endpoint(host, split_endpoint(first.gloo)[1])
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


def _members(
    settings: LaunchSettings, host: Host, cluster: Cluster, own: Offer, node_rank: int
) -> list[Member]:
    sizes = {Role.HETER: sum(map(len, own.heter))}
    members = []
    placed = dict.fromkeys(Role, 0)  # on this machine, so far
    for (role, stage, ranks), here in zip(_everywhere(cluster), _offered(own, cluster), strict=True):
        for endpoint in here:
            local_rank = placed[role]
            placed[role] += 1
            part = _devices(settings, host, cluster, role, local_rank, len(here), stage)
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
                    device_kind=host.device_kind if part.own else "gpu",
                    devices=part.own,
                    visible=",".join(part.visible) if part.own else None,
                )
            )
    return members


def _everywhere(cluster: Cluster) -> Iterator[_Everywhere]:
    """What the job has on all machines together, in the order of `_here`. Stages of one role count on."""
    yield Role.SERVER, 0, _numbered(cluster.servers)
    yield Role.TRAINER, 1, _numbered(cluster.trainers)
    before = 0
    for stage, endpoints in enumerate(cluster.heter, start=2):
        yield Role.HETER, stage, _numbered(endpoints, before)
        before += len(endpoints)
    yield Role.COORDINATOR, 0, _numbered(cluster.coordinators)


def _offered(offer: Offer, cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    none = ((),) * (len(cluster.heter) - len(offer.heter))
    return (offer.servers, offer.trainers, *offer.heter, *none, offer.coordinators)


def _numbered(endpoints: Sequence[str], before: int = 0) -> dict[str, int]:
    return {endpoint: number for number, endpoint in enumerate(endpoints, start=before)}


def _backend(settings: LaunchSettings, host: Host) -> str | None:
    """PADDLE_DISTRI_BACKEND: what was asked for, else gloo without a device and nothing with one."""
    if settings.backend != "auto":
        return settings.backend
    return None if host.devices else "gloo"


def _computes_on(kind: str, cluster: Cluster, role: Role, stage: int) -> bool:
    if cluster.mode is Mode.PS_HETER:
        return stage > 0 and cluster.stage_devices[stage - 1] == kind
    return role is Role.TRAINER


def _devices(
    settings: LaunchSettings, host: Host, cluster: Cluster, role: Role, index: int, size: int, stage: int
) -> Share:
    """Collective trainers share the node's devices. In ps modes only --devices binds, one each in turn
    (Paddle's legacy launcher, whose ps-gpu this is); in ps-heter those of stages that compute on it.
    """
    if cluster.mode in (Mode.COLLECTIVE, Mode.RPC):
        return share(host.devices, index, size, whole_node=settings.visible_devices == "node")
    if host.wanted_devices and host.devices and _computes_on(host.device_kind, cluster, role, stage):
        return Share((host.devices[index % len(host.devices)],), (0,))
    return Share()
