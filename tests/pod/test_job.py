"""From members to commands, environments and files."""

import sys
from pathlib import Path

import pytest

from fleetrun.envs import contract
from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.resolve import resolve
from fleetrun.plan.topology import Host, offer, pod_spec, process_command


def settings_of(words):
    return resolve(read(words.split()), {}).settings


def spec_of(words, environ=None, cores=8, **host):
    settings = settings_of(words)
    ports = iter(range(7000, 8000))
    here = Host(address="127.0.0.1", cores=cores, **host)
    offers = [offer(settings, here, lambda port: port or next(ports))]
    return pod_spec(settings, here, offers, pod="evjsyn", environ=environ or {})


# ---- commands


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.py --lr 0.1", (sys.executable, "-u", "train.py", "--lr", "0.1")),
        ("-m package.train --lr 0.1", (sys.executable, "-u", "-m", "package.train", "--lr", "0.1")),
        ("--no_python train.py x", ("train.py", "x")),
        ("./run.sh x", ("./run.sh", "x")),
        ("/bin/echo hi", ("/bin/echo", "hi")),
        ("echo hi", ("echo", "hi")),
    ],
)
def test_commands(words, expected):
    assert process_command(settings_of(words)) == expected


def test_a_file_here_needs_no_dot_and_slash(tmp_path, request):
    import os

    before = Path.cwd()
    request.addfinalizer(lambda: os.chdir(before))
    os.chdir(tmp_path)
    (tmp_path / "run").touch()
    assert process_command(settings_of("run x")) == ("./run", "x")


# ---- environments


def test_containers_in_order():
    spec = spec_of("--server_num 2 --trainer_num 2 train.py")
    assert [each.name for each in spec.containers] == ["ps.0", "ps.1", "trainer.0", "trainer.1"]
    assert [each.title for each in spec.containers] == ["server 0", "server 1", "trainer 0", "trainer 1"]
    assert (spec.name, spec.job_id, spec.mode, spec.replicas) == ("evjsyn", "default", Mode.PS, 4)


def test_files():
    spec = spec_of("--log_dir logs --job_id ads train.py")
    (container,) = spec.containers
    assert spec.log_dir == Path("logs").absolute()
    assert container.log == spec.log_dir / "ads.evjsyn.trainer.0.log"
    assert container.error_file == spec.log_dir / "ads.evjsyn.trainer.0.error.json"
    assert container.env["TORCHELASTIC_ERROR_FILE"] == str(container.error_file)
    assert container.env["PADDLE_LOG_DIR"] == str(spec.log_dir)


def test_what_is_written_can_be_read():
    for container in spec_of("--server_num 1 --trainer_num 2 train.py").containers:
        member = contract.read(container.environment(2))
        assert (member.role, member.rank, member.pod, member.restart_count) == (
            container.role, container.rank, "evjsyn", 2
        )  # fmt: skip


STALE = {
    "PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:1,10.0.0.2:2",
    "PADDLE_TRAINER_ID": "7",
    "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:9",
    "TRAINING_ROLE": "PSERVER",
    "PADDLE_MASTER": "10.0.0.1:1",
    "RANK": "7",
    "WORLD_SIZE": "99",
    "MASTER_ADDR": "10.0.0.1",
    "LOCAL_RANK": "7",
    "TORCHELASTIC_RUN_ID": "old",
    "TORCHELASTIC_RESTART_COUNT": "9",
    "FLAGS_selected_gpus": "3",
    "FLEETRUN_CONTAINER": "old.trainer.7",
    "FLEETRUN_ANYTHING": "old",
    "STAGE_ID": "2",
    "POD_IP": "10.0.0.1",
}


@pytest.mark.parametrize(
    "words", ["train.py", "--server_num 1 --trainer_num 1 train.py", "--run_mode rpc train.py"]
)
def test_nothing_of_an_outer_job_is_handed_down(words):
    clean, stale = spec_of(words), spec_of(words, {**STALE, "HOME": "/root"})
    for before, after in zip(clean.containers, stale.containers, strict=True):
        assert after.env == {**before.env, "HOME": "/root"}


def test_not_to_the_hook_either():
    spec = spec_of("--elastic_pre_hook 'make' train.py".replace("'", ""), {**STALE, "HOME": "/root"})
    assert dict(spec.pre_hook.env) == {"HOME": "/root"}
    assert spec.pre_hook.argv == ("make",)
    assert (spec.pre_hook.name, spec.pre_hook.title) == ("pre_hook", "pre_hook")


def test_a_hook_has_words():
    settings = resolve(read(["--elastic_pre_hook", "cp 'a b' c", "train.py"]), {}).settings
    here = Host(address="127.0.0.1")
    offers = [offer(settings, here, lambda port: port or 7000)]
    spec = pod_spec(settings, here, offers, pod="x", environ={})
    assert spec.pre_hook.argv == ("cp", "a b", "c")


@pytest.mark.parametrize(
    ("words", "cores", "threads"),
    [
        ("train.py", 8, "8"),
        ("--nproc_per_node 2 train.py", 8, "4"),
        ("--nproc_per_node 3 train.py", 8, "2"),
        ("--nproc_per_node 16 train.py", 8, "1"),
        ("--server_num 4 --trainer_num 2 train.py", 8, "4"),
    ],
)
def test_trainers_share_the_cores(words, cores, threads):
    for container in spec_of(words, cores=cores).containers:
        expected = threads if container.role is Role.TRAINER else None
        assert container.env.get("OMP_NUM_THREADS") == expected


def test_who_sets_omp_num_threads_keeps_it():
    spec = spec_of("--nproc_per_node 2 train.py", {"OMP_NUM_THREADS": "3"})
    assert [each.env["OMP_NUM_THREADS"] for each in spec.containers] == ["3", "3"]


def test_restarts_are_counted_for_both_worlds():
    server, trainer = spec_of("--server_num 1 --trainer_num 1 train.py").containers
    assert trainer.environment(3)["PADDLE_RESTART_COUNT"] == "3"
    assert trainer.environment(3)["TORCHELASTIC_RESTART_COUNT"] == "3"
    assert server.environment(3)["PADDLE_RESTART_COUNT"] == "3"
    assert "TORCHELASTIC_RESTART_COUNT" not in server.environment(3)


def test_a_representation_shows_no_environment():
    assert "s3cr3t" not in repr(spec_of("train.py", {"HF_TOKEN": "s3cr3t"}))
