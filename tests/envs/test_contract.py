"""The contract: the values of Paddle and torchrun for every mode and role."""

import dataclasses

import pytest

from fleetrun.envs.channels import inside_container
from fleetrun.envs.contract import (
    OWNED,
    OWNED_PREFIXES,
    Cluster,
    Gloo,
    Member,
    Mode,
    Role,
    without_contract,
    write,
)

TRAINERS = ("127.0.0.1:6001", "127.0.0.1:6002")
SERVERS = ("127.0.0.1:7001",)
GLOO = Gloo(endpoint="127.0.0.1:9001", fs_path="/tmp/gloo", with_gloo=1)

COLLECTIVE = Cluster(mode=Mode.COLLECTIVE, trainers=TRAINERS, master="127.0.0.1:5001", max_restart=3)
RPC = Cluster(mode=Mode.RPC, trainers=TRAINERS, master="127.0.0.1:5001")
PS = Cluster(
    mode=Mode.PS, trainers=TRAINERS, servers=SERVERS, master="127.0.0.1:5001", gloo=GLOO, job_id="ads"
)
COORDINATED = dataclasses.replace(PS, coordinators=("127.0.0.1:8001",))
HETER = dataclasses.replace(
    PS,
    mode=Mode.PS_HETER,
    heter=(("127.0.0.1:6101",), ("127.0.0.1:6102", "127.0.0.1:6103")),
    stage_devices=("cpu", "gpu", "cpu"),
)
TWO_NODES = dataclasses.replace(COLLECTIVE, nnodes=2, trainers=("[fe80::1]:6001", "[fe80::2]:6001"))

COMMON = {"pod": "evjsyn", "log_dir": "/srv/log", "error_file": "/srv/log/error.json"}
RANK_0 = Member(cluster=COLLECTIVE, role=Role.TRAINER, rank=0, endpoint=TRAINERS[0], local_size=2, **COMMON)
RANK_1 = dataclasses.replace(RANK_0, rank=1, local_rank=1, endpoint=TRAINERS[1])
SERVER = Member(cluster=PS, role=Role.SERVER, rank=0, endpoint=SERVERS[0], **COMMON)
TRAINER = dataclasses.replace(RANK_1, cluster=PS)
HETER_TRAINER = dataclasses.replace(TRAINER, cluster=HETER, stage=1)
HETER_WORKER = Member(
    cluster=HETER,
    role=Role.HETER,
    rank=2,
    endpoint="127.0.0.1:6103",
    local_rank=2,
    local_size=3,
    stage=3,
    **COMMON,
)
COORDINATOR = Member(cluster=COORDINATED, role=Role.COORDINATOR, rank=0, endpoint="127.0.0.1:8001", **COMMON)

EVALUATOR = Member(
    cluster=dataclasses.replace(PS, gloo=None),
    role=Role.EVALUATOR,
    rank=3,
    local_rank=1,
    local_size=2,
    endpoint="",
    **COMMON,
)

MEMBERS = {
    "evaluator of servers": EVALUATOR,
    "evaluator": dataclasses.replace(EVALUATOR, cluster=COLLECTIVE, devices=(0,), visible="3"),
    "evaluator of rpc": dataclasses.replace(EVALUATOR, cluster=RPC, node_rank=0, omp_threads=2),
    "collective": RANK_1,
    "collective restarted": dataclasses.replace(RANK_0, restart_count=2, omp_threads=4, backend="gloo"),
    "collective with devices": dataclasses.replace(RANK_1, devices=(1,), visible="4,5"),
    "collective with its own devices": dataclasses.replace(RANK_1, devices=(0, 1), visible="GPU-aa,GPU-bb"),
    "collective on xpu": dataclasses.replace(RANK_1, devices=(1,), visible="0,1", device_kind="xpu"),
    "collective on npu": dataclasses.replace(RANK_1, devices=(1,), visible="0,1", device_kind="npu"),
    "collective on two nodes": dataclasses.replace(
        RANK_0, cluster=TWO_NODES, rank=1, node_rank=1, local_size=1, endpoint="[fe80::2]:6001"
    ),
    "rpc": dataclasses.replace(RANK_1, cluster=RPC),
    "server": SERVER,
    "trainer": TRAINER,
    "trainer with a device": dataclasses.replace(TRAINER, devices=(0,), visible="1"),
    "trainer without gloo": dataclasses.replace(TRAINER, cluster=dataclasses.replace(PS, gloo=None)),
    "heter server": dataclasses.replace(SERVER, cluster=HETER),
    "heter trainer": HETER_TRAINER,
    "heter worker": HETER_WORKER,
    "coordinator": COORDINATOR,
    "coordinated trainer": dataclasses.replace(TRAINER, cluster=COORDINATED),
}


