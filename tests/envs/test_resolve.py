"""From a command line and an environment to settings, by table."""

from collections.abc import Mapping

import pytest

from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.settings.command_line import EngineValue, read
from fleetrun.envs.settings.options import LaunchSettings, Resolved
from fleetrun.envs.settings.resolve import resolve
from fleetrun.errors import UsageError


def resolved(words: str, environ: Mapping[str, str] | None = None) -> Resolved:
    return resolve(read([*words.split(), "x.py"]), environ or {})


def settings(words: str, **environ: str) -> LaunchSettings:
    return resolved(words, environ).settings


def refusal(words: str, **environ: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        resolved(words, environ)
    assert caught.value.exit_code == 2
    return caught.value


def test_no_option_is_one_collective_process():
    assert resolved("") == Resolved(settings=LaunchSettings(script="x.py"), origins={})


VALUES = [
    ("--gpus 0,1", {"devices": ("0", "1"), "device_kind": "gpu"}),
    ("--devices 0,1", {"devices": ("0", "1"), "device_kind": "gpu"}),
    ("--xpus 2", {"devices": ("2",), "device_kind": "xpu"}),
    ("--selected_xpus 2", {"devices": ("2",), "device_kind": "xpu"}),
    ("--npus 0 --devices 0", {"devices": ("0",), "device_kind": "npu"}),
    ("--nproc_per_node 4", {"nproc_per_node": 4}),
    ("--nproc-per-node gpu", {"nproc_per_node": "gpu"}),
    ("--gpus 0,1,2,3 --nproc_per_node 2", {"devices": ("0", "1", "2", "3"), "nproc_per_node": 2}),
    ("--visible_devices process", {"visible_devices": "process"}),
    ("--server_num=1 --trainer_num=2", {"run_mode": Mode.PS, "server_num": 1, "trainer_num": 2}),
    ("--worker_num 2 --server_num 2", {"run_mode": Mode.PS, "server_num": 2, "trainer_num": 2}),
    ("--server_num 2", {"run_mode": Mode.PS, "server_num": 2, "trainer_num": 1}),
    ("--trainer_num 2", {"run_mode": Mode.PS, "server_num": 1, "trainer_num": 2}),
    ("--run_mode ps", {"run_mode": Mode.PS, "server_num": 1, "trainer_num": 1}),
    ("--run_mode rpc --nproc_per_node 3", {"run_mode": Mode.RPC, "nproc_per_node": 3}),
    ("--coordinator_num 1 --server_num 1", {"run_mode": Mode.PS, "coordinator_num": 1}),
    (
        "--servers h:1,h:2 --workers h:3",
        {"servers": ("h:1", "h:2"), "trainers": ("h:3",), "server_num": None},
    ),
    ("--servers h:1,h:2 --trainers h,h", {"trainers": ("h:6172", "h:6173")}),
    ("--servers h:1 --trainers h:2 --server_num 1", {"server_num": 1, "trainer_num": None}),
    ("--servers= --trainers=", {"run_mode": Mode.COLLECTIVE, "servers": ()}),
    (
        "--heter_worker_num 1;2 --server_num 2",
        {
            "run_mode": Mode.PS_HETER,
            "heter_worker_num": (1, 2),
            "heter_devices": ("gpu", "gpu"),
            "trainer_num": 1,
        },
    ),
    (
        "--heter_workers h:1;h:2,h:3 --heter_devices gpu;cpu",
        {"heter_workers": (("h:1",), ("h:2", "h:3")), "heter_devices": ("gpu", "cpu")},
    ),
    ("--server_num 1 --gpus 0,1", {"run_mode": Mode.PS, "devices": ("0", "1")}),
    ("--server_num 1 --backend auto", {"run_mode": Mode.PS}),
    ("--backend gloo", {"backend": "gloo"}),
    ("--master-addr localhost --master-port 29500", {"master_addr": "localhost", "master_port": 29500}),
    ("--stop_timeout 2s --timeout 1h", {"stop_timeout": 2.0, "timeout": 3600.0}),
    ("--log_rotate 1M --log_level warn", {"log_rotate": 1024**2, "log_level": "WARNING"}),
    ("--follow ps --follow trainer:1", {"follow": ((Role.SERVER, None), (Role.TRAINER, (1,)))}),
    ("--enable_gpu_log=0 --log_overwrite", {"enable_gpu_log": False, "log_overwrite": True}),
    ("--dry_run --json", {"dry_run": True, "json": True, "display": "auto"}),
    ("--json --dry_run=false", {"display": "json"}),
    ("--port_range 6000:7000", {"port_range": (6000, 7000)}),
    ("--trainer_num 2 --trainer_num 3", {"trainer_num": 3}),
    ("--trainer_num 2 --worker_num 2", {"trainer_num": 2}),
    (
        "--nnodes 1:1 --rank 0 --sort_ip --elastic_level -1 --ips 127.0.0.1",
        {"ips": ("127.0.0.1",), "rank": 0},
    ),
    ("--legacy=false --standalone", {"legacy": False, "standalone": True}),
]


@pytest.mark.parametrize(("words", "expected"), VALUES)
def test_values(words, expected):
    got = settings(words)
    assert {name: getattr(got, name) for name in expected} == expected


ENVIRONMENT = [
    ("PADDLE_NPROC_PER_NODE", "3", "nproc_per_node", 3),
    ("PADDLE_DEVICES", "0,1", "devices", ("0", "1")),
    ("PADDLE_RUN_MODE", "rpc", "run_mode", Mode.RPC),
    ("PADDLE_SERVER_NUM", "2", "server_num", 2),
    ("PADDLE_TRAINER_NUM", "2", "trainer_num", 2),
    ("PADDLE_JOB_ID", "j", "job_id", "j"),
    ("PADDLE_ELASTIC_JOB_ID", "j", "job_id", "j"),
    ("PADDLE_DISTRI_BACKEND", "gloo", "backend", "gloo"),
    ("PADDLE_LOG_DIR", "d", "log_dir", "d"),
    ("PADDLE_LOG_LEVEL", "debug", "log_level", "DEBUG"),
    ("PADDLE_LOG_OVERWRITE", "1", "log_overwrite", True),
    ("PADDLE_MAX_RESTART", "0", "max_restart", 0),
    ("PADDLE_START_PORT", "7000", "start_port", 7000),
    ("FLAGS_START_PORT", "7000", "start_port", 7000),
    ("PORT_RANGE", "7000:7100", "port_range", (7000, 7100)),
    ("POD_IP", "10.0.0.1", "host", "10.0.0.1"),
    ("PADDLE_IPS", "10.0.0.1", "ips", ("10.0.0.1",)),
    ("PADDLE_NNODES", "1", "nnodes", (1, 1)),
    ("PADDLE_ELASTIC_NP", "1:1", "nnodes", (1, 1)),
    ("PADDLE_RANK", "0", "rank", 0),
    ("PADDLE_SORT_IP", "true", "sort_ip", True),
    ("PADDLE_ELASTIC_LEVEL", "-1", "on_node_loss", "fail"),
    ("PADDLE_ELASTIC_TIMEOUT", "60", "elastic_timeout", 60.0),
    ("FLEETRUN_TIMEOUT", "60", "timeout", 60.0),
    ("FLEETRUN_STOP_TIMEOUT", "1", "stop_timeout", 1.0),
    ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "45", "stop_timeout", 45.0),
    ("FLEETRUN_FOLLOW", "none", "follow", ()),
    ("FLEETRUN_LOG_ROTATE", "1M", "log_rotate", 1024**2),
    ("FLEETRUN_VISIBLE_DEVICES", "process", "visible_devices", "process"),
]


