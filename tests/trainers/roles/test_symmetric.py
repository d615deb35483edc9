"""Servers and workers out of an mpirun. The processes of one are threads here; a real one is in tests/e2e."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from fleetrun.envs.mpi import MpiProcess
from tests.support.cluster import reserved_endpoints
from trainers.errors import FleetError, UsageError
from trainers.roles.identity import Identity
from trainers.roles.makers import Card, MPISymmetricRoleMaker, is_server, own_host, placed


def process(rank: int, size: int, local_rank: int = 0, local_size: int = 0) -> MpiProcess:
    return MpiProcess(rank, size, local_rank, local_size, "OMPI_COMM_WORLD_RANK", job=1)


def environ(rank: int, size: int, *, local_size: int | None = None, **more: str) -> dict[str, str]:
    local_size = size if local_size is None else local_size
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size), "PMIX_NAMESPACE": "12",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size), "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
    } | more  # fmt: skip


def together(environs: list[dict[str, str]]) -> list[Identity]:
    def identity(environ: dict[str, str]) -> Identity:
        return MPISymmetricRoleMaker(environ=environ | {"PADDLE_MASTER": master}).identity()

    with reserved_endpoints(1) as (master,), ThreadPoolExecutor(len(environs)) as pool:
        return list(pool.map(identity, environs))


def test_four_processes_become_two_servers_and_two_workers() -> None:
    found = together([environ(rank, 4) for rank in range(4)])
    assert [(me.is_server, me.index) for me in found] == [(True, 0), (False, 0), (True, 1), (False, 1)]
    assert all((me.worker_num, len(me.servers), me.launched_as_ps) == (2, 2, True) for me in found)
    assert len({(me.servers, me.trainers, me.meeting()) for me in found}) == 1, "all know the same"
    (servers, trainers) = (found[0].servers, found[0].trainers)
    assert len({*servers, *trainers}) == 4
    assert all(each.startswith("127.0.0.1:") for each in (*servers, *trainers))
    assert found[0].meeting() == trainers[0]
    assert [me.local_rank for me in found] == [0, 0, 1, 1]


def test_the_port_that_was_said_is_kept_for_its_owner() -> None:
    endpoint = together([environ(rank, 2) for rank in range(2)])[0].servers[0]
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((host, int(port)))
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        owner.bind((host, int(port)))


def test_several_machines_say_the_address_that_others_reach() -> None:
    environs = [environ(rank, 4, local_size=2, POD_IP=f"10.0.0.{1 + rank // 2}") for rank in range(4)]
    found = together(environs)
    hosts = [each.rpartition(":")[0] for each in found[3].servers]
    assert hosts == ["10.0.0.1", "10.0.0.2"]
    assert [each.rpartition(":")[0] for each in found[3].trainers] == ["10.0.0.1", "10.0.0.2"]


def test_each_machine_has_both_however_ranks_are_dealt() -> None:
    """--map-by node: ranks 0, 2 and 1, 3 are each a machine."""
    dealt = [process(rank, 4, rank // 2, 2) for rank in range(4)]
    assert [is_server(each) for each in dealt] == [True, True, False, False]
    cards = [Card(is_server(each), f"h{each.rank % 2}:{each.rank}") for each in dealt]
    assert [placed(each, cards).index for each in dealt] == [0, 1, 0, 1]
    assert placed(dealt[3], cards).servers == ("h0:0", "h1:1")


def test_without_local_numbers_the_ranks_alternate() -> None:
    assert [is_server(process(rank, 2)) for rank in range(2)] == [True, False]
    with pytest.raises(UsageError, match="mpirun started 3 in all"):
        is_server(process(0, 3))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (environ(0, 3), "every second process a server, but mpirun started 3 on this node. Start an even"),
        (environ(0, 4, local_size=1), "mpirun started 1 on this node"),
        (environ(0, 1), "at least two processes"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "processes of one mpirun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, "PADDLE_MASTER=host:port"),
        (environ(0, 2, PADDLE_MASTER="h1"), "PADDLE_MASTER has 'h1'; an endpoint is"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "x"}, "OMPI_COMM_WORLD_RANK is 'x'"),
    ],
)
def test_who_cannot_be_halved_is_told(variables: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        MPISymmetricRoleMaker(environ=variables).identity()


def test_a_machine_does_not_tell_others_its_loopback() -> None:
    """The head of a job, whose own name often means 127.0.1.1."""
    host = "this machine has no other address"
    with suppress(UsageError):
        host = own_host(process(0, 4, 0, 2), "localhost:1", {})
    assert not host.startswith(("127.", "[::1]"))


def test_a_meeting_place_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        master = f"127.0.0.1:{taken.getsockname()[1]}"
        before = {each.name for each in Path("/proc/self/fd").iterdir()}
        with pytest.raises(
            FleetError, match=f"2 processes of mpirun could not connect at {master}: .* PADDLE_MAST"
        ):
            MPISymmetricRoleMaker(environ=environ(0, 2, PADDLE_MASTER=master)).identity()
        assert {each.name for each in Path("/proc/self/fd").iterdir()} <= before, "the port is given back"
