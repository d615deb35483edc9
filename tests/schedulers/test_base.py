"""What engines that take jobs have in common."""

import pytest

from fleetrun.errors import UsageError
from fleetrun.schedulers.base import Options, gpus, processes, scheduler
from tests.support.submissions import submission


def test_every_engine_that_can_be_chosen_is_there():
    names = ("local", "slurm", "srun", "kubernetes", "ssh")
    assert [scheduler(name).name for name in names] == list(names)


def test_options_may_be_written_with_either_dash():
    job = submission(
        "--scheduler", "slurm", "--scheduler_option", "cpus_per_task=4", "--scheduler_option", "x=a=b", "t.py"
    )
    assert job.options.rest() == {"cpus-per-task": "4", "x": "a=b"}


def test_an_option_that_nobody_takes_is_refused_with_those_that_there_are():
    options = Options({"knd": "job"})
    options.take("kind")
    with pytest.raises(UsageError, match="knd: kubernetes has no such option; it has kind"):
        options.refuse_rest("kubernetes")


def test_a_number_must_be_one():
    with pytest.raises(UsageError, match="gpus=two: it must be a whole number"):
        Options({"gpus": "two"}).number("gpus")


def test_words_leave_out_the_engine_and_what_it_settles():
    job = submission(
        "--scheduler=ssh", "--scheduler_option", "port=22", "--ips=h1,h2", "--nproc_per_node", "2",
        "--dry_run", "t.py", "--lr", "1", environ={"PADDLE_JOB_ID": "seven"},
    )  # fmt: skip
    assert job.command("ips") == ("--nproc_per_node=2", "--job_id=seven", "--", "t.py", "--lr", "1")


def test_variables_that_would_be_inherited_are_named():
    environ = {"FLEETRUN_SCHEDULER": "slurm", "PADDLE_NNODES": "2", "PADDLE_NPROC_PER_NODE": "1"}
    job = submission("t.py", environ=environ)
    assert job.variables("nnodes", "master") == ["FLEETRUN_SCHEDULER", "PADDLE_NNODES"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], (1, 0)),
        (["--nproc_per_node", "4"], (4, 0)),
        (["--gpus", "0,1"], (2, 2)),
        (["--gpus", "0,1,2,3", "--nproc_per_node", "2"], (2, 4)),
        (["--server_num", "2", "--trainer_num", "3"], (5, 0)),
        (["--nproc_per_node", "gpu", "--scheduler_option", "gpus=8", "--scheduler=slurm"], (1, 8)),
    ],
)
def test_processes_and_devices_of_a_machine(words: list[str], expected: tuple[int, int]):
    job = submission(*words, "t.py")
    assert (processes(job.settings), gpus(job.settings, job.options)) == expected


def test_as_many_as_there_are_is_no_number_to_ask_for():
    job = submission("--nproc_per_node", "gpu", "t.py")
    with pytest.raises(UsageError, match="does not say how many GPUs"):
        gpus(job.settings, job.options)
