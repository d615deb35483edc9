"""The place of this machine in a job: its address, its rank in a list, and where the machines meet."""

from __future__ import annotations

from fleetrun.envs.contract import join_endpoint, split_endpoint
from fleetrun.envs.settings.options import LaunchSettings
from fleetrun.envs.settings.resolve import STORE_PORT
from fleetrun.errors import UsageError
from fleetrun.host.network import (
    LOOPBACK,
    address_of,
    addresses,
    is_this_host,
    resolved,
    same_host,
    source_address,
)
from fleetrun.values import dataclass

_EVERYWHERE = ("localhost", "::1")
_SOMEWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737): stands for any remote address


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """`address` is this machine's; `nnodes` the fewest and most machines.

    `machines` are those of a list (--ips or endpoint lists) in order, and `hosts` those of them that are this
    machine; `rank` its place there, else what --rank says. `master` is where they meet; None: this machine
    chooses.
    """

    address: str
    nnodes: tuple[int, int] = (1, 1)
    machines: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    rank: int = -1
    master: str | None = None

    @property
    def alone(self) -> bool:
        return self.nnodes == (1, 1) and not (self.master or "").startswith("etcd://")


def locate(settings: LaunchSettings) -> Site:
    """Raises UsageError when this machine is not in the list, or matches more than one entry."""
    listed = settings.ips or _listed(settings)
    if not listed:
        master = settings.master if _several(settings) else None
        address = _address(settings, master)
        return Site(address=address, nnodes=settings.nnodes, rank=settings.rank, master=master)
    mine = _mine(settings, listed)
    if set(mine) == set(listed) and not (settings.ips and len(listed) > 1):
        return Site(address=settings.host or listed[0], hosts=None, machines=listed)
    if len(mine) > 1:
        raise UsageError(
            f"{' and '.join(mine)} are both this machine, but there are others in {_origin(settings)}",
            hint="Name each machine once, or choose this one with --host.",
        )
    _refuse_loopback(settings, listed)
    rank = listed.index(mine[0])
    if settings.rank not in (-1, rank):
        raise UsageError(
            f"--rank {settings.rank} does not agree with {_origin(settings)}: "
            f"{mine[0]} is machine {rank} there, and this is {mine[0]}"
        )
    return Site(
        address=settings.host or mine[0],
        nnodes=(len(listed), len(listed)),
        machines=listed,
        hosts=mine,
        rank=rank,
        master=settings.master or join_endpoint(listed[0], STORE_PORT),
    )


def _refuse_loopback(settings: LaunchSettings, listed: tuple[str, ...]) -> None:
    """Raises UsageError for a list in which an address means every machine, and others only one."""
    own = [each for each in listed if each in _EVERYWHERE or each.startswith("127.")]
    if own and len(own) < len(listed):
        others = [each for each in listed if each not in own]
        raise UsageError(
            f"{own[0]} in {_origin(settings)} means a different machine on every machine, "
            f"and {', '.join(others)} {'does' if len(others) == 1 else 'do'} not",
            hint="Give the address by which the other machines reach this one.",
        )


def _several(settings: LaunchSettings) -> bool:
    return settings.nnodes != (1, 1) or (settings.master or "").startswith("etcd://")


def _listed(settings: LaunchSettings) -> tuple[str, ...]:
    """The machines of the endpoint lists, in the order in which they appear."""
    stages = tuple(endpoint for stage in settings.heter_workers for endpoint in stage)
    endpoints = (*settings.servers, *settings.trainers, *stages, *settings.coordinators)
    return tuple(dict.fromkeys(split_endpoint(each)[0] for each in endpoints))


def _origin(settings: LaunchSettings) -> str:
    return "--ips" if settings.ips else "the endpoint lists"


def _mine(settings: LaunchSettings, listed: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the listed machines this one is: what --host says, else those whose address it has."""
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
        unknown = [each for each in listed if not resolved(each)]
        hint = "Choose it with --host, or add its address."
        raise UsageError(
            f"this machine ({known}) is not in {_origin(settings)}: {', '.join(listed)}",
            hint=f"{', '.join(unknown)}: this name cannot be resolved here. {hint}" if unknown else hint,
        )
    return mine


def _address(settings: LaunchSettings, master: str | None) -> str:
    """--host, else that of --nic, else the one that reaches the rendezvous endpoint."""
    if settings.host is not None:
        if not is_this_host(settings.host):
            raise UsageError(
                f"{settings.host} is not an address of this machine, which has {', '.join(addresses())}",
                hint="--host and POD_IP give this machine's own address.",
            )
        return settings.host
    if settings.nic is not None:
        return address_of(settings.nic)
    if not _several(settings):
        return LOOPBACK
    target = (master or "").removeprefix("etcd://").partition("?")[0].split(",")[0]
    there = split_endpoint(target)[0] if target else _SOMEWHERE
    return source_address(there) or source_address(_SOMEWHERE) or (*addresses(), LOOPBACK)[0]
