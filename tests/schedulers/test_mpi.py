"""`mpirun fleetrun train.py`: each process of mpirun is a machine of the job."""

import signal

import pytest

from fleetrun.errors import UsageError
from fleetrun.schedulers.mpi import place
from tests.support.command import Fleetrun
from tests.support.mpi import mpirun

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "12",
}  # fmt: skip
STARTERS = pytest.mark.parametrize("starter", ["Open MPI", "MPICH"])


def test_each_rank_is_a_machine():
    found = {name: (placed.text, placed.origin) for name, placed in place(OPEN_MPI).items()}
    assert found["nnodes"] == ("2", "OMPI_COMM_WORLD_SIZE")
    assert found["rank"] == ("1", "OMPI_COMM_WORLD_RANK")
    assert found["master"][0].startswith("127.0.0.1:")


def test_a_single_rank_is_one_machine():
    assert place(OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) == {}


def test_where_they_cannot_know_where_to_meet_it_asks():
    several = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}
    with pytest.raises(UsageError, match="but their master is unknown") as caught:
        place(several)
    assert caught.value.hint is not None
    assert "--nnodes 2 --master HOST:PORT" in caught.value.hint
    assert "rank" in place(several, ("master",))


def test_a_malformed_variable_is_an_error_of_usage():
    with pytest.raises(UsageError, match="OMPI_COMM_WORLD_RANK is 'x'"):
        place(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"})


@pytest.mark.mpi
@pytest.mark.slow
@STARTERS
def test_a_job_of_four(fleetrun: Fleetrun, starter: str):
    script = fleetrun.script("tell('is', RANK, os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])")
    launch = fleetrun.run(script, prefix=mpirun(starter, 4))
    assert launch.code == 0, launch
    assert sorted(launch.told("is")) == [f"trainer.{n} is {n} 4 0" for n in range(4)]


@pytest.mark.mpi
@pytest.mark.slow
@STARTERS
def test_two_at_once_do_not_meet(fleetrun: Fleetrun, starter: str):
    script = fleetrun.script("tell('ready', os.getpid())\nwait_for_go()")
    launches = [fleetrun.start(script, prefix=mpirun(starter, 2)) for _ in range(2)]
    for launch in launches:
        launch.until_ready(2)
    for launch in launches:
        launch.go()
        assert launch.wait() == 0, launch


@pytest.mark.mpi
@pytest.mark.slow
@STARTERS
def test_a_failure_ends_it_everywhere_with_its_code(fleetrun: Fleetrun, starter: str):
    script = fleetrun.script("tell('ready', os.getpid())\nif RANK == 1:\n    sys.exit(7)\nstay()")
    launch = fleetrun.run("--max_restart=0", script, prefix=mpirun(starter, 3))
    assert launch.code == 7, launch


@pytest.mark.mpi
@pytest.mark.slow
@STARTERS
def test_killing_mpirun_leaves_nothing(fleetrun: Fleetrun, starter: str):
    """mpirun alone leaves its processes behind."""
    script = fleetrun.script("tell('ready', os.getpid())\nstay()")
    launch = fleetrun.start(script, prefix=mpirun(starter, 2))
    launch.until_ready(2)
    launch.send(signal.SIGTERM)
    launch.wait()
    launch.no_process()
