"""From the offers of all machines to members: role, rank, endpoint and devices of every process. Pure. Ranks
follow Paddle's launchers (which of them, where they differ, is said at each rule).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fleetrun.envs.addresses import join_endpoint, split_endpoint
from fleetrun.envs.contract import Cluster, Gloo, Member, Mode, Role
from fleetrun.envs.evaluators import evaluators
from fleetrun.envs.offers import Host, Offer
from fleetrun.envs.ranges import written
from fleetrun.envs.settings import LaunchSettings
from fleetrun.envs.shares import Share, share
from fleetrun.errors import UsageError

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
    found = [_placed(everywhere, _here(each, cluster)) for each in offers]
    wish = settings.wish(Role.EVALUATOR)
    for number, ranks in enumerate(found):
        if wish.count and (not number or wish.each):
            ranks[Role.EVALUATOR] = [*range(number * wish.count, (number + 1) * wish.count)]
    return [{role: written(ranks) for role, ranks in each.items()} for each in found]


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
    for (role, stage, ranks), here in zip(_everywhere(cluster), _here(own, cluster), strict=True):
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


def _here(offer: Offer, cluster: Cluster) -> tuple[tuple[str, ...], ...]:
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