@pytest.mark.parametrize(("variable", "text", "name", "value"), ENVIRONMENT)
def test_a_variable_sets_its_option_and_is_its_origin(variable, text, name, value):
    got = resolved("", {variable: text})
    assert getattr(got.settings, name) == value
    assert got.origins[name] == variable


def test_lists_of_endpoints_from_the_environment():
    got = settings("", PADDLE_SERVERS_ENDPOINTS="h:1", PADDLE_TRAINERS_ENDPOINTS="h:2")
    assert (got.run_mode, got.servers, got.trainers) == (Mode.PS, ("h:1",), ("h:2",))


def test_the_command_line_wins_even_over_a_wrong_variable():
    got = resolved(
        "--log-dir typed --nproc_per_node 2", {"PADDLE_LOG_DIR": "env", "PADDLE_NPROC_PER_NODE": "abc"}
    )
    assert (got.settings.log_dir, got.settings.nproc_per_node) == ("typed", 2)
    assert got.origins == {"log_dir": "--log-dir", "nproc_per_node": "--nproc_per_node"}


def test_an_empty_variable_is_unset():
    assert resolved("", {"PADDLE_NNODES": "", "POD_IP": " "}).origins == {}


@pytest.mark.parametrize(
    ("words", "environ", "mode", "origin"),
    [
        ("--server_num 1", {}, Mode.PS, "--server_num"),
        ("--heter_worker_num 1 --server_num 1", {}, Mode.PS_HETER, "--heter_worker_num"),
        ("--run_mode ps-heter --heter_worker_num 1", {}, Mode.PS_HETER, "--run_mode"),
        ("", {"PADDLE_RUN_MODE": "ps"}, Mode.PS, "PADDLE_RUN_MODE"),
        ("", {"PADDLE_TRAINER_NUM": "2"}, Mode.PS, "PADDLE_TRAINER_NUM"),
        ("--gpus 0", {"PADDLE_TRAINER_NUM": "2"}, Mode.PS, "PADDLE_TRAINER_NUM"),
        ("--heter_worker_num 1", {"PADDLE_RUN_MODE": "ps-heter"}, Mode.PS_HETER, "PADDLE_RUN_MODE"),
    ],
)
def test_what_makes_the_mode(words, environ, mode, origin):
    got = resolved(words, environ)
    assert (got.settings.run_mode, got.origins["run_mode"], got.notices) == (mode, origin, ())


