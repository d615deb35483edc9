"""Opens the rendezvous store of a job: an etcd, an etcd that machines of the job run together, the embedded
store of another node, or one that this node hosts.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleetrun.aliases import Callback, Say
from fleetrun.elastic.store import Store
from fleetrun.envs.contract import join_endpoint, split_endpoint
from fleetrun.errors import LaunchError, PortError, ReservedPortError, UsageError
from fleetrun.frozen import frozen
from fleetrun.host.network import Ports, accepts, host_addresses, is_this_host
from fleetrun.pod.loop import Loop

if TYPE_CHECKING:
    from fleetrun.elastic.etcd.tls import Certificate
    from fleetrun.envs.curve import CurveKeys

PREFERRED_PORT = 6768
_OTHER_PORT = "Give another port in --master."
START_CHECK_AFTER = 10.0
"""Seconds after which a port that another process holds, and a name without an address, are errors: until
then the job's host may only be slow to start.
"""
SHORTEST_LEASE = 5.0
"""Seconds, where several machines serve the store."""

CLOSE_TIMEOUT = 3.0
"""Seconds that the host of the store waits for the other nodes to read how the job ended."""


@frozen(kw_only=True)
class MeetingOptions:
    """Which store: `master` is host:port, several of these with commas (the machines run an etcd), etcd://...
    or None (this node chooses a port and hosts the store).

    `address` is this machine's, `lease` is in seconds. `first`: this is known to be node 0, which hosts the
    store where `master` is an address in front of this machine. `patience`: seconds in which the names in
    `master` get their addresses; less once `urgent` is readable. Helper processes are put into `companions`;
    `tell` gets what the user should know.
    """

    master: str | None
    address: str
    job_id: str
    node_id: str
    lease: float
    token: str = ""
    first: bool = False
    patience: float = 0.0
    urgent: int | None = None
    companions: set[int] = field(default_factory=set)
    tell: Say = field(default=lambda text: None)


StartCheck = Callable[[], LaunchError | None]
"""While the rendezvous store was never reached: an error if it will never be reached, else None."""


@dataclass(slots=True, kw_only=True)
class Meeting:
    """An open rendezvous store. `endpoint` is its address for the other nodes. `hosted`: this process hosts
    it, and it ends with this process; `member`: this process has one of several parts of it. `open_to_all`:
    any program that reaches `endpoint` can write into it.
    `start_checks`: checks, and the seconds from the start after which each is made.
    """

    store: Store
    endpoint: str
    hosted: bool = False
    member: bool = False
    open_to_all: bool = False
    close: Callback = field(default=lambda: None)
    start_checks: tuple[tuple[float, StartCheck], ...] = ()


def check_meeting(master: str | None) -> None:
    """Raises UsageError for an etcd address with unknown parameters or missing files."""
    if master is not None and master.startswith("etcd://"):
        from fleetrun.elastic.etcd.wire import parse_address

        parse_address(master)


def open_meeting(options: MeetingOptions, loop: Loop, ports: Ports) -> Meeting:
    """Raises LaunchError for an address that cannot be used."""
    if options.master is not None and options.master.startswith("etcd://"):
        from fleetrun.elastic.etcd.store import EtcdStore  # late: a dependency of its own

        etcd = EtcdStore(
            loop, options.master, job_id=options.job_id, node_id=options.node_id, lease=options.lease
        )
        return Meeting(store=etcd, endpoint=options.master.partition("?")[0])
    if options.master is not None and "," in options.master:
        return _together(options, options.master, loop, ports)
    endpoint = options.master or join_endpoint(options.address, _free_port(ports))
    holder, at = _host_or_holder(options, endpoint, ports) if options.master is not None else (None, endpoint)
    if holder is None:
        return _hosted(options, endpoint, at, loop)
    from fleetrun.elastic.embedded.client import ZmqStore  # late: zmq

    store = ZmqStore(
        loop,
        endpoint,
        job_id=options.job_id,
        node_id=options.node_id,
        lease=options.lease,
        keys=_keys(options),
    )

    def held() -> LaunchError | None:
        if not holder:
            return None
        return PortError(f"{holder}, which does not serve a rendezvous store", hint=_OTHER_PORT)

    def nameless() -> LaunchError | None:
        why = store.nameless
        late = options.patience > START_CHECK_AFTER
        return UsageError(f"--master {endpoint}: {why}") if why and not late else None

    checks = ((START_CHECK_AFTER, held), (START_CHECK_AFTER, nameless))
    return Meeting(store=store, endpoint=endpoint, start_checks=checks)


def _together(options: MeetingOptions, master: str, loop: Loop, ports: Ports) -> Meeting:
    """The machines of the list run an etcd."""
    from fleetrun.elastic.etcd.store import EtcdStore  # isort: skip  first: it tells which package is missing
    from fleetrun.elastic.etcd.member import Member, own_member

    if options.lease < SHORTEST_LEASE:
        raise UsageError(
            f"--heartbeat_timeout is {options.lease:g} s; with several machines in --master it must be "
            f"{SHORTEST_LEASE:g} s or more: they may take two of them to agree on another leader"
        )
    endpoints = master.split(",")
    _await_names(options, [split_endpoint(each)[0] for each in endpoints])
    url, certificate = _url_together(master, options.token)
    own = own_member(endpoints, ports)
    place = endpoints.index(own) if own is not None else None
    job, lease = options.job_id, options.lease
    store = EtcdStore(loop, url, job_id=job, node_id=options.node_id, lease=lease, fenced=True, own=place)
    if own is None:
        return Meeting(store=store, endpoint=master)
    member = Member(loop, options.companions, endpoints, own, job, lease, certificate, options.tell)
    return Meeting(
        store=store, endpoint=master, member=True, open_to_all=certificate is None, close=member.close
    )


def _url_together(master: str, token: str) -> tuple[str, Certificate | None]:
    """The address of the etcd that the machines of the list run."""
    from fleetrun.elastic.etcd.tls import Certificate

    if not token:
        return f"etcd://{master}", None
    made = Certificate(token, master.split(","))
    files = {"cacert": made.certificate, "cert": made.certificate, "key": made.key}
    return f"etcd://{master}?{'&'.join(f'{name}={path}' for name, path in files.items())}", made


GUEST_LEASE = 10.0
"""Seconds after which what a command asked for is dropped, if that is not heard of."""


def open_as_guest(master: str, job_id: str, name: str, token: str, loop: Loop) -> Store:
    """A client of the store at `master` that takes no part in the job. `name` is unique. Raises
    LaunchError.
    """
    from fleetrun.elastic.embedded.wire import GUEST

    id_ = f"{GUEST}{name}"
    if master.startswith("etcd://") or "," in master:
        from fleetrun.elastic.etcd.store import EtcdStore

        url = master if master.startswith("etcd://") else _url_together(master, token)[0]
        return EtcdStore(loop, url, job_id=job_id, node_id=id_, lease=GUEST_LEASE)
    from fleetrun.elastic.embedded.client import ZmqStore
    from fleetrun.elastic.embedded.sockets import store_keys

    keys = store_keys(token)
    return ZmqStore(loop, master, job_id=job_id, node_id=id_, lease=GUEST_LEASE, keys=keys)


def _free_port(ports: Ports) -> int:
    try:
        return ports.fixed(PREFERRED_PORT)
    except PortError:
        return ports.any()


def _await_names(options: MeetingOptions, hosts: list[str]) -> None:
    """Until one of the hosts is this machine, or all have addresses: Kubernetes gives names to pods late."""
    deadline = time.monotonic() + options.patience
    urgent = [] if options.urgent is None else [options.urgent]
    told = False
    while not any(map(is_this_host, hosts)) and not all(map(host_addresses, hosts)):
        left = deadline - time.monotonic()
        if not told:
            options.tell(f"--master {options.master}: not every name has an address yet; asking again")
            told = True
        if left <= 0 or select.select(urgent, [], [], min(_LOOK, left))[0]:
            return


_LOOK = 0.5
_ANSWER = 3.0
"""Seconds that node 0 waits for a store at an address that is not its own."""


def _host_or_holder(options: MeetingOptions, endpoint: str, ports: Ports) -> tuple[str | None, str]:
    """None and where to listen: this process is the first fleetrun to take the port, on the machine that has
    the address or is node 0, so it hosts the store. Else the process that holds the port; empty when that
    cannot be seen from here.
    """
    host, port = split_endpoint(endpoint)
    at = endpoint
    if not options.first:
        _await_names(options, [host])
    if not is_this_host(host):
        if not options.first or (host_addresses(host) and accepts(host, port, _ANSWER)):
            return "", at
        at = join_endpoint("::" if ":" in options.address else "0.0.0.0", port)
        options.tell(
            f"{host} is not an address of this machine; as node 0 it serves the store at port {port}"
        )
    try:
        ports.fixed(port)
    except ReservedPortError as error:
        return f"machines cannot meet at {endpoint}: {error.message}", at
    except PortError as error:
        raise PortError(f"machines cannot meet at {endpoint}: {error.message}", hint=_OTHER_PORT) from None
    return None, at


def _hosted(options: MeetingOptions, endpoint: str, at: str, loop: Loop) -> Meeting:
    from fleetrun.elastic.embedded.server import StoreServer
    from fleetrun.elastic.memory_store import MemoryStore
    from fleetrun.elastic.store import Ledger

    ledger = Ledger()
    server = StoreServer(
        ledger, loop, at, job_id=options.job_id, lease=options.lease, keys=_keys(options), notice=options.tell
    )

    def close() -> None:
        """Waits a limited time for the other nodes to leave."""
        if server.connected:
            limit = loop.after(CLOSE_TIMEOUT, loop.stop)
            server.when_idle(loop.stop)
            loop.run()
            limit.cancel()
        server.close()

    store = MemoryStore(ledger, loop, options.node_id, lease=options.lease)
    return Meeting(store=store, endpoint=endpoint, hosted=True, open_to_all=not options.token, close=close)


def _keys(options: MeetingOptions) -> CurveKeys | None:
    from fleetrun.elastic.embedded.sockets import store_keys  # late: zmq

    return store_keys(options.token)
