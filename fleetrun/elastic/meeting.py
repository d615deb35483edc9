"""Where the nodes meet: which store, and who serves it. Knows no rule of the meeting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleetrun.elastic.store import Store
from fleetrun.envs.contract import join_endpoint, split_endpoint
from fleetrun.errors import LaunchError, PortError, ReservedPortError, UsageError
from fleetrun.host.network import Ports, is_this_host
from fleetrun.pod.loop import Loop

if TYPE_CHECKING:
    from fleetrun.envs.curve import CurveKeys

PREFERRED_PORT = 6768
_OTHER_PORT = "Give another port in --master."
DOUBTED = 10.0
"""After how many seconds a port that is held, and a name that nobody knows, are taken for mistakes. Who holds
the port may be slow to start, and so may this node: neither is one.
"""
LAST_WORDS = 3.0
"""For how many seconds the node that serves the store waits for the others to have read how the job ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingOptions:
    """What a node says of the meeting: `master` is host:port, etcd://... or None (this machine says where);
    `address` is this machine's, `lease` in seconds. `late_names`: names may become known later than their
    machines are asked for.
    """

    master: str | None
    address: str
    job_id: str
    node_id: str
    lease: float
    token: str = ""
    late_names: bool = False


Doubt = Callable[[], LaunchError | None]
"""Asked while the meeting point was never reached: whether there is a reason to wait no longer."""


@dataclass(slots=True, kw_only=True)
class Meeting:
    """`endpoint` is where others come to. `hosted`: this process serves it. `doubts`: seconds from the start,
    and what to ask then.
    """

    store: Store
    endpoint: str
    hosted: bool = False
    close: Callable[[], None] = field(default=lambda: None)
    doubts: tuple[tuple[float, Doubt], ...] = ()


def check_meeting(master: str | None) -> None:
    """Raises UsageError for an address with parameters that nobody knows, or files that are not there."""
    if master is not None and master.startswith("etcd://"):
        from fleetrun.elastic.etcd.wire import parse_address

        parse_address(master)


def open_meeting(wish: MeetingOptions, loop: Loop, ports: Ports) -> Meeting:
    """Raises LaunchError for an address at which nobody can meet."""
    if wish.master is not None and wish.master.startswith("etcd://"):
        from fleetrun.elastic.etcd.store import EtcdStore  # late: a dependency of its own

        etcd = EtcdStore(loop, wish.master, job_id=wish.job_id, node_id=wish.node_id, lease=wish.lease)
        return Meeting(store=etcd, endpoint=wish.master.partition("?")[0])
    endpoint = wish.master or join_endpoint(wish.address, _free_port(ports))
    holder = _host_or_holder(endpoint, ports) if wish.master is not None else None
    if holder is None:
        return _hosted(wish, endpoint, loop)
    from fleetrun.elastic.embedded.client import ZmqStore  # late: zmq

    store = ZmqStore(
        loop, endpoint, job_id=wish.job_id, node_id=wish.node_id, lease=wish.lease, keys=_keys(wish)
    )

    def held() -> LaunchError | None:
        if not holder:
            return None
        return PortError(f"{holder}, which serves no meeting point there", hint=_OTHER_PORT)

    def nameless() -> LaunchError | None:
        why = store.nameless
        return UsageError(f"--master {endpoint}: {why}") if why and not wish.late_names else None

    return Meeting(store=store, endpoint=endpoint, doubts=((DOUBTED, held), (DOUBTED, nameless)))


def _free_port(ports: Ports) -> int:
    try:
        return ports.fixed(PREFERRED_PORT)
    except PortError:
        return ports.any()


def _host_or_holder(endpoint: str, ports: Ports) -> str | None:
    """None: this process is the first fleetrun that takes the port on the machine that owns the address, and
    serves it. Else who took it before, as far as that can be seen from here.
    """
    host, port = split_endpoint(endpoint)
    if not is_this_host(host):
        return ""
    try:
        ports.fixed(port)
    except ReservedPortError as error:
        return f"machines cannot meet at {endpoint}: {error.message}"
    except PortError as error:
        raise PortError(f"machines cannot meet at {endpoint}: {error.message}", hint=_OTHER_PORT) from None
    return None


def _hosted(wish: MeetingOptions, endpoint: str, loop: Loop) -> Meeting:
    from fleetrun.elastic.embedded.server import StoreServer
    from fleetrun.elastic.memory_store import MemoryStore
    from fleetrun.elastic.store import Ledger

    ledger = Ledger()
    server = StoreServer(ledger, loop, endpoint, job_id=wish.job_id, lease=wish.lease, keys=_keys(wish))

    def close() -> None:
        """Wait for the others to be gone, but not long."""
        if server.connected:
            limit = loop.after(LAST_WORDS, loop.stop)
            server.when_idle(loop.stop)
            loop.run()
            limit.cancel()
        server.close()

    store = MemoryStore(ledger, loop, wish.node_id, lease=wish.lease)
    return Meeting(store=store, endpoint=endpoint, hosted=True, close=close)


def _keys(wish: MeetingOptions) -> CurveKeys | None:
    from fleetrun.elastic.embedded.sockets import store_keys  # late: zmq

    return store_keys(wish.token)