@pytest.mark.parametrize(
    ("words", "environ", "mode", "notice"),
    [
        (
            "--server_num 1",
            {"PADDLE_RUN_MODE": "collective"},
            Mode.PS,
            "PADDLE_RUN_MODE=collective is ignored: --server_num 1 was given",
        ),
        (
            "--nproc_per_node 2",
            {"PADDLE_RUN_MODE": "ps"},
            Mode.COLLECTIVE,
            "PADDLE_RUN_MODE=ps is ignored: --nproc_per_node 2 was given",
        ),
        (
            "--nproc_per_node 2",
            {"PADDLE_SERVER_NUM": "2"},
            Mode.COLLECTIVE,
            "PADDLE_SERVER_NUM=2 is ignored: the mode is collective",
        ),
        (
            "--server_num 1",
            {"PADDLE_NPROC_PER_NODE": "2"},
            Mode.PS,
            "PADDLE_NPROC_PER_NODE=2 is ignored: the mode is ps",
        ),
        (
            "--start_port 7000",
            {"PORT_RANGE": "1:2"},
            Mode.COLLECTIVE,
            "PORT_RANGE=1:2 is ignored: --start_port 7000 was given",
        ),
        (
            "--nnodes 1 --master h:1",
            {},
            Mode.COLLECTIVE,
            "--master h:1 is ignored, because a job on one node needs no rendezvous",
        ),
    ],
)
def test_a_variable_yields_to_what_was_typed_and_it_is_said(words, environ, mode, notice):
    got = resolved(words, environ)
    assert (got.settings.run_mode, got.notices) == (mode, (notice,))
    assert not any(name in got.origins.values() for name in environ)


