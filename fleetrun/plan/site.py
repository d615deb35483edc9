"""Where this machine stands among those of the job: its address, its place in a list, and where they meet."""

from __future__ import annotations

import contextlib
import socket

from fleetrun.envs.settings.options import LaunchSettings
from fleetrun.envs.settings.parsing import join_endpoint, split_endpoint
from fleetrun.envs.settings.resolve import STORE_PORT
from fleetrun.errors import UsageError
from fleetrun.host.network import LOOPBACK, is_this_host
from fleetrun.values import dataclass

_EVERYWHERE = ("localhost", "::1")
_SOMEWHERE = "192.0.2.1"  # an address of nobody (RFC 5737): which of ours would be used to get there?


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """`address` is this machine's; `nnodes` the fewest and most machines.

    `machines` are those of a list (--ips or endpoint lists) in order, and `hosts` those of them that are this
    machine; `rank` its place there, else what --rank says. `master` is where they meet; None: this machine
    says.
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
    """Raises UsageError when this machine is none of those listed, or it is not clear which."""
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
            f"{' and '.join(mine)} are both this machine, and there are others in {_origin(settings)}",
            hint="Name each machine once, or say with --host which of them this is.",
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
            f"{own[0]} in {_origin(settings)} is on every machine that machine itself, "
            f"and {', '.join(others)} {'is' if len(others) == 1 else 'are'} not",
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
        mine = tuple(each for each in listed if _same(each, settings.host))
        known = settings.host
    else:
        own = None if settings.nic is None else address_of(settings.nic)
        mine = tuple(each for each in listed if (is_this_host(each) if own is None else _same(each, own)))
        known = own or ", ".join(addresses())
    if not mine:
        unknown = [each for each in listed if not _resolved(each)]
        hint = "Say with --host which of them it is, or put its address there."
        raise UsageError(
            f"this machine ({known}) is not in {_origin(settings)}: {', '.join(listed)}",
            hint=f"{', '.join(unknown)}: no such name is known here. {hint}" if unknown else hint,
        )
    return mine


def _same(one: str, other: str) -> bool:
    """Whether two names or addresses have an address in common."""
    return bool(_resolved(one) & _resolved(other))


def _resolved(host: str) -> set[str]:
    try:
        return {str(row[4][0]) for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def _address(settings: LaunchSettings, master: str | None) -> str:
    """--host, else that of --nic, else the one from which the meeting point is reached."""
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


def source_address(host: str) -> str | None:
    """The address that this machine would use to talk to `host`; nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def address_of(nic: str) -> str:
    """The first address of a network interface, IPv4 before IPv6. Raises UsageError for one without."""
    found = _interfaces()
    if nic not in found:
        raise UsageError(
            f"--nic {nic}: there is no such network interface", hint=f"There are {', '.join(found)}."
        )
    if not found[nic]:
        raise UsageError(f"--nic {nic}: this network interface has no address")
    return found[nic][0]


def addresses() -> list[str]:
    """All addresses of this machine, loopback last."""
    found = [each for rows in _interfaces().values() for each in rows]
    return sorted(found, key=lambda each: each in (LOOPBACK, "::1"))


def _interfaces() -> dict[str, list[str]]:
    import psutil  # late: 37 ms, and only several machines need it

    families = (socket.AF_INET, socket.AF_INET6)
    found = {}
    for name, rows in psutil.net_if_addrs().items():
        usable = [row for row in rows if row.family in families and not row.address.startswith("fe80:")]
        usable.sort(key=lambda row: families.index(row.family))
        found[name] = [row.address.partition("%")[0] for row in usable]
    return found
