"""Define role makers, which find this process's identity. `settle` chooses one for `fleet.init`.

PaddleCloudRoleMaker reads the environment. UserDefinedRoleMaker takes the script's arguments.
MPISymmetricRoleMaker makes every second process of an mpirun a server, without an MPI library. Each process
writes its endpoint to a store at the first process, and reads the others'. Paddle's MPISymetricRoleMaker uses
mpi4py for this.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore, TCPStore

from fleetrun.aliases import Environ
from fleetrun.envs.contract import split_endpoint
from fleetrun.frozen import frozen
from trainers.checks import flag, is_whole, whole
from trainers.errors import FleetError, UsageError
from trainers.roles.environment import (
    MpiProcess,
    Starter,
    identity_of,
    mpi_master,
    mpi_process,
    starter,
)
from trainers.roles.identity import EVALUATOR, Identity, Role, RoleMaker
from trainers.roles.parsing import Variables, apart, endpoints, position

# ---- The role maker for processes of a launcher, from the environment


class PaddleCloudRoleMaker:
    """The role maker for processes of fleetrun, torchrun, mpirun (collective) and Paddle's launchers.

    `is_collective` sets the kind of training. `environ` replaces the process's environment. `fleet.init` uses
    this role maker by default.
    """

    def __init__(self, is_collective: bool = False, *, environ: Environ | None = None) -> None:
        self.is_collective = flag("PaddleCloudRoleMaker is_collective", is_collective)
        self._environ = os.environ if environ is None else environ

    def identity(self) -> Identity:
        """Return the identity. Raises UsageError with the name of a missing, malformed or contradictory
        variable.
        """
        return identity_of(self._environ)


# ---- The role maker of `mpirun -n 4 python train.py`: every second process of each node is a server

_TIMEOUT = datetime.timedelta(minutes=5)
_ANYWHERE = ("192.0.2.1", 9)
"""A documentation address (RFC 5737) that receives no packets. It shows the source address of a route."""


@frozen
class Card:
    """The role and endpoint that a process publishes."""

    is_server: bool
    endpoint: str

    def __str__(self) -> str:
        return f"{'server' if self.is_server else 'worker'} {self.endpoint}"

    @classmethod
    def parse(cls, text: str) -> Card:
        role, _, endpoint = text.partition(" ")
        return cls(role == "server", endpoint)


class MPISymmetricRoleMaker:
    """The role maker of mpirun. Servers and workers alternate on each node, servers first, in equal numbers.

    They are counted in the order of their ranks, as in Paddle. `fleet.init()` under mpirun uses this role
    maker by default. On several nodes, set PADDLE_MASTER=host:port if mpirun's variables do not contain a
    meeting point. Set POD_IP if the address of this node cannot be detected.
    """

    is_collective = False

    def __init__(self, *, environ: Environ | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._identity: Identity | None = None

    def identity(self) -> Identity:
        """Return the identity. The first call waits for all processes.

        Raises UsageError for an odd number of processes, and FleetError if they do not meet within 5 minutes.
        """
        if self._identity is None:
            self._identity = self._found()
        return self._identity

    def _found(self) -> Identity:
        process = mpi_process(self._environ)
        if process is None:
            raise UsageError(
                "MPISymmetricRoleMaker needs at least two processes of one mpirun, but this process was "
                "started in another way. Start it with `mpirun -n 4 python train.py`, or with fleetrun."
            )
        server = is_server(process)
        master = mpi_master(process, self._environ)
        host, holder = own_host(process, master, self._environ), _reserve_port()
        try:
            cards = _exchanged(process, master, Card(server, f"{host}:{holder.getsockname()[1]}"))
        except (RuntimeError, ValueError) as error:
            holder.close()
            raise FleetError(
                f"The {process.size} processes of mpirun could not connect at {master}: {error}. Set "
                "PADDLE_MASTER=host:port to a free port on the node of the first process."
            ) from error
        holder.detach()  # stays open for the life of the process, because closing it would free the port
        return placed(process, cards, self._environ.get("PADDLE_DISTRI_BACKEND"))


def is_server(process: MpiProcess) -> bool:
    """Return True for the first, third, ... process of a node, or of the job if nodes do not count theirs.

    Raises UsageError for an odd number of processes.
    """
    number, what, count = process.local_rank, "on this node", process.local_size
    if not count:
        number, what, count = process.rank, "in all", process.size
    if count % 2:
        raise UsageError(
            f"MPISymmetricRoleMaker makes every second process a server, but mpirun started {count} {what}. "
            "Start an even number on each node."
        )
    return number % 2 == 0


def placed(process: MpiProcess, cards: Sequence[Card], backend: str | None = None) -> Identity:
    """Return the identity of one process from the cards of all processes, in rank order."""
    mine = cards[process.rank]
    trainers = tuple(card.endpoint for card in cards if not card.is_server)
    servers = tuple(card.endpoint for card in cards if card.is_server)
    return Identity(
        index=sum(card.is_server == mine.is_server for card in cards[: process.rank]),
        worker_num=len(trainers),
        trainers=trainers,
        servers=servers,
        is_server=mine.is_server,
        launched_as_ps=True,
        local_rank=process.local_rank // 2,
        master=trainers[0],
        backend=backend,
        source="mpirun",
    )


def _exchanged(process: MpiProcess, master: str, own: Card) -> list[Card]:
    """Exchange the cards of all processes, and return them in rank order."""
    host, port = split_endpoint(master)
    store = TCPStore(host, port, process.size, process.rank == 0, _TIMEOUT)
    job = PrefixStore(f"roles/{process.job}", store)  # another mpirun may use the same port
    job.set(str(process.rank), str(own))
    cards = [Card.parse(job.get(str(rank)).decode()) for rank in range(process.size)]
    job.set(f"left/{process.rank}", "")
    if process.rank == 0:  # the store ends with this process's reference, so it waits until all have read
        job.wait([f"left/{rank}" for rank in range(process.size)], _TIMEOUT)
    return cards


def _reserve_port() -> socket.socket:
    """Reserve a port that the kernel gives to no other process while it is open. Servers can still
    bind it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder


