"""fleetrun on a real Slurm: two nodes on this machine, jobs and steps as their users start them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import Fleetrun, Launch
from tests.support.slurm import Slurm
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

WHERE = "tell('is', RANK, os.environ['WORLD_SIZE'], os.environ['SLURM_PROCID'], sys.argv[1:])"
TWO = ("srun", "--nodes=2")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class OnSlurm:
    """The command in a folder that all nodes see."""

    def __init__(self, fleetrun: Fleetrun, cluster: Slurm) -> None:
        self.fleetrun = fleetrun
        self.cluster = cluster

    def start(self, *words: str, prefix: tuple[str, ...] = ()) -> Launch:
        return self.fleetrun.start(*words, prefix=prefix, env=self.cluster.env)

    def run(self, *words: str, prefix: tuple[str, ...] = ()) -> Launch:
        launch = self.start(*words, prefix=prefix)
        launch.wait()
        return launch

    def submit(self, *words: str, script: str) -> tuple[Launch, str]:
        """A job in Slurm's hands, and its number."""
        launch = self.run(
            "--scheduler=slurm", "--nnodes=2", "--scheduler_option", "output=job.out", *words, script
        )
        assert launch.code == 0, launch
        return launch, launch.out.strip()

    def wait(self, job: str) -> str:
        """The state in which a job has ended."""
        eventually(lambda: self.cluster.states().get(job) in ENDED, within=60)
        return self.cluster.states()[job]

    def start_again(self, job: str) -> None:
        """A requeued job without the two minutes of waiting; not in the second in which it was stopped: the
        nodes would take it for the one whose credential has been revoked.
        """
        eventually(lambda: "Reason=BeginTime " in self.shown(job))
        self.cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def shown(self, job: str) -> str:
        return self.cluster.call("scontrol", "--oneliner", "show", "job", job).stdout

    def exit_code(self, job: str) -> str:
        return self.shown(job).partition(" ExitCode=")[2].split()[0]

    @property
    def output(self) -> str:
        return (self.fleetrun.folder / "job.out").read_text()


@pytest.fixture
def on_slurm(fleetrun: Fleetrun, slurm: Slurm) -> Iterator[OnSlurm]:
    yield OnSlurm(fleetrun, slurm)
    slurm.call("scancel", "--user=root", check=False)
    eventually(lambda: set(slurm.states().values()) <= ENDED)


# ---- steps


def test_every_task_of_srun_is_a_machine_in_the_order_of_tasks(on_slurm: OnSlurm):
    launch = on_slurm.run(on_slurm.fleetrun.script(WHERE), "a b", prefix=TWO)
    assert launch.code == 0, launch
    assert sorted(launch.told("is")) == [f"trainer.{n} is {n} 2 {n} ['a b']" for n in range(2)]


def test_the_tasks_of_srun_have_the_spares_among_them(on_slurm: OnSlurm):
    script = on_slurm.fleetrun.script("tell('in', os.environ['WORLD_SIZE'])\nwait_for_go()")
    launch = on_slurm.start("--spares=1", script, prefix=("srun", "--nodes=2", "--ntasks=3"))
    launch.until_told("in 2", 2)
    launch.until_err("this node waits as a spare")
    launch.go()
    assert launch.wait() == 0, launch
    assert len(launch.told("in 2")) == 2


def test_several_tasks_of_one_node_are_machines_too(on_slurm: OnSlurm):
    launch = on_slurm.run(on_slurm.fleetrun.script(WHERE), prefix=("srun", "--nodes=2", "--ntasks=6"))
    assert launch.code == 0, launch
    assert sorted(launch.told("is")) == [f"trainer.{n} is {n} 6 {n} []" for n in range(6)]


def test_two_steps_at_once_do_not_meet(on_slurm: OnSlurm):
    script = on_slurm.fleetrun.script("tell('ready', os.getpid())\nwait_for_go()")
    first, second = (on_slurm.start(script, prefix=TWO) for _ in range(2))
    for launch in (first, second):
        launch.until_ready(2)
    for launch in (first, second):
        launch.go()
        assert launch.wait() == 0, launch


def test_the_code_of_the_first_failure_is_sruns(on_slurm: OnSlurm):
    script = on_slurm.fleetrun.script("tell('ready', os.getpid())\nif RANK == 1:\n    sys.exit(7)\nstay()")
    launch = on_slurm.run("--max_restart=0", script, prefix=TWO)
    assert launch.code == 7, launch
    assert launch.err.count("trainer 1 exited with code 7") >= 2, "every node says it"


