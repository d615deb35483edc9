"""Where Slurm's variables put a process, and batch scripts. `test_slurm_cluster.py` has the real one."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from fleetrun.envs.settings.job_file import job_file_of_variable
from fleetrun.envs.variables import JOB_FILE
from fleetrun.errors import UsageError
from fleetrun.record.faults import MachineFault, faults_path, keep
from fleetrun.schedulers import srun
from fleetrun.schedulers.slurm import batch_script, place, quoted
from fleetrun.schedulers.tree import tree_of_job
from tests.support.submissions import submission

STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "localhost,n2", "SLURM_JOB_NUM_NODES": "2",
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}


def texts(environ: dict[str, str]) -> dict[str, str]:
    return {name: placed.text for name, placed in place(environ).items()}


# ---- placement


def test_each_task_of_a_step_is_a_machine():
    assert texts(STEP) == {"nnodes": "2", "rank": "1", "master": "localhost:20112", "job_id": "7"}


def test_of_a_later_step_the_job_and_its_port_are_others():
    found = texts({**STEP, "SLURM_STEP_ID": "3"})
    assert (found["job_id"], found["master"]) == ("7.3", "localhost:20115")


def test_ports_stay_below_those_of_clients():
    port = int(texts({**STEP, "SLURM_JOB_ID": "4294967295"})["master"].rpartition(":")[2])
    assert 20_000 <= port < 30_000


def test_a_single_task_is_one_machine():
    assert texts({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == {"job_id": "7"}


def test_what_it_says_has_the_variable_as_its_origin():
    assert {name: placed.origin for name, placed in place(STEP).items()} == {
        "nnodes": "SLURM_STEP_NUM_TASKS",
        "rank": "SLURM_PROCID",
        "master": "SLURM_STEP_NODELIST",
        "job_id": "SLURM_JOB_ID",
    }


@pytest.mark.parametrize("environ", [BATCH, SALLOC, {**BATCH, "SLURM_STEP_ID": "4294967290"}])
def test_who_stands_alone_in_an_allocation_is_to_start_srun(environ: dict[str, str]):
    assert texts(environ) == {"scheduler": "srun"}


def test_a_batch_script_on_its_only_node_is_one_machine():
    assert place({**BATCH, "SLURM_JOB_NUM_NODES": "1"}) == {}


def test_of_an_arbitrary_distribution_the_host_file_tells_the_first(tmp_path: Path):
    (tmp_path / "hosts").write_text("localhost\nn1\n")
    arbitrary = {**STEP, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_STEP_NODELIST": "n1,localhost"}
    found = texts({**arbitrary, "SLURM_HOSTFILE": str(tmp_path / "hosts")})
    assert found["master"].startswith("localhost:")
    with pytest.raises(UsageError, match="cannot find the node") as caught:
        place(arbitrary)
    assert caught.value.hint is not None
    assert "--nnodes 2 --master HOST:PORT" in caught.value.hint
    assert "rank" in place(arbitrary, ("master",))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SLURM_STEP_NUM_TASKS", "two", "SLURM_STEP_NUM_TASKS is 'two'"),
        ("SLURM_STEP_NODELIST", "n[1-", "SLURM_STEP_NODELIST is 'n\\[1-'"),
        ("SLURM_STEP_NODELIST", "", "SLURM_STEP_NODELIST is ''"),
    ],
)
def test_a_malformed_variable_is_named(name: str, value: str, message: str):
    with pytest.raises(UsageError, match=message):
        place({**STEP, name: value})


def test_a_node_without_an_address_keeps_its_name(tmp_path: Path):
    """There is no scontrol on this PATH."""
    environ = {**STEP, "SLURM_STEP_NODELIST": "no-such-node.invalid,n2", "PATH": str(tmp_path)}
    assert texts(environ)["master"] == "no-such-node.invalid:20112"


# ---- the batch script


def directives(*words: str) -> dict[str, str]:
    script = batch_script(submission("--scheduler=slurm", *words, "train.py"))
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_asks_for_what_the_job_needs():
    assert directives("--nnodes=4", "--gpus=0,1", "--job_id", "big", "--timeout=1h") == {
        "job-name": "big",
        "nodes": "4",
        "ntasks-per-node": "1",
        "gpus-per-node": "2",
        "cpus-per-task": "2",
        "time": "62",
        "open-mode": "append",
    }


def test_options_of_sbatch_pass_through_and_win():
    found = directives(
        "--scheduler_option", "signal=USR1@60", "--scheduler_option", "requeue=yes",
        "--scheduler_option", "ntasks_per_node=2", "--scheduler_option", 'comment=a "b"',
    )  # fmt: skip
    assert found["signal"] == "USR1@60"
    assert found["requeue"] == ""
    assert found["ntasks-per-node"] == "2"
    assert found["comment"] == r'"a \"b\""'


@pytest.mark.parametrize(
    ("export", "written"),
    [(None, None), ("ALL", "ALL"), ("NONE", "HF_TOKEN"), ("A,B=1", "A,B=1,HF_TOKEN")],
)
def test_variables_are_passed_on_by_name_only(export: str | None, written: str | None):
    given = () if export is None else ("--scheduler_option", f"export={export}")
    job = submission(
        "--scheduler=slurm",
        "--env=HF_TOKEN",
        "--env=A=x y",
        *given,
        "train.py",
        environ={"HF_TOKEN": "hunter2"},
    )
    script = batch_script(job)
    lines = [
        line.partition("export=")[2].strip('"') for line in script.splitlines() if "#SBATCH --ex" in line
    ]
    assert lines == ([] if written is None else [written])
    assert "hunter2" not in script
    assert "SLURM_EXPORT_ENV=ALL" in script
    said = f'{script.partition("exec srun")[0]}printf %s "${JOB_FILE}"'
    done = subprocess.run(["bash", "-c", said], capture_output=True, text=True, check=True)
    assert job_file_of_variable({JOB_FILE: done.stdout}).environment == (("A", "x y"),)


@pytest.mark.parametrize(
    ("export", "inherited", "written"),
    [("NONE", None, True), (None, "NONE", True), (None, None, False), ("ALL", "NONE", False)],
)
def test_the_jobs_secret_and_whom_to_notify_are_exported_too(
    export: str | None, inherited: str | None, written: bool
):
    given = () if export is None else ("--scheduler_option", f"export={export}")
    environ = {"FLEETRUN_NOTIFY": "https://h/kept-secret"}
    environ |= {} if inherited is None else {"SBATCH_EXPORT": inherited}
    job = submission("--scheduler=slurm", *given, "train.py", environ=environ, token="secret-of-the-job-0123")
    script = batch_script(job)
    assert ("#SBATCH --export=FLEETRUN_TOKEN,FLEETRUN_NOTIFY\n" in script) == written
    assert "export SLURM_EXPORT_ENV=ALL" in script
    assert "secret-" not in script


@pytest.mark.parametrize("table", ["environment", "roles"])
def test_a_job_file_with_secrets_stands_in_no_script(table: str):
    secret = {"environment": {"A_KEY": "hunter2"}}
    file = secret if table == "environment" else {"roles": {"evaluator": {"script": "e.py", **secret}}}
    job = submission("--scheduler=slurm", "--scheduler_option", "export=NONE", "train.py", job_file=file)
    script = batch_script(job)
    assert f"#SBATCH --export={JOB_FILE}" in script
    assert "hunter2" not in script


def test_a_tree_that_no_script_can_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("data").write_bytes(os.urandom(3 << 20))
    with pytest.raises(UsageError, match=r"--sync \. is 2 files, .* a batch script can have 3 MiB of it"):
        batch_script(submission("--scheduler=slurm", "--sync=.", "train.py"))


def test_a_range_without_a_meeting_point_is_what_slurm_has_room_for():
    script = batch_script(submission("--scheduler=slurm", "--nnodes=2:4", "train.py"))
    assert "#SBATCH --nodes=2-4\n" in script
    assert "--nnodes" not in script
    assert "--no-kill" not in script
    assert " --wait=60 " in script


def test_an_elastic_job_goes_on_without_the_nodes_that_it_lost():
    words = ("--nnodes=2:4", "--master=etcd://e1:2379", "--rank=0")
    script = batch_script(submission("--scheduler=slurm", *words, "train.py"))
    assert "#SBATCH --no-kill\n" in script
    assert " --wait=0 --no-kill $" in script
    assert "--nnodes=2:4 --master=etcd://e1:2379 -- train.py" in script


def test_what_the_job_would_inherit_and_must_not_see_is_unset():
    job = submission("train.py", environ={"FLEETRUN_SCHEDULER": "slurm", "PADDLE_NNODES": "2"})
    assert "\nunset FLEETRUN_SCHEDULER PADDLE_NNODES\n" in batch_script(job)


def test_the_user_is_told_who_is_left_out(tmp_path: Path):
    """A job may need them, and then waits."""
    keep(faults_path(tmp_path), [MachineFault(time, "n2", "lost") for time in (1.0, 2.0)], 2)
    job = submission("--scheduler=slurm", "--nnodes=2", "--log_dir", str(tmp_path), "train.py")
    assert "#SBATCH --exclude=n2\n" in batch_script(job)
    (said,) = job.console.said
    assert said.startswith("INFO Excluded for their faults: n2; `fleetrun nodes")


def test_machines_are_slurms_to_choose():
    with pytest.raises(UsageError, match="Slurm chooses the nodes"):
        batch_script(submission("--scheduler=slurm", "--ips=h1,h2", "train.py"))


@pytest.mark.parametrize("option", ["comment=a\nb", "a b=c", "=1x"])
def test_what_a_line_cannot_hold_is_refused(option: str):
    with pytest.raises(UsageError, match="--scheduler_option"):
        batch_script(submission("--scheduler=slurm", "--scheduler_option", option, "train.py"))


@pytest.mark.parametrize(
    "word", ["", "a b", "it's", '"', "$HOME `id`", "\\n", "a\nb", "\r\n\t'\\", "\x1b[1m", "é", "\udc80", "*"]
)
def test_every_word_arrives_as_it_was(word: str):
    text = f"printf %s {quoted(word)}"
    assert "\r" not in text
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=True)
    assert done.stdout.decode("utf-8", "surrogateescape") == word


# ---- srun


def test_runs_once_on_every_node_and_once_only():
    job = submission("train.py", "--lr", "1", environ={**BATCH, "SLURM_CPUS_PER_TASK": "8"})
    argv = srun.command(job)
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=8"} <= set(argv)
    assert shlex.join(argv).endswith("-m fleetrun -- train.py --lr 1")


def test_the_tree_goes_to_every_node_that_the_step_may_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    words = ("--scheduler=srun", "--nnodes=2", "--sync=.", "train.py")
    job, tree = tree_of_job(submission(*words, environ={**BATCH, "SLURM_JOB_NUM_NODES": "4"}))
    assert tree is not None
    assert {"--nodes=4", "--ntasks=4"} <= set(srun.sending(job, tree))
    assert {"--nodes=2", "--ntasks=2"} <= set(srun.command(job, tree))


def test_variables_reach_the_tasks_where_the_user_exports_few():
    words = ("--scheduler=srun", "--env=A=1", "--scheduler_option", "export=PATH", "train.py")
    environ = {**BATCH, "FLEETRUN_NOTIFY": "https://h/kept-secret"}
    argv = srun.command(submission(*words, environ=environ))
    assert [word for word in argv if word.startswith("--export")] == [
        f"--export=PATH,{JOB_FILE},FLEETRUN_NOTIFY"
    ]
    assert "kept-secret" not in " ".join(argv)


def test_with_spares_the_end_of_one_task_is_not_that_of_the_others():
    words = ("--nnodes=2", "--spares=1", "train.py")
    assert {"--wait=60"} <= set(srun.command(submission("--nnodes=2", "train.py", environ=BATCH)))
    argv = srun.command(submission(*words, environ={**BATCH, "SLURM_JOB_NUM_NODES": "3"}))
    assert {"--nodes=3", "--ntasks=3", "--wait=0", "--no-kill"} <= set(argv)
    assert "--wait=60" not in argv


def test_outside_a_job_there_are_no_nodes():
    with pytest.raises(UsageError, match="this process is in none"):
        srun.command(submission("--scheduler=srun", "train.py"))


# ---- Slurm's host lists.


def first_host(text: str) -> str:
    two = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    return place({**two, "SLURM_STEP_NODELIST": text})["master"].text.rpartition(":")[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n1", "n1"),
        ("n1,m2", "n1"),
        ("n[1-3]", "n1"),
        ("n[07,1-2],m3", "n07"),
        ("n[008-011]", "n008"),
        ("rack[0-1]n[1,3]", "rack0n1"),
        ("a[1-2]-ib,b", "a1-ib"),
        ("2001-db8-[1-2]", "2001-db8-1"),
        ("n[0-999999],m", "n0"),
    ],
)
def test_the_first_host_of_a_list(text: str, expected: str):
    assert first_host(text) == expected


@pytest.mark.parametrize("text", ["", ",n1", "n[1-", "n1]", "n[a-b]", "n[[1]]", "n[]"])
def test_what_is_no_list_is_an_error(text: str):
    with pytest.raises(UsageError, match="list of hosts"):
        first_host(text)