CONFLICTS = [
    ("--run_mode collective --server_num 1", ["--run_mode collective", "--server_num 1"]),
    ("--run_mode rpc --trainers h:1 --servers h:2", ["--run_mode rpc", "--trainers h:1"]),
    ("--run_mode ps --heter_worker_num 1", ["--run_mode ps", "--heter_worker_num 1"]),
    ("--server_num 1 --nproc_per_node 2", ["--server_num 1", "--nproc_per_node 2", "mode ps"]),
    ("--server_num 1 --backend gloo", ["--server_num 1", "--backend gloo"]),
    ("--http_port 80", ["--http_port 80", "ps or ps-heter", "collective"]),
    ("--trainer_num 2 --worker-num 3", ["--trainer_num 2", "--worker-num 3"]),
    ("--gpus 0 --xpus 0", ["--gpus 0", "--xpus 0"]),
    ("--np 1 --nnodes 2", ["--np 1", "--nnodes 2"]),
    ("--standalone --master b:1", ["--standalone", "--master b:1"]),
    ("--start_port 1 --port_range 1:2", ["--start_port 1", "--port_range 1:2"]),
    ("--server_num 1 --gloo_port 1 --http_port 2", ["--gloo_port 1", "--http_port 2"]),
    ("-m --no_python", ["-m", "--no_python"]),
    ("--json --display live", ["--json", "--display live"]),
    ("--servers h:1", ["--servers h:1", "--trainers"]),
    ("--workers h:1", ["--workers h:1", "--servers"]),
    ("--servers h:1 --trainer_num 2", ["--servers h:1", "--trainers"]),
    ("--servers h:1,h:2 --trainers h:3 --server_num 1", ["--servers h:1,h:2", "--server_num 1"]),
    ("--servers h:1 --trainers h:2 --worker_num 2", ["--trainers h:2", "--worker_num 2"]),
    ("--servers h:1 --trainers h:1", ["h:1", "--servers", "--trainers"]),
    ("--servers h:1 --trainers h:2 --heter_workers h:2", ["h:2", "--trainers", "--heter_workers"]),
    ("--coordinators h:1 --coordinator_num 2", ["--coordinators h:1", "--coordinator_num 2"]),
    ("--server_num 4000 --trainer_num 100", ["--server_num 4000", "--trainer_num 100", "4100", "4096"]),
    ("--heter_worker_num 4000;97", ["--heter_worker_num 4000;97", "4097"]),
    ("--run_mode ps-heter", ["--run_mode ps-heter", "--heter_worker_num", "--heter_workers"]),
    ("--heter_devices gpu", ["--heter_devices gpu", "--heter_worker_num"]),
    ("--heter_worker_num 1;2 --heter_devices gpu", ["--heter_worker_num 1;2", "--heter_devices gpu"]),
    ("--heter_worker_num 1;1 --heter_workers h:1;h:2,h:3", ["--heter_worker_num 1;1", "--heter_workers"]),
    ("--gpus 0,1,2 --nproc_per_node 2", ["--gpus 0,1,2", "--nproc_per_node 2", "evenly"]),
    ("--gpus 0 --nproc_per_node 2", ["--gpus 0", "--nproc_per_node 2"]),
    ("--gpus 0 --nproc_per_node cpu", ["--gpus 0", "--nproc_per_node cpu"]),
    ("--nnodes 3 --ips a,b", ["--nnodes 3", "--ips a,b"]),
    ("--nnodes 2 --rank 2", ["--rank 2", "--nnodes 2"]),
    ("--legacy", ["--legacy", "one launcher"]),
]


@pytest.mark.parametrize(("words", "named"), CONFLICTS)
def test_what_does_not_go_together_is_named_together(words, named):
    message = refusal(words).message
    assert [part for part in named if part not in message] == []


def test_two_variables_that_exclude_each_other():
    message = refusal("", PADDLE_START_PORT="1", PORT_RANGE="1:2").message
    assert "PADDLE_START_PORT=1 and PORT_RANGE=1:2" in message


MANY = [
    ("--nnodes 2", {"nnodes": (2, 2), "on_node_loss": "fail"}),
    ("--np 2:4", {"nnodes": (2, 4), "on_node_loss": "shrink"}),
    ("--nnodes 1:2 --elastic_level 0", {"nnodes": (1, 2), "on_node_loss": "wait"}),
    ("--nnodes 2 --on_node_loss shrink", {"on_node_loss": "shrink"}),
    ("--ips a,b", {"ips": ("a", "b"), "nnodes": (2, 2)}),
    ("--ips a,b --master c:7", {"master": "c:7", "nnodes": (2, 2)}),
    ("--nnodes 2 --rank 1 --master a:1", {"rank": 1, "master": "a:1"}),
    ("--nnodes 2 --node_rank 1 --master_addr a --master_port 7", {"master": "a:1007", "master_port": 7}),
    ("--nnodes 2 --node_rank 1 --master_addr a", {"master": "a:28500", "master_port": 29500}),
    ("--nnodes 1 --master etcd://a:1", {"master": "etcd://a:1"}),
    ("--nnodes 2 --elastic_server a:1", {"master": "etcd://a:1"}),
    ("--nnodes 2 --server_num 0 --worker_num 4", {"server_num": 0, "trainer_num": 4}),
    ("--nnodes 2 --heartbeat_timeout 2 --rdzv_timeout 1m", {"heartbeat_timeout": 2.0, "rdzv_timeout": 60.0}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), MANY)
def test_many_machines(words, expected):
    got = settings(words)
    assert {name: getattr(got, name) for name in expected} == expected


