import dataclasses
import json
from pathlib import Path

import pytest

from fleetrun.envs import contract
from fleetrun.envs.contract import Cluster, Member, Mode, Role
from trainers.errors import NotSupportedError, UsageError
from trainers.roles.environment import identity_of
from trainers.roles.identity import Identity
from trainers.roles.makers import settle

CLUSTER = Cluster(
    mode=Mode.PS,
    trainers=("10.0.0.1:7000", "10.0.0.1:7001"),
    servers=("10.0.0.1:8000",),
    master="10.0.0.1:9000",
)
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip


def identity(environ: dict[str, str]) -> Identity:
    return identity_of(environ)


def test_a_process_on_its_own_is_rank_0_of_1() -> None:
    alone = identity({"PATH": "/bin"})
    assert (alone.index, alone.worker_num, alone.alone, alone.is_server) == (0, 1, True, False)


def test_a_trainer_of_fleetrun() -> None:
    member = Member(
        cluster=CLUSTER, role=Role.TRAINER, rank=1, local_rank=1, endpoint="10.0.0.1:7001", devices=(0,),
        restart_count=2, pod="evjsyn",
    )  # fmt: skip
    me = identity(contract.write(member))
    assert (me.index, me.worker_num, me.is_server, me.launched_as_ps) == (1, 2, False, True)
    assert (me.local_rank, me.master, me.scratch) == (1, CLUSTER.master, "log/ps.evjsyn")
    assert (me.trainers, me.servers) == (CLUSTER.trainers, CLUSTER.servers)
    assert (me.device, me.restart_count, me.source) == (0, 2, "fleetrun")


def test_a_trainer_of_a_collective_job() -> None:
    cluster = dataclasses.replace(CLUSTER, mode=Mode.COLLECTIVE, servers=())
    member = Member(
        cluster=cluster, role=Role.TRAINER, rank=0, endpoint="10.0.0.1:7000", backend="gloo",
        devices=(1,), device_kind="xpu",
    )  # fmt: skip
    me = identity(contract.write(member))
    assert (me.launched_as_ps, me.servers, me.backend, me.device) == (False, (), "gloo", None)


def test_a_server_of_fleetrun() -> None:
    me = identity(contract.write(Member(cluster=CLUSTER, role=Role.SERVER, rank=0, endpoint="10.0.0.1:8000")))
    assert (me.index, me.is_server, me.worker_num) == (0, True, 2)


def test_a_process_of_torchrun() -> None:
    me = identity(TORCHRUN)
    assert (me.index, me.worker_num, me.local_rank, me.master) == (3, 4, 1, "10.0.0.1:29500")
    assert (me.trainers, me.restart_count, me.launched_as_ps) == ((), 2, False)
    assert identity(TORCHRUN | {"MASTER_ADDR": "::1"}).master == "[::1]:29500"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4"),
        ({"WORLD_SIZE": "²"}, "WORLD_SIZE is '²'"),
    ],
)
def test_broken_torchrun_variables_are_named(changes: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        identity(TORCHRUN | changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"PADDLE_RESTART_COUNT": "many"}, "PADDLE_RESTART_COUNT is 'many'"),
        ({"FLEETRUN_CONTAINER": "a.trainer.²"}, "FLEETRUN_CONTAINER is '²'"),
        ({"FLEETRUN_LOCAL": "a/b"}, "FLEETRUN_LOCAL is 'a'"),
        ({"FLAGS_selected_gpus": "a"}, "FLAGS_selected_gpus is 'a'"),
        ({"FLEETRUN_MASTER": ""}, "FLEETRUN_MASTER is not set, but FLEETRUN_CONTAINER is set"),
        ({"PADDLE_BACKUP_ENV_PATH": "/no/file"}, "cannot read the file '/no/file' of PADDLE_BACKUP_ENV_PATH"),
    ],
)
def test_a_broken_contract_is_named(changes: dict[str, str], words: str) -> None:
    member = Member(cluster=CLUSTER, role=Role.TRAINER, rank=1, endpoint="10.0.0.1:7001")
    with pytest.raises(UsageError, match=words):
        identity(contract.write(member) | changes)


def test_values_too_long_for_an_environment_are_in_a_file(tmp_path: Path) -> None:
    member = Member(cluster=CLUSTER, role=Role.TRAINER, rank=1, endpoint="10.0.0.1:7001")
    environ, file = contract.write(member), tmp_path / "long.json"
    file.write_text(json.dumps({"PADDLE_TRAINER_ENDPOINTS": environ.pop("PADDLE_TRAINER_ENDPOINTS")}))
    assert identity(environ | {"PADDLE_BACKUP_ENV_PATH": str(file)}).trainers == CLUSTER.trainers
    for wrong in ("[]", "{", "7"):
        file.write_text(wrong)
        with pytest.raises(UsageError, match="cannot read the file"):
            identity(environ | {"PADDLE_BACKUP_ENV_PATH": str(file)})


def test_a_role_of_a_later_version_is_refused() -> None:
    member = Member(cluster=CLUSTER, role=Role.COORDINATOR, rank=0, endpoint="10.0.0.1:1")
    with pytest.raises(NotSupportedError, match="coordinator"):
        identity(contract.write(member))


def test_an_evaluator_of_fleetrun_is_on_its_own() -> None:
    member = Member(
        cluster=CLUSTER, role=Role.EVALUATOR, rank=1, endpoint="", devices=(0,), visible="3", restart_count=2
    )
    me = identity(contract.write(member))
    assert (me.index, me.worker_num, me.alone, me.is_server) == (0, 1, True, False)
    assert (me.servers, me.launched_as_ps, me.device, me.restart_count) == ((), False, 0, 2)


def test_an_evaluator_begins_collectively_and_has_no_servers() -> None:
    environ = contract.write(Member(cluster=CLUSTER, role=Role.EVALUATOR, rank=0, endpoint=""))
    collective, me = settle(None, True, environ)
    assert collective
    assert me.alone
    with pytest.raises(UsageError, match=r"in an evaluator.*fleet.init\(is_collective=True\)"):
        settle(None, False, environ)
