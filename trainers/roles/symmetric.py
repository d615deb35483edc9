"""The role maker of `mpirun -n 4 python train.py`: on every machine each second process is a server. Knows
how the processes find each other; leaves mpirun's variables to `environment`.

No MPI library is called. Every process says in a store at the first of them where it will listen, and reads
what the others have said: Paddle's MPISymetricRoleMaker asks mpi4py for that.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, TCPStore

from trainers.errors import FleetError, UsageError
from trainers.roles.environment import MpiProcess, mpi_master, mpi_process
from trainers.roles.identity import Identity

_TIMEOUT = datetime.timedelta(minutes=5)
_ANYWHERE = ("192.0.2.1", 9)
"""An address of nobody (RFC 5737), and nothing is sent there: which of ours would a packet have?"""


@dataclass(frozen=True, slots=True)
class Card:
    """What a process says about itself."""

    is_server: bool
    endpoint: str

    def __str__(self) -> str:
        return f"{'server' if self.is_server else 'worker'} {self.endpoint}"

    @classmethod
    def parse(cls, text: str) -> Card:
        role, _, endpoint = text.partition(" ")
        return cls(role == "server", endpoint)


class MPISymmetricRoleMaker:
    """A server and a worker alternate on each machine, a server first, as in Paddle: so many of one as of the
    other. They are counted in the order of their ranks. `fleet.init()` under mpirun takes this one when it is
    given none.

    On several machines PADDLE_MASTER=host:port says where they meet when mpirun's variables do not, and
    POD_IP under which address the others reach this machine when that cannot be told.
    """

    is_collective = False

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        self._identity: Identity | None = None

    def identity(self) -> Identity:
        """Waits until all processes are there, the first time. Raises UsageError for a number of processes
        that cannot be halved, FleetError when they do not meet within 5 minutes.
        """
        if self._identity is None:
            self._identity = self._found()
        return self._identity

    def _found(self) -> Identity:
        process = mpi_process(self._environ)
        if process is None:
            raise UsageError(
                "MPISymmetricRoleMaker is for the processes of an mpirun, at least two of them, and mpirun "
                "did not start this one so; start it with `mpirun -n 4 python train.py`, or with fleetrun"
            )
        server = is_server(process)
        master = mpi_master(process, self._environ)
        host, holder = own_host(process, master, self._environ), _reserve()
        try:
            cards = _exchanged(process, master, Card(server, f"{host}:{holder.getsockname()[1]}"))
        except (RuntimeError, ValueError) as error:
            holder.close()
            raise FleetError(
                f"the {process.size} processes of mpirun did not meet at {master}: {error}. "
                "Set PADDLE_MASTER=host:port to a free port of the machine of the first"
            ) from error
        holder.detach()  # open as long as the process: closing it would give the port away
        return placed(process, cards, self._environ.get("PADDLE_DISTRI_BACKEND"))


def is_server(process: MpiProcess) -> bool:
    """The first, third, ... process of a machine; of the job, where the machine's are not counted."""
    number, what, count = process.local_rank, "on this machine", process.local_size
    if not count:
        number, what, count = process.rank, "in all", process.size
    if count % 2:
        raise UsageError(
            f"MPISymmetricRoleMaker makes every second process a server, and mpirun started {count} {what}; "
            "start an even number on each machine"
        )
    return number % 2 == 0


def placed(process: MpiProcess, cards: Sequence[Card], backend: str | None = None) -> Identity:
    """The identity of one process out of what all have said, in the order of their ranks."""
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
    """What all processes say, in the order of their ranks."""
    host, _, port = master.rpartition(":")
    store = TCPStore(host.strip("[]"), int(port), process.size, process.rank == 0, _TIMEOUT)
    job = PrefixStore(f"roles/{process.job}", store)  # another mpirun may have taken the same port
    job.set(str(process.rank), str(own))
    cards = [Card.parse(job.get(str(rank)).decode()) for rank in range(process.size)]
    job.set(f"left/{process.rank}", "")
    if process.rank == 0:  # the store goes with this process's reference to it: not before all have read
        job.wait([f"left/{rank}" for rank in range(process.size)], _TIMEOUT)
    return cards


def _reserve() -> socket.socket:
    """It holds a port that the kernel gives to nobody else while it is open; servers can still bind it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder


def own_host(process: MpiProcess, master: str, environ: Mapping[str, str]) -> str:
    """The address under which the others reach this machine."""
    if environ.get("POD_IP"):
        return environ["POD_IP"]
    if process.one_host:
        return "127.0.0.1"
    host, _, port = master.rpartition(":")
    for place in ((host.strip("[]"), int(port)), _ANYWHERE):
        address = _source_address(*place)
        if address is not None and not address.startswith("127.") and address != "::1":
            return f"[{address}]" if ":" in address else address
    raise UsageError(
        f"{socket.gethostname()} cannot tell under which address the other machines reach it; set POD_IP"
    )


def _source_address(host: str, port: int) -> str | None:
    """The address that packets to a place would have as their source; None where there is no way."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None