ALONE = [
    ("--rank 1", ["--rank 1", "--nnodes"]),
    ("--nnodes 2 --rank 1", ["--rank 1", "--master"]),
    ("--elastic_level 0", ["--elastic_level 0", "--nnodes"]),
    ("--master a:1", ["--master a:1", "--nnodes"]),
    ("--server_num 0 --worker_num 1", ["--server_num 0", "at least 1"]),
    ("--standalone --nnodes 2", ["--standalone", "--nnodes 2"]),
    ("--watch --scheduler slurm", ["--watch", "--scheduler slurm"]),
    ("--watch --scheduler kubernetes", ["--watch", "--scheduler kubernetes"]),
    ("--image x", ["--image x", "--scheduler kubernetes"]),
    ("--scheduler_option a=b", ["--scheduler_option a=b", "--scheduler"]),
    ("--nnodes 2 --heartbeat_timeout 1", ["--heartbeat_timeout", "at least 2 s"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "named"), ALONE)
def test_what_needs_other_machines_says_what_is_missing(words, named):
    message = refusal(words).message
    assert [part for part in named if part not in message] == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--watch --timeout 5", "--timeout 5"),
        ("--watch --probe off", "--probe off"),
        ("--watch --scheduler srun --sync .", "--scheduler srun starts a job without them"),
        ("--watch --server_num 1", "collective or rpc"),
    ],
)
def test_a_watched_job_refuses_an_option(words, named):
    message = refusal(words).message
    assert "--watch" in message
    assert named in message


def test_a_watched_job_may_have_a_copy_of_the_code_over_ssh():
    assert settings("--watch --scheduler ssh --ips a,b --sync .").sync == "."
    assert settings("--watch --scheduler srun").watch


@pytest.mark.parametrize("words", ["--debug on", "--debug error", "--debug-on-error", "--warm"])
def test_what_needs_the_probe_refuses_to_start_without_it(words):
    assert "needs the probe, but --probe off was given" in refusal(f"{words} --probe off").message
    assert settings("--debug off --probe off").debug == "off"


@pytest.mark.parametrize(("words", "restarts"), [("", 3), ("--watch", 0), ("--watch --max_restart 2", 2)])
def test_a_watched_job_waits_after_the_first_failure(words, restarts):
    assert settings(words).max_restart == restarts


ENGINE = {"nnodes": EngineValue("2", "SLURM_NTASKS"), "rank": EngineValue("1", "SLURM_PROCID"),
          "master": EngineValue("n1:7000", "SLURM_STEP_NODELIST"),
          "job_id": EngineValue("42", "SLURM_JOB_ID")}  # fmt: skip


def placed(words, environ=None):
    return resolve(read([*words.split(), "x.py"]), environ or {}, lambda _, but: ENGINE)


def test_an_engine_places_the_process():
    got = placed("--max_restart 1")
    assert (got.settings.nnodes, got.settings.rank, got.settings.master) == ((2, 2), 1, "n1:7000")
    assert got.settings.job_id == "42"
    assert got.origins["rank"] == "SLURM_PROCID"
    assert got.words["master"] == "--master=n1:7000"


@pytest.mark.parametrize(("said", "left"), [("6", (4, 4)), ("4:6", (2, 4))])
def test_an_engine_counts_the_spares_too(said, left):
    engine = {**ENGINE, "nnodes": EngineValue(said, "SLURM_NTASKS"), "rank": EngineValue("5", "SLURM_PROCID")}
    got = resolve(read(["--spares", "2", "x.py"]), {}, lambda _, but: engine)
    assert (got.settings.nnodes, got.settings.rank, got.settings.spares) == (left, 5, 2)
    assert got.words["nnodes"] == f"--nnodes={':'.join(map(str, dict.fromkeys(left)))}"
    with pytest.raises(UsageError, match=f"--spares 6: all {said} nodes"):
        resolve(read(["--spares", "6", "x.py"]), {}, lambda _, but: engine)


@pytest.mark.parametrize("words", ["--nnodes 1", "--standalone", "--ips 10.0.0.1"])
def test_who_says_where_the_job_runs_is_not_placed(words):
    got = placed(words).settings
    assert (got.nnodes, got.rank, got.master, got.job_id) == ((1, 1), -1, None, "42")


def test_a_variable_of_fleetrun_wins_over_the_engine():
    assert placed("", {"PADDLE_JOB_ID": "mine"}).settings.job_id == "mine"


