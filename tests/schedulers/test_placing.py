"""Which engine is asked where this process is."""

import subprocess
import sys

from fleetrun.schedulers.placing import place

STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost,n2",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "12",
}  # fmt: skip


def texts(environ: dict[str, str], but: tuple[str, ...] = ()) -> dict[str, str]:
    return {name: placed.text for name, placed in place(environ, but).items()}


def test_without_an_engine_nobody_places():
    assert place({"PATH": "/bin", "PMI_SIZE": "", "SLURM_CONF": "x"}) == {}


def test_inside_a_trainer_a_launch_is_a_job_of_its_own():
    assert place({**STEP, "FLEETRUN_CONTAINER": "abc.trainer.0"}) == {}


def test_mpirun_inside_a_slurm_job_is_the_nearer_of_the_two():
    assert texts({**STEP, **OPEN_MPI})["nnodes"] == "4"
    assert texts(STEP)["nnodes"] == "2"


def test_what_is_settled_is_left_out():
    assert texts(STEP, ("nnodes", "rank", "master")) == {"job_id": "7"}


def test_without_an_engine_none_is_imported():
    code = (
        "import sys\nfrom fleetrun.schedulers.placing import place\nplace({})\n"
        "print(*(name for name in sys.modules if name.startswith('fleetrun.schedulers.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fleetrun.schedulers.placing"]