def test_a_lost_node_is_no_success(on_slurm: OnSlurm):
    """srun alone would end with 0 if the other task did."""
    script = on_slurm.fleetrun.script("leave_on_term()\nstay()")
    launch = on_slurm.start("--max_restart=0", script, prefix=TWO)
    launch.until_ready(2)
    on_slurm.cluster.lose("n2")
    on_slurm.cluster.call("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        assert launch.wait() in (125, 143), launch
    finally:
        on_slurm.cluster.start_node("n2")
        on_slurm.cluster.call("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)
        eventually(lambda: on_slurm.cluster.idle() == 2, within=60)


# ---- allocations


@pytest.mark.parametrize("nodes", [1, 2])
def test_from_the_shell_of_salloc_it_starts_on_all_nodes(on_slurm: OnSlurm, nodes: int):
    script = on_slurm.fleetrun.script(f"{WHERE}\nwait_for_go()\nsys.exit(5)")
    launch = on_slurm.start("--max_restart=0", script, prefix=("salloc", f"--nodes={nodes}"))
    launch.until_told("is", nodes)
    launch.go()
    assert launch.wait() == 5, launch
    assert sorted(launch.told("is")) == [f"trainer.{n} is {n} {nodes} {n} []" for n in range(nodes)]


def test_ctrl_c_in_an_allocation_ends_all_nodes(on_slurm: OnSlurm):
    script = on_slurm.fleetrun.script("leave_on_term()\nstay()")
    launch = on_slurm.start(script, prefix=("salloc", "--nodes=2"))
    launch.until_ready(2)
    launch.send(signal.SIGINT)
    assert launch.wait() != 0, launch
    launch.until_told("got SIGTERM", 2)


def test_a_batch_script_needs_no_srun(on_slurm: OnSlurm, tmp_path: Path):
    script = on_slurm.fleetrun.script(WHERE)
    text = f"#!/bin/sh\n{sys.executable} -m fleetrun {script} batch\n"
    (tmp_path / "job.sh").write_text(text)
    launch = on_slurm.fleetrun.start(
        "--parsable", "--nodes=2", "--output=job.out", "job.sh", command=("sbatch",), env=on_slurm.cluster.env
    )
    assert launch.wait() == 0, launch
    assert on_slurm.wait(launch.out.strip()) == "COMPLETED", on_slurm.output
    assert sorted(launch.until_told("is", 2)) == [f"trainer.{n} is {n} 2 {n} ['batch']" for n in range(2)]


# ---- submitted


def test_a_job_submits_itself_with_all_its_words(on_slurm: OnSlurm):
    script = on_slurm.fleetrun.script(f"{WHERE}\nprint('output of', RANK)")
    words = ["a b", "it's", "$HOME", "line\r\nline", "--nnodes=9"]
    launch = on_slurm.run(
        "--scheduler=slurm", "--nnodes=2", "--scheduler_option", "output=job.out", script, *words
    )
    assert launch.code == 0, launch
    assert on_slurm.wait(launch.out.strip()) == "COMPLETED", on_slurm.output
    launch.until_told("is", 2)
    assert sorted(launch.told("is")) == [f"trainer.{n} is {n} 2 {n} {words!r}" for n in range(2)]
    assert "output of 0" in on_slurm.output
    assert f"scancel {launch.out.strip()}" in launch.err


IN_TREE = (
    "tell('in', RANK, os.getcwd(), sorted(os.listdir()), os.environ.get('A'), os.environ.get('B_TOKEN'))"
)


def test_a_submitted_job_runs_in_a_copy_of_the_files_with_its_variables(on_slurm: OnSlurm):
    folder = on_slurm.fleetrun.folder
    script = Path(on_slurm.fleetrun.script(IN_TREE))
    (folder / ".gitignore").write_text("job.*\nslurm-*\n.*\n")
    (folder / "data").write_bytes(os.urandom(2_000_000))  # as base64 near the limit
    words = ("--sync=.", "--env=A=x y", "--env=B_TOKEN", "--scheduler_option", "output=job.out")
    export = ("--scheduler_option", "export=NONE")
    launch = on_slurm.fleetrun.start(
        "--scheduler=slurm", "--nnodes=2", *words, *export, "--env=FLEETTEST_*,FLEETTEST_TOKEN",
        "--env=PYTHONPATH,PATH,SLURM_CONF,XDG_CACHE_HOME", str(script),
        env={**on_slurm.cluster.env, "B_TOKEN": "hunter2"},
    )  # fmt: skip
    assert launch.wait() == 0, launch
    job = launch.out.strip()
    assert on_slurm.wait(job) == "COMPLETED", on_slurm.output
    told = sorted(launch.until_told("in", 2))
    trees = on_slurm.cluster.folder / "cache" / "fleetrun" / "code"
    assert all(f" {trees}/" in each and each.endswith(" x y hunter2") for each in told), told
    assert "Code: 2 files, " in launch.err
    assert list((folder / "log").glob(f"{job}.*.trainer.0.log")), "named by Slurm's job, in this folder"
    assert "hunter2" not in "".join(path.read_text() for path in (folder / "log").glob("*.jsonl"))


def test_an_allocation_gets_the_files_of_its_shell(on_slurm: OnSlurm):
    script = on_slurm.fleetrun.script(IN_TREE)
    launch = on_slurm.run("--sync=.", "--env=A=z", script, prefix=("salloc", "--nodes=2"))
    assert launch.code == 0, launch
    told = launch.told("in")
    assert len(told) == 2
    assert all("/fleetrun/code/" in each and each.endswith(" z None") for each in told)
    assert "sent to 2 nodes" in launch.err


def test_an_allocation_that_exports_nothing_gets_files_variables_and_secrets(on_slurm: OnSlurm):
    """SLURM_EXPORT_ENV is what `sbatch --export=NONE` leaves in a batch script."""
    tell = "tell('in', os.getcwd(), os.environ.get('A'), 'FLEETRUN_TOKEN' in os.environ)"
    script = on_slurm.fleetrun.script(tell)
    known = {"A": "z", "FLEETRUN_TOKEN": "a-secret-of-the-job-0123456789", "SLURM_EXPORT_ENV": "NONE"}
    words = ("--sync=.", "--env=A,FLEETTEST_*,FLEETTEST_TOKEN,PYTHONPATH", script)
    launch = on_slurm.fleetrun.start(
        *words, prefix=("salloc", "--nodes=2"), env={**on_slurm.cluster.env, **known}
    )
    assert launch.wait() == 0, launch
    told = launch.told("in")
    assert len(told) == 2
    assert all("/fleetrun/code/" in each and each.endswith(" z True") for each in told), told


def test_its_exit_code_is_the_jobs(on_slurm: OnSlurm):
    _, job = on_slurm.submit("--max_restart=0", script=on_slurm.fleetrun.script("sys.exit(9 * RANK)"))
    assert on_slurm.wait(job) == "FAILED", on_slurm.output
    assert on_slurm.exit_code(job) == "9:0"


def test_a_job_that_slurm_refuses_says_why(on_slurm: OnSlurm):
    launch = on_slurm.run(
        "--scheduler=slurm", "--scheduler_option", "partition=none", on_slurm.fleetrun.script("")
    )
    assert launch.code == 125, launch
    assert "sbatch did not accept the job: " in launch.said
    assert "invalid partition specified: none" in launch.said


def test_a_notice_before_the_end_reaches_the_trainers(on_slurm: OnSlurm):
    """Slurm looks at limits every 30 seconds, and may send the signal a minute early: so the limit comes once
    everybody can take it.
    """
    script = on_slurm.fleetrun.script("on(signal.SIGUSR1, lambda: None)\nleave_on_term()\nstay()")
    notice = ("--scheduler_option", "signal=USR1@60", "--scheduler_option", "time=10")
    launch, job = on_slurm.submit("--max_restart=0", *notice, script=script)
    launch.until_ready(2)
    on_slurm.cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    launch.until(
        lambda: {line.split()[0] for line in launch.told("got SIGUSR1")} == {"trainer.0", "trainer.1"}
    )
    on_slurm.cluster.call("scancel", job)
    assert on_slurm.wait(job) == "CANCELLED"


def test_a_requeued_job_stops_in_order_and_starts_again(on_slurm: OnSlurm):
    script = on_slurm.fleetrun.script(
        "leave_on_term()\ntell('try', os.environ.get('SLURM_RESTART_COUNT'))\nstay()"
    )
    launch, job = on_slurm.submit("--max_restart=0", "--scheduler_option", "requeue=yes", script=script)
    launch.until_ready(2)
    on_slurm.cluster.call("scontrol", "requeue", job)
    launch.until_told("got SIGTERM", 2)
    on_slurm.start_again(job)
    launch.until_told("try 1", 2)
    launch.until_ready(4)
    on_slurm.cluster.call("scancel", job)
    assert on_slurm.wait(job) == "CANCELLED"
    assert "trainer.0 try None" in launch.news