@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS.keys())
def test_what_is_written_is_owned(member):
    shared_with_the_user = {
        "CUDA_VISIBLE_DEVICES",
        "XPU_VISIBLE_DEVICES",
        "ASCEND_RT_VISIBLE_DEVICES",
        "OMP_NUM_THREADS",
    }
    owned = {name for name in write(member) if name in OWNED or name.startswith(OWNED_PREFIXES)}
    assert set(write(member)) - owned <= shared_with_the_user


EVERYWHERE = {
    "POD_NAME": "evjsyn",
    "PADDLE_LOG_DIR": "/srv/log",
    "PADDLE_RESTART_COUNT": "0",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:6001,127.0.0.1:6002",
    "FLEETRUN_ERROR_FILE": "/srv/log/error.json",
    "FLEETRUN_MASTER": "127.0.0.1:5001",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "1",
    "ROLE_WORLD_SIZE": "2",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "5001",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_ERROR_FILE": "/srv/log/error.json",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}
PARAMETER_SERVER = EVERYWHERE | {
    "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:7001",
    "PADDLE_NNODES": "1",
    "POD_IP": "127.0.0.1",
    "PADDLE_JOB_ID": "ads",
    "PADDLE_GLOO_RENDEZVOUS": "3",
    "PADDLE_GLOO_FS_PATH": "/tmp/gloo",
    "PADDLE_GLOO_HTTP_ENDPOINT": "127.0.0.1:9001",
    "PADDLE_WITH_GLOO": "1",
}
VALUES = [
    (
        RANK_1,
        EVERYWHERE
        | TORCHRUN
        | {
            "PADDLE_MASTER": "127.0.0.1:5001",
            "PADDLE_GLOBAL_SIZE": "2",
            "PADDLE_LOCAL_SIZE": "2",
            "PADDLE_GLOBAL_RANK": "1",
            "PADDLE_LOCAL_RANK": "1",
            "PADDLE_RANK_IN_NODE": "1",
            "PADDLE_NNODES": "1",
            "PADDLE_TRAINER_ID": "1",
            "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:6002",
            "PADDLE_JOB_ID": "default",
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "TORCHELASTIC_RUN_ID": "default",
            "FLEETRUN_CONTAINER": "evjsyn.trainer.1",
            "FLEETRUN_LOCAL": "1/2",
            "FLEETRUN_NODE": "0/1",
        },
    ),
    (
        MEMBERS["rpc"],
        TORCHRUN
        | {
            "PADDLE_MASTER_ENDPOINT": "127.0.0.1:5001",
            "PADDLE_WORKER_ENDPOINT": "127.0.0.1:6002",
            "PADDLE_TRAINER_ID": "1",
            "PADDLE_TRAINERS_NUM": "2",
        },
    ),
    (
        SERVER,
        PARAMETER_SERVER
        | {
            "TRAINING_ROLE": "PSERVER",
            "PADDLE_ROLE": "PSERVER",
            "PADDLE_PORT": "7001",
            "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:7001",
            "PADDLE_HETER_TRAINER_IP_PORT_LIST": "",
        },
    ),
    (
        TRAINER,
        PARAMETER_SERVER
        | TORCHRUN
        | {
            "TRAINING_ROLE": "TRAINER",
            "PADDLE_ROLE": "TRAINER",
            "PADDLE_PORT": "6002",
            "PADDLE_TRAINER_ID": "1",
            "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:6002",
        },
    ),
    (
        HETER_TRAINER,
        PARAMETER_SERVER
        | {
            "TRAINING_ROLE": "TRAINER",
            "STAGE_ID": "1",
            "STAGE_NUM": "3",
            "PADDLE_STAGE_TRAINERS_NUM": "[2, 1, 2]",
            "HETER_DEVICE_TYPE": "cpu",
            "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST": "",
            "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST": "127.0.0.1:6101",
            "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST": "127.0.0.1:6101,127.0.0.1:6102,127.0.0.1:6103",
        },
    ),
    (
        HETER_WORKER,
        PARAMETER_SERVER
        | {
            "TRAINING_ROLE": "HETER_TRAINER",
            "PADDLE_TRAINER_ID": "2",
            "PADDLE_PORT": "6103",
            "STAGE_ID": "3",
            "HETER_DEVICE_TYPE": "cpu",
            "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST": "127.0.0.1:6101",
            "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST": "",
        },
    ),
    (
        COORDINATOR,
        PARAMETER_SERVER
        | {
            "TRAINING_ROLE": "COORDINATOR",
            "PADDLE_COORDINATOR_NUM": "1",
            "PADDLE_COORDINATOR_ENDPOINTS": "127.0.0.1:8001",
            "PADDLE_TRAINER_ID": "0",
            "PADDLE_PORT": "8001",
        },
    ),
    (MEMBERS["collective with devices"], {"FLAGS_selected_gpus": "1", "CUDA_VISIBLE_DEVICES": "4,5"}),
    (MEMBERS["collective on xpu"], {"FLAGS_selected_xpus": "1", "XPU_VISIBLE_DEVICES": "0,1"}),
    (MEMBERS["collective restarted"], {"OMP_NUM_THREADS": "4", "PADDLE_DISTRI_BACKEND": "gloo"}),
    (
        MEMBERS["collective on two nodes"],
        {
            "PADDLE_NNODES": "2",
            "GROUP_RANK": "1",
            "FLEETRUN_NODE": "1/2",
            "PADDLE_CURRENT_ENDPOINT": "[fe80::2]:6001",
        },
    ),
]


@pytest.mark.parametrize(("member", "expected"), VALUES)
def test_values_are_those_of_paddle_and_torchrun(member, expected):
    written = write(member)
    assert {name: written.get(name) for name in expected} == expected


ABSENT = [
    (SERVER, ["PADDLE_TRAINER_ID", "RANK", "STAGE_NUM", "PADDLE_MASTER", "FLAGS_selected_gpus"]),
    (TRAINER, ["PADDLE_MASTER", "PADDLE_GLOBAL_RANK", "STAGE_NUM"]),
    (RANK_1, ["TRAINING_ROLE", "PADDLE_PORT", "POD_IP", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"]),
    (MEMBERS["rpc"], ["PADDLE_MASTER", "PADDLE_GLOBAL_RANK", "PADDLE_LOCAL_RANK"]),
    (dataclasses.replace(SERVER, cluster=HETER), ["STAGE_ID", "HETER_DEVICE_TYPE"]),
]


@pytest.mark.parametrize(("member", "names"), ABSENT)
def test_values_that_a_role_does_not_have(member, names):
    assert [name for name in names if name in write(member)] == []


def test_a_process_of_a_job_knows_that_it_is_one():
    assert inside_container(write(HETER_WORKER)) == "evjsyn.heter.2"
    assert inside_container({}) is None


def test_the_secret_of_a_job_is_the_users_and_is_handed_down():
    assert without_contract({"FLEETRUN_TOKEN": "s", "FLEETRUN_LOCAL": "0/1"}) == {"FLEETRUN_TOKEN": "s"}


def test_without_contract_keeps_what_is_the_users():
    mine = {"HOME": "/root", "PADDLE_SERVER_NUM": "2", "CUDA_VISIBLE_DEVICES": "0", "RANKING": "1"}
    assert without_contract(write(HETER_WORKER) | write(RANK_0) | mine) == mine


def test_an_evaluator_has_no_rank_among_the_trainers():
    environ = write(MEMBERS["evaluator"])
    assert environ["TRAINING_ROLE"] == environ["PADDLE_ROLE"] == "EVALUATOR"
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "PADDLE_TRAINER_ID", "PADDLE_GLOBAL_RANK"}
    assert not names & environ.keys()
    assert environ["PADDLE_TRAINER_ENDPOINTS"] == ",".join(TRAINERS)
