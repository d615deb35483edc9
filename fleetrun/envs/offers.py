"""What one machine brings to a job: how many processes of each role, and the endpoint of each. Knows no other
machine. Shares follow Paddle's launchers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fleetrun.envs.addresses import join_endpoint, split_endpoint
from fleetrun.envs.settings import LaunchSettings
from fleetrun.errors import PortError, UsageError
from fleetrun.frozen import dataclass

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


def counts(settings: LaunchSettings, host: Host) -> Counts:
    if settings.run_mode.has_servers:
        heter = tuple(len(_here(stage, host)) for stage in settings.heter_workers)
        return Counts(
            servers=_number(settings.servers, settings.server_num, host),
            trainers=_number(settings.trainers, settings.trainer_num, host),
            heter=heter or settings.heter_worker_num,
            coordinators=len(_here(settings.coordinators, host)) or settings.coordinator_num or 0,
        )
    return Counts(trainers=_nproc(settings, host))


def _number(listed: tuple[str, ...], counted: int | None, host: Host) -> int:
    """Of a list what is here, else what was said, else one."""
    if listed:
        return len(_here(listed, host))
    return 1 if counted is None else counted


def _here(endpoints: tuple[str, ...], host: Host) -> tuple[str, ...]:
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
    number = counts(settings, host)
    ports = _PortPlan(settings, host, reserve)
    servers = ports.endpoints(settings.servers, number.servers)
    trainers = ports.endpoints(settings.trainers, number.trainers)
    given = settings.heter_workers or ((),) * len(number.heter)
    heter = tuple(ports.endpoints(stage, size) for stage, size in zip(given, number.heter, strict=True))
    coordinators = ports.endpoints(settings.coordinators, number.coordinators)
    gloo = ""
    if settings.run_mode.has_servers:
        gloo = join_endpoint(host.address, _gloo(settings, host, ports))
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
            here = _here(given, self._host)
            for endpoint in here:
                self._reserve(split_endpoint(endpoint)[1])
            return here
        return tuple(join_endpoint(self._host.address, self.one()) for _ in range(number))


def _gloo(settings: LaunchSettings, host: Host, ports: _PortPlan) -> int:
    """Paddle: at the first server's host; --gloo_port counts with endpoint lists, --http_port or any port
    without.
    """
    wanted = settings.http_port
    if wanted is None and settings.servers and _here(settings.servers[:1], host):
        wanted = settings.gloo_port
    try:
        return ports.one(wanted)
    except PortError:
        if wanted != PADDLES_GLOO_PORT:  # asked for by name
            raise
        return ports.one()
