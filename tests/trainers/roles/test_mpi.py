"""`mpirun -n 4 python train.py`, without fleetrun: the role maker reads what mpirun says."""

import subprocess
import sys

import pytest

from tests.support.cluster import ROOT
from tests.support.command import environment
from tests.support.mpi import mpirun
from trainers.errors import UsageError
from trainers.roles.environment import identity_of
from trainers.roles.identity import Identity

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "12",
}  # fmt: skip


def identity(**environ: str) -> Identity:
    return identity_of(environ)


def test_the_rank_of_mpirun_is_the_trainers():
    found = identity(**OPEN_MPI)
    assert (found.index, found.worker_num, found.local_rank, found.source) == (3, 4, 3, "mpirun")
    assert found.master.startswith("127.0.0.1:2")


def test_one_process_of_mpirun_is_on_its_own():
    assert identity(**OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}) == Identity()


def test_torchruns_variables_and_fleetruns_come_first():
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    assert identity(**OPEN_MPI, **torchrun).source == "torchrun"


def test_over_several_machines_somebody_must_say_where_to_meet():
    several = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}
    with pytest.raises(UsageError, match="PADDLE_MASTER=host:port"):
        identity(**several)
    assert identity(**several, PADDLE_MASTER="h1:1234").master == "h1:1234"


def test_a_malformed_variable_is_named():
    with pytest.raises(UsageError, match="OMPI_COMM_WORLD_RANK is 'x'"):
        identity(**OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"})


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("starter", ["Open MPI", "MPICH"])
def test_the_example_trains(starter: str):
    script = ROOT / "trainers" / "examples" / "collective_trainer.py"
    done = subprocess.run(
        [*mpirun(starter, 2), sys.executable, str(script), "--steps", "100"],
        env=environment({"OMP_NUM_THREADS": "1"}),
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (accuracy,) = [line for line in done.stdout.splitlines() if line.startswith("test accuracy: ")]
    assert float(accuracy.rpartition(" ")[2]) > 0.9
