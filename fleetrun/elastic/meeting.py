"""Open the rendezvous store of a job. The store is an external etcd, an etcd that nodes of the job run
together, or the embedded store of this or another node.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleetrun.aliases import Callback, ShowText
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
_OTHER_PORT = "Use another port in --master."
START_CHECK_AFTER = 10.0
"""Seconds until two states become errors: another process holds the port, or a name has no address.

Before that, the job's host may only be slow to start.
"""
SHORTEST_LEASE = 5.0
"""The shortest lease where several nodes serve the store, in seconds."""

CLOSE_TIMEOUT = 3.0
"""Seconds that the host of the store waits for the other nodes to read how the job ended."""


@frozen(kw_only=True)
class MeetingOptions:
    """The choice of a store."""

    master: str | None
    """host:port, several of these with commas (the nodes run an etcd), etcd://..., or None (this node chooses
    a port and hosts the store).
    """
    address: str  # this node's address
    job_id: str
    node_id: str
    lease: float  # seconds
    token: str = ""
    first: bool = False
    """True on node 0. It hosts the store if `master` is an address in front of this node."""
    patience: float = 0.0
    """Seconds for the names in `master` to get addresses."""
    urgent: int | None = None
    """When this descriptor becomes readable, `patience` ends."""
    companions: set[int] = field(default_factory=set)  # the pids of helper processes
    show: ShowText = field(default=lambda text: None)  # shows a text to the user


StartCheck = Callable[[], LaunchError | None]
"""A check of a rendezvous store that was never reached. It returns an error if the store can never be
reached, else None.
"""


@dataclass(slots=True, kw_only=True)
class Meeting:
    """An open rendezvous store."""

    store: Store
    endpoint: str  # the store's address for the other nodes
    hosted: bool = False  # this process hosts the store, which ends with this process
    member: bool = False  # this process runs one of several members of the store
    open_to_all: bool = False  # any program that reaches `endpoint` can write to the store
    close: Callback = field(default=lambda: None)
    start_checks: tuple[tuple[float, StartCheck], ...] = ()
    """Checks, with the seconds from the start after which each is made."""


def check_meeting(master: str | None) -> None:
    """Check the address. Raises UsageError for an etcd address with unknown parameters or missing files."""
    if master is not None and master.startswith("etcd://"):
        from fleetrun.elastic.etcd.wire import parse_address

        parse_address(master)


def open_meeting(options: MeetingOptions, loop: Loop, ports: Ports) -> Meeting:
    """Open the store. Raises LaunchError for an unusable address."""
    if options.master is not None and options.master.startswith("etcd://"):
        from fleetrun.elastic.etcd.store import EtcdStore  # late: it needs another package

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
    """Open the etcd that the nodes of the list run together."""
    from fleetrun.elastic.etcd.store import EtcdStore  # isort: skip  first: its error names the package
    from fleetrun.elastic.etcd.member import Member, own_member

    if options.lease < SHORTEST_LEASE:
        raise UsageError(
            f"--heartbeat_timeout is {options.lease:g} s; with several nodes in --master it must be "
            f"{SHORTEST_LEASE:g} s or more, because an election may take two"
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
    member = Member(loop, options.companions, endpoints, own, job, lease, certificate, options.show)
    return Meeting(
        store=store, endpoint=master, member=True, open_to_all=certificate is None, close=member.close
    )


def _url_together(master: str, token: str) -> tuple[str, Certificate | None]:
    """Return the address of the etcd that the nodes of the list run, and the certificate if the job has a
    token.
    """
    from fleetrun.elastic.etcd.tls import Certificate

    if not token:
        return f"etcd://{master}", None
    made = Certificate(token, master.split(","))
    files = {"cacert": made.certificate, "cert": made.certificate, "key": made.key}
    return f"etcd://{master}?{'&'.join(f'{name}={path}' for name, path in files.items())}", made


GUEST_LEASE = 10.0
"""Seconds of silence after which the requests of a command are dropped."""


def open_as_guest(master: str, job_id: str, name: str, token: str, loop: Loop) -> Store:
    """Open a client of the store at `master` for a command from outside the job. `name` must be unique.

    Raises LaunchError.
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
    """Wait until one of the hosts is this node, or all have addresses. Kubernetes gives names to pods
    late.
    """
    deadline = time.monotonic() + options.patience
    urgent = [] if options.urgent is None else [options.urgent]
    reported = False
    while not any(map(is_this_host, hosts)) and not all(map(host_addresses, hosts)):
        left = deadline - time.monotonic()
        if not reported:
            options.show(f"--master {options.master}: not every name has an address yet; asking again")
            reported = True
        if left <= 0 or select.select(urgent, [], [], min(_LOOK, left))[0]:
            return


_LOOK = 0.5
_ANSWER = 3.0
"""Seconds that node 0 waits for a store at an address of another host."""


def _host_or_holder(options: MeetingOptions, endpoint: str, ports: Ports) -> tuple[str | None, str]:
    """Return None if this process hosts the store, or else a text on the process that holds the port. Also
    return where to listen.

    This process hosts the store if it is the first fleetrun to take the port, on the node that has the
    address or is node 0. The text is empty if the process that holds the port cannot be seen from here.
    """
    host, port = split_endpoint(endpoint)
    at = endpoint
    if not options.first:
        _await_names(options, [host])
    if not is_this_host(host):
        if not options.first or (host_addresses(host) and accepts(host, port, _ANSWER)):
            return "", at
        at = join_endpoint("::" if ":" in options.address else "0.0.0.0", port)
        options.show(
            f"{host} is not an address of this node, which must serve the store at port {port} as node 0"
        )
    try:
        ports.fixed(port)
    except ReservedPortError as error:
        return f"nodes cannot join at {endpoint}: {error.message}", at
    except PortError as error:
        raise PortError(f"nodes cannot join at {endpoint}: {error.message}", hint=_OTHER_PORT) from None
    return None, at


def _hosted(options: MeetingOptions, endpoint: str, at: str, loop: Loop) -> Meeting:
    from fleetrun.elastic.embedded.server import StoreServer
    from fleetrun.elastic.memory_store import MemoryStore
    from fleetrun.elastic.store import Ledger

    ledger = Ledger()
    server = StoreServer(
        ledger, loop, at, job_id=options.job_id, lease=options.lease, keys=_keys(options), notice=options.show
    )

    def close() -> None:
        """Close the store, after a limited wait for the other nodes to leave."""
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