@pytest.mark.parametrize(
    "words", ["--nnodes 4:2", "--rank -2", "--master a", "--elastic_level 7", "--ips a,a"]
)
def test_what_many_machines_cannot_be(words):
    assert words.split()[0] in refusal(words).message


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PADDLE_NNODES", "abc"),
        ("PADDLE_MAX_RESTART", "-1"),
        ("PADDLE_TRAINER_NUM", "-1"),
        ("PADDLE_LOG_OVERWRITE", "maybe"),
        ("PORT_RANGE", "9:1"),
        ("POD_IP", "a:1"),
        ("PADDLE_ELASTIC_SERVER", "a"),
    ],
)
def test_a_wrong_variable_is_named(variable, text):
    assert refusal("", **{variable: text}).message.startswith(f"{variable} is {text!r}; it must")


def test_a_wrong_value_comes_with_what_was_perhaps_meant():
    error = refusal("--run-mode colective")
    assert error.message == "--run-mode is 'colective'; it must be collective, ps, ps-heter or rpc"
    assert error.hint == "Did you mean collective?"


def test_a_very_long_value_is_shortened():
    assert len(refusal("--gpus " + "x" * 5000).message) < 250


def test_no_script():
    with pytest.raises(UsageError, match="the script is missing"):
        resolve(read(["--gpus", "0"]), {})


OUTER = {
    "FLEETRUN_CONTAINER": "abcdef.trainer.1",
    "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:1",
    "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:1,127.0.0.1:2",
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_MASTER": "127.0.0.1:3",
    "PADDLE_NNODES": "2",
    "PADDLE_LOG_DIR": "/outer",
    "PADDLE_JOB_ID": "outer",
    "POD_IP": "10.0.0.1",
}


def test_a_launch_inside_a_trainer_starts_clean_and_says_so():
    got = resolved("--gpus 0", OUTER)
    assert got.settings == LaunchSettings(script="x.py", devices=("0",))
    assert got.notices == (
        "started inside abcdef.trainer.1 of another job; these variables are ignored: "
        "PADDLE_JOB_ID, PADDLE_LOG_DIR, PADDLE_MASTER, PADDLE_NNODES, POD_IP",
    )


def test_so_does_one_inside_a_trainer_of_paddles_launcher():
    outer = {name: text for name, text in OUTER.items() if not name.startswith("FLEETRUN")}
    got = resolved("", outer)
    assert got.settings == LaunchSettings(script="x.py")
    assert got.notices[0].startswith("started inside a process of another launcher")


def test_an_option_of_the_users_own_is_read_inside_a_trainer_too():
    assert settings("", PADDLE_SERVER_NUM="2", FLEETRUN_CONTAINER="a.trainer.0").server_num == 2


@pytest.mark.parametrize(
    "name", ["PADDLE_TRAINER_ENDPOINTS", "DISTRIBUTED_TRAINER_ENDPOINTS", "PADDLE_TRAINER_ID"]
)
def test_a_leftover_is_not_used_and_it_is_said(name):
    got = resolved("", {name: "10.0.0.1:1,10.0.0.2:1"})
    assert got.settings == LaunchSettings(script="x.py")
    assert got.notices == (f"{name} is set, perhaps by another launcher; fleetrun ignores it",)


@pytest.mark.parametrize(("size", "said"), [("4", True), ("1", False), ("", False)])
def test_a_world_of_somebody_elses_is_not_used_and_it_is_said(size, said):
    """Slurm scripts and PyTorchJobs set it: a job of one process must not end well in silence then."""
    got = resolved("", {"WORLD_SIZE": size, "RANK": "0"})
    assert any("WORLD_SIZE is set" in notice for notice in got.notices) is said


def test_paddle_cloud_of_one_machine():
    cloud = {
        "PADDLE_TRAINERS": "10.0.0.1",
        "POD_IP": "10.0.0.1",
        "PADDLE_TRAINER_ID": "0",
        "TRAINER_PORTS_NUM": "2",
    }
    got = resolved("", cloud | {"DISTRIBUTED_TRAINER_ENDPOINTS": "10.0.0.1:1"})
    assert (got.settings.host, got.notices) == ("10.0.0.1", ())


def test_paddle_cloud_of_two_machines():
    cloud = {
        "PADDLE_TRAINERS": "10.0.0.1,10.0.0.2",
        "POD_IP": "10.0.0.2",
        "PADDLE_TRAINER_ID": "1",
        "TRAINER_PORTS_NUM": "2",
    }
    got = resolved("", cloud).settings
    assert (got.ips, got.host, got.nnodes) == (("10.0.0.1", "10.0.0.2"), "10.0.0.2", (2, 2))
