"""Which process of an mpirun this is, out of variables as real starters set them."""

from pathlib import Path

import pytest

from fleetrun.envs.contract import FIRST_PORT, PORT_COUNT, agreed_port
from fleetrun.envs.mpi import MpiError, hydra_proxy, read

# Open MPI 4.1.4 on one host.
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_ess_base_jobid": "2078867457", "PMIX_NAMESPACE": "2078867457",
    "OMPI_MCA_orte_hnp_uri": "2078867456.0;tcp://127.0.0.1,192.0.2.2:45111;tcp6://[fd00::2]:39433",
    "PMIX_SERVER_URI2": "2078867456.0;tcp4://127.0.0.1:33869",
}  # fmt: skip
# MPICH 4.0.2 (Hydra) on one host.
MPICH = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "8", "PMI_RANK": "1", "PMI_SIZE": "2"}


def test_open_mpi_on_one_host_meets_at_its_loopback():
    process = read(OPEN_MPI)
    assert process is not None
    assert (process.rank, process.size, process.local_rank, process.local_size) == (1, 2, 1, 2)
    assert process.master is not None
    assert process.master.startswith("127.0.0.1:2")


def test_all_processes_of_an_mpirun_meet_at_one_port_and_those_of_another_elsewhere():
    def master(**more: str) -> str | None:
        process = read(OPEN_MPI | more)
        return process and process.master

    assert master() == master(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_LOCAL_RANK="0")
    assert master() != master(PMIX_NAMESPACE="2078867458")


def test_open_mpi_on_several_hosts_meets_where_mpirun_is():
    process = read(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})
    assert process is not None
    assert process.master is not None
    assert process.master.startswith("192.0.2.2:2")


def test_open_mpi_5_has_the_host_in_its_namespace():
    """Its documentation's form; not tried on a real one."""
    environ = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_NAMESPACE": "prterun-login-1-4711@1"}
    del environ["OMPI_MCA_orte_hnp_uri"]
    process = read(environ)
    assert process is not None
    assert process.head == "login-1"


def test_hydra_on_one_host_has_its_port_from_the_proxy_above():
    process = read(MPICH, lambda: 4711)
    assert process is not None
    assert (process.rank, process.size, process.local_rank) == (1, 2, 1)
    assert process.master == "127.0.0.1:24711"


@pytest.mark.parametrize(
    ("environ", "proxy"),
    [
        (MPICH | {"MPI_LOCALNRANKS": "1"}, 4711),
        (MPICH, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, None),
    ],
)
def test_where_nothing_tells_there_is_no_master(environ: dict[str, str], proxy: int | None):
    process = read(environ, lambda: proxy)
    assert process is not None
    assert process.master is None


def test_who_was_not_started_by_mpi_is_nobody():
    assert read({"PATH": "/bin", "PMI_FD": "3"}) is None


def test_sruns_pmi_is_slurms():
    assert read({"PMI_RANK": "0", "PMI_SIZE": "2", "SLURM_STEP_ID": "0"}) is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_RANK is ''"),
        ({"OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE is 'two'"),
        ({"OMPI_COMM_WORLD_RANK": "2"}, "is 2; there are 2 processes, counted from 0"),
    ],
)
def test_a_malformed_variable_is_named(more: dict[str, str], message: str):
    with pytest.raises(MpiError, match=message):
        read(OPEN_MPI | more)


def test_the_proxy_is_found_however_far_above(tmp_path: Path):
    def process(pid: int, name: str, parent: int) -> None:
        (tmp_path / str(pid)).mkdir()
        stat = f"{pid} ({name}) S {parent}{' 0' * 50}".encode("utf-8", "surrogateescape")
        (tmp_path / str(pid) / "stat").write_bytes(stat)

    process(1, "init", 0)
    process(40, "hydra_pmi_proxy", 1)
    process(50, "sh) S (\udce8", 40)  # of a long name the kernel keeps 15 bytes
    process(60, "python", 50)
    process(70, "python", 1)
    assert hydra_proxy(60, tmp_path) == 40
    assert hydra_proxy(70, tmp_path) is None
    assert hydra_proxy(99, tmp_path) is None


def test_agreed_ports_stay_in_their_range_and_neighbours_apart():
    ports = [agreed_port(number) for number in (*range(1000), 2**32, 2**32 + 1)]
    assert all(FIRST_PORT <= port < FIRST_PORT + PORT_COUNT < 32_768 for port in ports)
    assert len(set(ports[:1000])) == 1000