def own_host(process: MpiProcess, master: str, environ: Environ) -> str:
    """Return the address of this node for the others. Raises UsageError if it cannot be detected."""
    if environ.get("POD_IP"):
        return environ["POD_IP"]
    if process.one_host:
        return "127.0.0.1"
    for place in (split_endpoint(master), _ANYWHERE):
        address = _source_address(*place)
        if address is not None and not address.startswith("127.") and address != "::1":
            return f"[{address}]" if ":" in address else address
    raise UsageError(
        f"{socket.gethostname()} cannot find the address at which other nodes reach it. Set POD_IP."
    )


def _source_address(host: str, port: int) -> str | None:
    """Return the source address of packets to a place, or None without a route."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


# ---- The choice between the script's role maker and the one for the environment


def settle(role_maker: RoleMaker | None, is_collective: bool, environ: Environ) -> tuple[bool, Identity]:
    """Return True if the job is collective, and the identity of this process.

    Raises UsageError for an object that is not a role maker. It also raises it if the role maker,
    `is_collective` and the way of starting the job contradict each other.
    """
    flag("fleet.init is_collective", is_collective)
    chosen = choose(is_collective, environ) if role_maker is None else _checked(role_maker)
    collective = bool(getattr(chosen, "is_collective", is_collective))
    if is_collective and not collective:
        raise UsageError(
            f"fleet.init(is_collective=True) was given a {type(chosen).__name__} for parameter servers. "
            "Create the role maker with is_collective=True, or remove one of the two."
        )
    identity = chosen.identity()
    if collective and identity.launched_as_ps:
        raise UsageError(
            "fleet.init(is_collective=True) was called, but this job was started with parameter servers. "
            "Start it without --server_num and --trainer_num, or call fleet.init(is_collective=False)."
        )
    if not collective and identity.source == EVALUATOR:
        raise UsageError(
            "fleet.init(is_collective=False) was called in an evaluator, which does not train and has no "
            "servers. Call fleet.init(is_collective=True), and load the files that the trainers save."
        )
    if not collective and not identity.servers:
        also = "use fleet.MPISymmetricRoleMaker(), " if identity.source == Starter.MPIRUN.value else ""
        raise UsageError(
            f"fleet.init(is_collective=False) needs parameter servers, but {identity.source} has none. You "
            f"can {also}start with `fleetrun --server_num=1 --trainer_num=2`, or call "
            "fleet.init(is_collective=True)."
        )
    return collective, identity


def choose(is_collective: bool, environ: Environ) -> RoleMaker:
    """Return the default role maker of `fleet.init`.

    mpirun assigns no servers. A job that is not collective therefore assigns them itself, as Paddle's fleet
    does.
    """
    if not is_collective and starter(environ) is Starter.MPIRUN:
        return MPISymmetricRoleMaker(environ=environ)
    return PaddleCloudRoleMaker(is_collective, environ=environ)


def _checked(role_maker: object) -> RoleMaker:
    if isinstance(role_maker, bool):
        raise UsageError(
            f"fleet.init was given {role_maker} as its role maker. Write "
            f"fleet.init(is_collective={role_maker})."
        )
    if isinstance(role_maker, type):
        name = role_maker.__name__
        raise UsageError(f"fleet.init was given the class {name}. Pass an object: {name}(...).")
    if not isinstance(role_maker, RoleMaker):
        raise UsageError(
            f"fleet.init was given {role_maker!r} as its role maker. Pass a fleet.PaddleCloudRoleMaker, "
            "UserDefinedRoleMaker or MPISymmetricRoleMaker, or any object with an identity() method."
        )
    return role_maker


# ---- The role maker for processes started by hand, with rank and endpoints from the script

_WHO = "UserDefinedRoleMaker"


class UserDefinedRoleMaker:
    """The role maker for process `current_id` of its role. Servers and workers are counted separately, from
    0.

    All processes of a job give the same lists. `server_endpoints` are `host:port` of every server, and each
    server binds its own. `worker_endpoints` are those for workers. They are needed for collective training of
    several workers, who meet at the first. With servers, they are needed only for exchanges between workers,
    such as `global_shuffle`. You may leave out `worker_num` if you give them.

    Raises UsageError immediately for invalid arguments, such as an id out of range, a malformed or repeated
    endpoint, or a server in a collective job.
    """

    def __init__(
        self,
        current_id: int = 0,
        role: Role = Role.WORKER,
        worker_num: int = 0,
        server_endpoints: Sequence[str] | None = None,
        worker_endpoints: Sequence[str] | None = None,
        is_collective: bool = False,
        *,
        environ: Environ | None = None,
    ) -> None:
        self.is_collective = is_collective
        self._role = _role(role)
        self._servers = endpoints(f"{_WHO} server_endpoints", server_endpoints)
        self._workers = endpoints(f"{_WHO} worker_endpoints", worker_endpoints)
        apart(self._servers, self._workers, ("server_endpoints", "worker_endpoints"))
        flag(f"{_WHO} is_collective", self.is_collective)
        if self.is_collective and (self._servers or self._role is Role.SERVER):
            raise UsageError(
                f"{_WHO} is_collective is True, but it has server_endpoints or the role SERVER. Collective "
                "jobs have only workers. Remove these arguments."
            )
        if not self.is_collective and not self._servers:
            raise UsageError(
                f"{_WHO} has no server_endpoints. Pass the endpoints of all servers, or is_collective=True."
            )
        self._worker_num = self._count(worker_num)
        self._index = self._place(current_id)
        self._environ = os.environ if environ is None else environ

    def identity(self) -> Identity:
        """Return the given identity.

        PADDLE_DISTRI_BACKEND, FLAGS_selected_gpus and PADDLE_RESTART_COUNT add the rest.
        """
        given = Variables(self._environ, "it is needed")
        here = self._servers if self._role is Role.SERVER else self._workers
        return Identity(
            index=self._index,
            worker_num=self._worker_num,
            trainers=self._workers,
            servers=self._servers,
            is_server=self._role is Role.SERVER,
            launched_as_ps=not self.is_collective,
            local_rank=position(here[self._index], here) if here else self._index,
            master=self._workers[0] if self._workers and self._worker_num > 1 else "",
            device=given.first("FLAGS_selected_gpus"),
            backend=self._environ.get("PADDLE_DISTRI_BACKEND"),
            restart_count=given.number("PADDLE_RESTART_COUNT", 0),
            source=_WHO,
        )

    def _count(self, worker_num: int) -> int:
        whole(f"{_WHO} worker_num", worker_num, 0)
        known = len(self._workers)
        if worker_num and known and worker_num != known:
            raise UsageError(f"{_WHO} worker_num is {worker_num}, but it has {known} worker_endpoints")
        count = worker_num or known
        if not count:
            raise UsageError(f"{_WHO} has neither worker_num nor worker_endpoints. Pass one of them.")
        if self.is_collective and count > 1 and not known:
            raise UsageError(
                f"{_WHO} has {count} collective workers but no worker_endpoints. Pass them. The workers "
                "connect at the first endpoint."
            )
        return count

    def _place(self, current_id: int) -> int:
        if not is_whole(current_id):
            raise UsageError(f"{_WHO} current_id is {current_id!r}; it must be a whole number")
        count = len(self._servers) if self._role is Role.SERVER else self._worker_num
        if not 0 <= current_id < count:
            raise UsageError(
                f"{_WHO} current_id is {current_id}; the {self._role.name}s of this job are 0 to {count - 1}"
            )
        return current_id


def _role(role: object) -> Role:
    if isinstance(role, bool) or role not in tuple(Role):
        raise UsageError(f"{_WHO} role is {role!r}; it must be Role.WORKER or Role.SERVER")
    return Role(role)  # type: ignore[arg-type]  # one of its values
