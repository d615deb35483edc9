"""torchrun's command lines: each of its options sets one of fleetrun's, or is named as without effect."""

import pytest

from fleetrun.envs.contract import Role
from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.options import Resolved
from fleetrun.envs.settings.resolve import resolve
from fleetrun.errors import UsageError

TRAINER = Role.TRAINER


def resolved(words: str, **environ: str) -> Resolved:
    return resolve(read([*words.split(), "x.py"]), environ)


RENDEZVOUS = [
    ("--rdzv-backend c10d --rdzv-endpoint localhost:0", {"master": None, "master_addr": None}),
    ("--rdzv-backend=c10d --rdzv-endpoint=h:7 --nnodes=2", {"master": "h:7"}),
    ("--rdzv_backend c10d --rdzv_endpoint h --nnodes 2:4", {"master": "h:29400", "on_node_loss": "shrink"}),
    ("--nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0", {"master": None, "nnodes": (1, 2)}),
    ("--rdzv-endpoint h --nnodes 2 --node-rank 1", {"master": "h:29500", "rank": 1}),
    ("--rdzv-backend static --rdzv-endpoint h:7", {"master_addr": "h", "master_port": 7, "master": None}),
    ("--rdzv-endpoint [::1]:7 --nnodes 2", {"master": "[::1]:7"}),
    ("--rdzv-endpoint [::1] --nnodes 2", {"master": "[::1]:29500"}),
    ("--rdzv-endpoint= --nnodes 2", {"master": None}),
    ("--rdzv-backend etcd-v2 --rdzv-endpoint h --nnodes 2", {"master": "etcd://h:2379"}),
    ("--rdzv-backend etcd --rdzv-endpoint h:7", {"master": "etcd://h:7"}),
    ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:7 --rdzv-conf is_host=true", {"rank": 0}),
    ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:7 --rdzv-conf is_host=0", {"rank": -1}),
    ("--rdzv-backend static --nnodes 2 --node_rank 0 --master_addr h", {"master": "h:28500", "rank": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), RENDEZVOUS)
def test_where_machines_meet(words, expected):
    got = resolved(words)
    assert {name: getattr(got.settings, name) for name in expected} == expected
    assert got.notices == ()


VALUES = [
    ("--rdzv-id 42", {"job_id": "42"}),
    ("--rdzv-id a/b:1", {"job_id": "a-b-1"}),
    ("--local-addr 10.0.0.1", {"host": "10.0.0.1"}),
    ("--shutdown-timeout 7", {"stop_timeout": 7.0}),
    ("--rdzv-conf timeout=9", {"rdzv_timeout": 9.0}),
    ("--rdzv_conf=timeout=9,last_call_timeout=3", {"rdzv_timeout": 9.0, "elastic_timeout": 3.0}),
    ("--rdzv_conf=\"'timeout=9,last_call_timeout=3'\"", {"rdzv_timeout": 9.0, "elastic_timeout": 3.0}),
    ("--rdzv_conf=", {"rdzv_timeout": 600.0}),
    ("--role worker", {"role": "worker"}),
    ("--run-path", {"run_path": True}),
    ("--nproc-per-node xpu", {"nproc_per_node": "xpu", "device_kind": "xpu"}),
    ("--numa-binding=node", {"numa_binding": "node"}),
    ("--numa-binding core-complex", {"numa_binding": "core-complex"}),
    ("--numa-binding node --numa-binding off", {"numa_binding": "off"}),
    ("--virtual-local-rank", {"virtual_local_rank": True}),
    ("--max-restarts=2 --log-dir d", {"max_restart": 2, "log_dir": "d"}),
    ("--standalone --rdzv-id=none", {"job_id": "none"}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), VALUES)
def test_names_and_times(words, expected):
    got = resolved(words)
    assert {name: getattr(got.settings, name) for name in expected} == expected
    assert got.notices == ()


SHOWN = [
    ("-t 3", ((TRAINER, None),)),
    ("--tee=3 --redirects=3", ((TRAINER, None),)),
    ("-r 3", ()),
    ("-r 0", ((TRAINER, None),)),
    ("-r 3 -t 0:3,2:3", ((TRAINER, (0, 2)),)),
    ("-r 0:3 --nproc_per_node 3", ((TRAINER, (1, 2)),)),
    ("-t 0:3", ((TRAINER, None),)),
    ("--local-ranks-filter 1,0", ((TRAINER, (0, 1)),)),
    ("--local_ranks_filter=1 --tee 3", ((TRAINER, (1,)),)),
    ("--local_ranks_filter=0,1 -r 3 -t 1:3", ((TRAINER, (1,)),)),
]  # fmt: skip


@pytest.mark.parametrize(("words", "follow"), SHOWN)
def test_what_is_shown(words, follow):
    got = resolved(words)
    assert (got.settings.follow, got.notices) == (follow, ())


NOTICES = [
    ("--monitor-interval 5", "--monitor-interval 5 has no effect"),
    ("--start-method=fork", "--start-method fork has no effect"),
    ("--event-log-handler null", "--event-log-handler null has no effect"),
    ("--logs-specs mine", "--logs-specs mine has no effect"),
    ("--signals-to-handle SIGTERM,SIGUSR1", "--signals-to-handle SIGTERM,SIGUSR1 has no effect"),
    ("--duplicate-stdout-filters a,b", "--duplicate-stdout-filters a,b has no effect"),
    ("--duplicate_stderr_filters a", "--duplicate_stderr_filters a has no effect"),
    ("--rdzv-conf keep_alive_interval=1,read_timeout=1", "keep_alive_interval, read_timeout has no effect"),
    ("--rdzv-conf timeout=8,join_timeout=9", "timeout 8 is ignored: --rdzv-conf join_timeout 9"),
    ("-r 1", "-r 1: fleetrun shows stdout and stderr"),
    ("-r 0:3", "-r 0:3 needs --nproc_per_node"),
    ("--rdzv-id a --job_id b", "--rdzv-id a is ignored: --job_id b was given"),
    ("--tee 3 --follow none", "is ignored: --follow none was given"),
    ("--standalone --rdzv-backend c10d", "--rdzv-backend c10d is ignored: --standalone was given"),
    ("--nnodes 2 --master-port 5 --master-addr a --rdzv-endpoint b:1 --node-rank 0",
     "--master-addr a is ignored: --rdzv-endpoint b:1 was given"),
    ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint b:1 --node-rank 1", "--node-rank 1 is ignored"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "notice"), NOTICES)
def test_what_has_no_effect_is_said(words, notice):
    assert any(notice in each for each in resolved(words).notices)


REFUSED = [
    ("--rdzv-backend zeus", "--rdzv-backend"),
    ("--rdzv-endpoint a:99999 --nnodes 2", "--rdzv-endpoint"),
    ("--rdzv-conf timeout", "--rdzv-conf"),
    ("--rdzv-conf timeout=soon", "--rdzv-conf timeout"),
    ("--start-method thread", "--start-method"),
    ("--tee 4", "--tee"),
    ("--local-ranks-filter a", "--local-ranks-filter"),
    ("--numa-binding cores", "--numa-binding"),
    ("--shutdown-timeout x", "--shutdown-timeout"),
    ("--standalone --nnodes 2", "--standalone"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "option"), REFUSED)
def test_a_wrong_value_is_refused_under_the_name_that_was_typed(words, option):
    with pytest.raises(UsageError) as caught:
        resolved(words)
    assert option in caught.value.message


def test_what_was_meant_is_kept_for_other_machines_under_fleetruns_names():
    got = resolved("--rdzv-id a --nnodes 2 --rdzv-endpoint h:1 --tee 3 --shutdown-timeout 5")
    assert set(got.words.values()) == {
        "--job_id=a", "--nnodes=2", "--master=h:1", "--follow=trainer", "--stop_timeout=5",
    }  # fmt: skip


# ---- PET_*


VARIABLES = [
    ("PET_NNODES", "2:4", "nnodes", (2, 4)),
    ("PET_NPROC_PER_NODE", "4", "nproc_per_node", 4),
    ("PET_RDZV_ID", "a", "job_id", "a"),
    ("PET_RDZV_CONF", "join_timeout=9", "rdzv_timeout", 9.0),
    ("PET_STANDALONE", "1", "standalone", True),
    ("PET_STANDALONE", "0", "standalone", False),
    ("PET_MAX_RESTARTS", "1", "max_restart", 1),
    ("PET_ROLE", "w", "role", "w"),
    ("PET_MODULE", "1", "module", True),
    ("PET_NO_PYTHON", "1", "no_python", True),
    ("PET_RUN_PATH", "1", "run_path", True),
    ("PET_LOG_DIR", "d", "log_dir", "d"),
    ("PET_REDIRECTS", "3", "follow", ()),
    ("PET_TEE", "3", "follow", ((TRAINER, None),)),
    ("PET_LOCAL_RANKS_FILTER", "1", "follow", ((TRAINER, (1,)),)),
    ("PET_NODE_RANK", "0", "rank", 0),
    ("PET_MASTER_PORT", "7", "master_port", 7),
    ("PET_LOCAL_ADDR", "10.0.0.1", "host", "10.0.0.1"),
    ("PET_SHUTDOWN_TIMEOUT", "7", "stop_timeout", 7.0),
    ("PET_VIRTUAL_LOCAL_RANK", "1", "virtual_local_rank", True),
]  # fmt: skip


@pytest.mark.parametrize(("variable", "text", "name", "value"), VARIABLES)
def test_a_variable_sets_what_its_option_does(variable, text, name, value):
    got = resolved("", **{variable: text})
    assert (getattr(got.settings, name), got.notices) == (value, ())
    assert got.origins[name].startswith(variable)


def test_the_rendezvous_of_variables():
    got = resolved(
        "", PET_NNODES="1:2", PET_RDZV_BACKEND="c10d", PET_RDZV_ENDPOINT="h:7", PET_MAX_RESTARTS="100"
    ).settings
    assert (got.nnodes, got.master, got.max_restart) == ((1, 2), "h:7", 100)


def test_a_pod_of_parameter_servers_is_placed_too():
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h", "PET_NPROC_PER_NODE": "4"}
    got = resolved("--server_num 1 --trainer_num 2", **pod)
    assert (got.settings.nnodes, got.settings.rank, got.settings.master) == ((2, 2), 1, "h:29500")
    assert got.notices == ("PET_NPROC_PER_NODE=4 is ignored: the mode is ps",)


def test_a_variable_without_effect_is_named():
    assert (
        resolved("", PET_MONITOR_INTERVAL="5").notices[0].startswith("PET_MONITOR_INTERVAL=5 has no effect")
    )


@pytest.mark.parametrize(
    ("words", "environ", "name", "value"),
    [
        ("--nproc-per-node 2", {"PET_NPROC_PER_NODE": "abc"}, "nproc_per_node", 2),
        ("--rdzv-id b", {"PET_RDZV_ID": "a"}, "job_id", "b"),
        ("--rdzv-id b", {"PADDLE_JOB_ID": "a"}, "job_id", "b"),
        ("--job_id b", {"PET_RDZV_ID": "a"}, "job_id", "b"),
        ("--stop_timeout 5", {"PET_SHUTDOWN_TIMEOUT": "5"}, "stop_timeout", 5.0),
        ("--standalone", {"PET_STANDALONE": "0"}, "standalone", True),
        ("--nnodes 2 --master a:1", {"PET_MASTER_ADDR": "b"}, "master", "a:1"),
        ("--nnodes 2 --master a:1", {"PET_MASTER_ADDR": "b", "PET_MASTER_PORT": "7"}, "master", "a:1"),
        ("--nnodes 2 --master_addr a", {"PET_MASTER_ADDR": "b", "PET_MASTER_PORT": "7"}, "master", "a:1007"),
        ("--nnodes 2 --master_port 5", {"PET_MASTER_ADDR": "b", "PET_MASTER_PORT": "7"}, "master", "b:5"),
    ],
)
def test_what_is_typed_wins(words, environ, name, value):
    got = resolved(words, **environ)
    assert (getattr(got.settings, name), got.notices) == (value, ())


@pytest.mark.parametrize("words", ["--standalone", "--nnodes 1"])
def test_a_job_for_one_machine_in_a_pod_of_several(words):
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "h", "PET_MASTER_PORT": "7"}
    got = resolved(words, **pod)
    assert (got.settings.nnodes, got.settings.rank, got.settings.master) == ((1, 1), -1, None)
    assert (got.settings.master_addr, got.settings.master_port) == (None, None)


def test_a_launch_inside_a_trainer_does_not_take_the_place_of_its_pod():
    pod = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_RDZV_ENDPOINT": "h:7"}
    got = resolved("", FLEETRUN_CONTAINER="a.trainer.0", **pod)
    assert (got.settings.nnodes, got.settings.master) == ((1, 1), None)
    assert "PET_NNODES, PET_NODE_RANK, PET_RDZV_ENDPOINT" in got.notices[0]
