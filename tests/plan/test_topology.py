"""From settings to members: roles, ranks, endpoints and devices, as in the tables of Paddle's launchers
(paddle_launch.md, 2.1 to 2.3).
"""

import dataclasses
import sys
from collections import Counter
from pathlib import Path

import pytest

from fleetrun.envs.contract import Mode, Role, write
from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.options import RoleSettings
from fleetrun.envs.settings.parsing import written_ranks
from fleetrun.envs.settings.resolve import resolve
from fleetrun.errors import PortError, UsageError
from fleetrun.host.devices import share
from fleetrun.plan.topology import (
    Host,
    Offer,
    build,
    check_complete,
    offer,
    placed,
    pod_spec,
    process_command,
)
from trainers.roles.environment import identity_of

GPUS = ("0", "1", "2", "3")


class Reserve:
    """Hands out what is asked for, else 50001, 50002, ...; remembers both."""

    def __init__(self):
        self.fixed = []
        self.free = 50_000

    def __call__(self, port):
        if port is None:
            self.free += 1
            return self.free
        self.fixed.append(port)
        return port


def members_of(words, *, reserve=None, devices=(), wanted=None, cores=8, kind="gpu"):
    settings = resolve(read([*words.split(), "train.py"]), {}).settings
    host = Host(
        address=settings.host or "127.0.0.1", devices=devices, device_kind=kind, cores=cores,
        wanted_devices=len(settings.devices) if wanted is None else wanted,
    )  # fmt: skip
    return build(settings, host, [offer(settings, host, reserve or Reserve())])


def env_of(words, name="trainer.0", **host):
    found = {f"{each.role}.{each.rank}": each for each in members_of(words, **host)}
    return write(found[name])


def names(members):
    return [f"{each.role}.{each.rank}" for each in members]


# ---- how many


@pytest.mark.parametrize(
    ("words", "host", "expected"),
    [
        ("", {}, {"trainer": 1}),
        ("--nproc_per_node 3", {}, {"trainer": 3}),
        ("--nproc_per_node cpu", {}, {"trainer": 8}),
        ("--nproc_per_node auto", {}, {"trainer": 8}),
        ("--nproc_per_node auto", {"devices": GPUS}, {"trainer": 4}),
        ("--nproc_per_node gpu", {"devices": GPUS}, {"trainer": 4}),
        ("", {"devices": GPUS}, {"trainer": 4}),
        ("--gpus 0,1", {"devices": GPUS[:2]}, {"trainer": 2}),
        ("--gpus 0,1", {}, {"trainer": 2}),
        ("--gpus 0,1,2,3 --nproc_per_node 2", {"devices": GPUS}, {"trainer": 2}),
        ("--run_mode rpc --nproc_per_node 2", {}, {"trainer": 2}),
        ("--server_num 2 --trainer_num 3", {}, {"ps": 2, "trainer": 3}),
        ("--run_mode ps", {}, {"ps": 1, "trainer": 1}),
        ("--servers 127.0.0.1:1,127.0.0.1:2 --trainers 127.0.0.1:3", {}, {"ps": 2, "trainer": 1}),
        (
            "--server_num 1 --trainer_num 2 --coordinator_num 1",
            {},
            {"ps": 1, "trainer": 2, "coordinator": 1},
        ),
        (
            "--heter_worker_num 1;2 --server_num 1 --trainer_num 2",
            {},
            {"ps": 1, "trainer": 2, "heter": 3},
        ),
    ],
)
def test_how_many(words, host, expected):
    assert Counter(each.role for each in members_of(words, **host)) == expected


def test_gpu_without_a_gpu():
    with pytest.raises(UsageError, match="this node has no GPU"):
        members_of("--nproc_per_node gpu")


# ---- table 2.1, collective


def test_a_collective_job():
    for rank in (0, 1):
        env = env_of("--nproc_per_node 2", f"trainer.{rank}")
        expected = {
            "PADDLE_MASTER": "127.0.0.1:50003",
            "PADDLE_GLOBAL_SIZE": "2",
            "PADDLE_LOCAL_SIZE": "2",
            "PADDLE_GLOBAL_RANK": str(rank),
            "PADDLE_LOCAL_RANK": str(rank),
            "PADDLE_RANK_IN_NODE": str(rank),
            "PADDLE_NNODES": "1",
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:5000{rank + 1}",
            "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:50001,127.0.0.1:50002",
            "PADDLE_DISTRI_BACKEND": "gloo",
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "50003",
        }
        assert {name: env.get(name) for name in expected} == expected
        assert "TRAINING_ROLE" not in env
        assert "PADDLE_PSERVERS_IP_PORT_LIST" not in env


@pytest.mark.parametrize(
    ("words", "machines", "ranks"),
    [
        ("--nproc_per_node 2", 2, [{"trainer": "0-1"}, {"trainer": "2-3"}]),
        ("--server_num 1 --trainer_num 2", 2,
         [{"ps": "0", "trainer": "0-1"}, {"ps": "1", "trainer": "2-3"}]),
        ("--server_num 1 --trainer_num 1 --heter_worker_num 1;2 --run_mode ps-heter", 2,
         [{"ps": "0", "trainer": "0", "heter": "0,2-3"}, {"ps": "1", "trainer": "1", "heter": "1,4-5"}]),
        ("--servers 10.0.0.1:1 --trainers 10.0.0.2:2,10.0.0.1:2,10.0.0.2:3", 2,
         [{"ps": "0", "trainer": "1"}, {"trainer": "0,2"}]),
    ],
)  # fmt: skip
def test_what_is_where(words, machines, ranks):
    """The same as each machine knows of itself."""
    settings = resolve(read([*words.split(), "train.py"]), {}).settings
    hosts = [
        Host(address=f"10.0.0.{number + 1}", hosts=(f"10.0.0.{number + 1}",)) for number in range(machines)
    ]
    offers = [offer(settings, host, Reserve()) for host in hosts]
    assert placed(settings, offers) == ranks
    for number, host in enumerate(hosts):
        here: dict[str, list[int]] = {}
        for each in build(settings, host, offers, number):
            here.setdefault(each.role, []).append(each.rank)
        assert {role: written_ranks(found) for role, found in here.items()} == ranks[number]


def test_no_two_endpoints_are_one():
    members = members_of("--server_num 3 --trainer_num 3")
    cluster = members[0].cluster
    ports = [*cluster.servers, *cluster.trainers, cluster.master, cluster.gloo.endpoint]
    assert len(set(ports)) == len(ports) == 8


def test_the_backend():
    assert "PADDLE_DISTRI_BACKEND" not in env_of("", devices=GPUS)
    assert env_of("--backend nccl", devices=GPUS)["PADDLE_DISTRI_BACKEND"] == "nccl"
    assert env_of("--backend gloo", devices=GPUS)["PADDLE_DISTRI_BACKEND"] == "gloo"
    assert "PADDLE_DISTRI_BACKEND" not in env_of("--server_num 1 --trainer_num 1")


def test_the_master_of_torch_is_where_it_is_wanted():
    env = env_of("--master_addr localhost --master_port 29500")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["PADDLE_MASTER"]) == (
        "localhost",
        "29500",
        "localhost:29500",
    )


def test_an_ipv6_host():
    env = env_of("--host ::1")
    assert env["PADDLE_CURRENT_ENDPOINT"] == "[::1]:50001"
    assert (env["MASTER_ADDR"], env["PADDLE_MASTER"]) == ("::1", "[::1]:50002")


# ---- table 2.1, parameter servers


def test_a_parameter_server_job():
    words = "--server_num 1 --trainer_num 2"
    server, trainer = env_of(words, "ps.0"), env_of(words, "trainer.1")
    common = {
        "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:50001",
        "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:50002,127.0.0.1:50003",
        "PADDLE_TRAINERS_NUM": "2",
        "PADDLE_NNODES": "1",
        "POD_IP": "127.0.0.1",
        "PADDLE_GLOO_RENDEZVOUS": "3",
        "PADDLE_GLOO_HTTP_ENDPOINT": "127.0.0.1:50004",
        "PADDLE_WITH_GLOO": "1",
    }
    for env in (server, trainer):
        assert {name: env.get(name) for name in common} == common
    assert (server["TRAINING_ROLE"], server["PADDLE_ROLE"], server["PADDLE_PORT"]) == (
        "PSERVER",
        "PSERVER",
        "50001",
    )
    assert (trainer["TRAINING_ROLE"], trainer["PADDLE_PORT"]) == ("TRAINER", "50003")
    assert "PADDLE_TRAINER_ID" not in server
    assert trainer["PADDLE_TRAINER_ID"] == "1"


def test_servers_start_first():
    assert names(members_of("--server_num 2 --trainer_num 2")) == ["ps.0", "ps.1", "trainer.0", "trainer.1"]


def test_endpoint_lists_stay_as_typed_and_are_reserved():
    reserve = Reserve()
    words = "--servers 127.0.0.1:7001,localhost:7002 --trainers 127.0.0.1:7003"
    members = members_of(words, reserve=reserve)
    assert [each.endpoint for each in members] == ["127.0.0.1:7001", "localhost:7002", "127.0.0.1:7003"]
    assert reserve.fixed[:3] == [7001, 7002, 7003]
    assert members[0].cluster.gloo.endpoint == "127.0.0.1:6767"


def test_the_usual_port_of_gloo_may_be_taken_by_another_job():
    """Nobody asked for it, so nobody need be told; one that was asked for is an error."""

    class Taken(Reserve):
        def __call__(self, port):
            if port in (6767, 8877):
                raise PortError(f"port {port} is taken")
            return super().__call__(port)

    words = "--servers 127.0.0.1:7001 --trainers 127.0.0.1:7003"
    members = members_of(words, reserve=Taken())
    assert members[0].cluster.gloo.endpoint == "127.0.0.1:50001"
    with pytest.raises(PortError):
        members_of(f"{words} --gloo_port 8877", reserve=Taken())


def test_the_port_of_gloo():
    assert env_of("--server_num 1 --http_port 8899")["PADDLE_GLOO_HTTP_ENDPOINT"] == "127.0.0.1:8899"
    words = "--servers 127.0.0.1:7001 --trainers 127.0.0.1:7003 --gloo_port 8877"
    assert env_of(words)["PADDLE_GLOO_HTTP_ENDPOINT"] == "127.0.0.1:8877"


# ---- table 2.1, rpc


def test_an_rpc_job():
    env = env_of("--run_mode rpc --nproc_per_node 2", "trainer.1")
    expected = {
        "PADDLE_MASTER_ENDPOINT": "127.0.0.1:50003",
        "PADDLE_WORKER_ENDPOINT": "127.0.0.1:50002",
        "PADDLE_TRAINER_ID": "1",
        "PADDLE_TRAINERS_NUM": "2",
    }
    assert {name: env.get(name) for name in expected} == expected
    assert "PADDLE_GLOBAL_RANK" not in env


# ---- table 2.2, heter stages and coordinators


def test_a_job_with_stages():
    words = "--server_num 1 --trainer_num 2 --heter_worker_num 1;2 --heter_devices gpu;cpu"
    members = members_of(words)
    assert names(members) == ["ps.0", "trainer.0", "trainer.1", "heter.0", "heter.1", "heter.2"]
    assert [each.stage for each in members] == [0, 1, 1, 2, 3, 3]
    trainer, first, last = (env_of(words, name) for name in ("trainer.0", "heter.0", "heter.2"))
    assert trainer["STAGE_ID"] == "1"
    assert trainer["HETER_DEVICE_TYPE"] == "cpu"
    assert trainer["PADDLE_STAGE_TRAINERS_NUM"] == "[2, 1, 2]"
    assert trainer["STAGE_NUM"] == "3"
    assert trainer["PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST"] == ""
    assert trainer["PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST"] == "127.0.0.1:50004"
    assert first["TRAINING_ROLE"] == "HETER_TRAINER"
    assert first["HETER_DEVICE_TYPE"] == "gpu"
    assert first["PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST"] == "127.0.0.1:50002,127.0.0.1:50003"
    assert first["PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST"] == "127.0.0.1:50005,127.0.0.1:50006"
    assert (last["STAGE_ID"], last["PADDLE_TRAINER_ID"]) == ("3", "2")
    assert last["PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST"] == ""
    assert last["PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST"] == "127.0.0.1:50004,127.0.0.1:50005,127.0.0.1:50006"


def test_stages_by_endpoint():
    words = (
        "--servers 127.0.0.1:1 --trainers 127.0.0.1:2 --heter_workers 127.0.0.1:3;127.0.0.1:4,127.0.0.1:5 "
        "--heter_devices gpu;gpu"
    )
    members = members_of(words)
    assert members[0].cluster.heter == (("127.0.0.1:3",), ("127.0.0.1:4", "127.0.0.1:5"))


def test_coordinators():
    words = "--server_num 1 --trainer_num 1 --coordinator_num 1"
    assert names(members_of(words)) == ["ps.0", "trainer.0", "coordinator.0"]
    env = env_of(words, "coordinator.0")
    assert (env["TRAINING_ROLE"], env["PADDLE_COORDINATOR_NUM"]) == ("COORDINATOR", "1")
    assert env["PADDLE_COORDINATOR_ENDPOINTS"] == env["PADDLE_CURRENT_ENDPOINT"]
    assert env_of(words, "ps.0")["PADDLE_COORDINATOR_ENDPOINTS"] == env["PADDLE_CURRENT_ENDPOINT"]


# ---- table 2.3, ports


def test_a_start_port_counts_upwards_in_the_order_of_paddle():
    """FLAGS_START_PORT=7000, 2 servers, 2 workers, 2 heter: 7000-1, 7002-3, 7004-5, gloo 7006."""
    reserve = Reserve()
    words = "--start_port 7000 --server_num 2 --trainer_num 2 --heter_worker_num 2 --heter_devices cpu"
    cluster = members_of(words, reserve=reserve)[0].cluster
    assert cluster.servers == ("127.0.0.1:7000", "127.0.0.1:7001")
    assert cluster.trainers == ("127.0.0.1:7002", "127.0.0.1:7003")
    assert cluster.heter == (("127.0.0.1:7004", "127.0.0.1:7005"),)
    assert cluster.gloo.endpoint == "127.0.0.1:7006"
    assert cluster.master == "127.0.0.1:7007"
    assert reserve.fixed == list(range(7000, 7008))


def test_a_start_port_without_room():
    with pytest.raises(UsageError, match="needs port 65536"):
        members_of("--start_port 65535 --nproc_per_node 2")


# ---- devices


@pytest.mark.parametrize(
    ("ids", "size", "whole_node", "shares"),
    [
        ((), 2, True, [((), ())] * 2),
        (GPUS, 4, True, [(GPUS, (rank,)) for rank in range(4)]),
        (GPUS, 4, False, [((gpu,), (0,)) for gpu in GPUS]),
        (GPUS, 2, True, [(("0", "1"), (0, 1)), (("2", "3"), (0, 1))]),
        (GPUS, 1, True, [(GPUS, (0, 1, 2, 3))]),
        (GPUS, 3, True, [(("0", "1", "2"), (rank,)) for rank in range(3)]),
        (GPUS, 5, True, [((), ())] * 5),
        (("GPU-a", "GPU-b"), 2, True, [(("GPU-a", "GPU-b"), (rank,)) for rank in range(2)]),
        (("5",), 1, True, [(("5",), (0,))]),
    ],
)
def test_shares(ids, size, whole_node, shares):
    assert [share(ids, index, size, whole_node=whole_node) for index in range(size)] == shares


def test_each_sees_all_of_its_node_and_takes_its_own():
    env = env_of("--gpus 4,5", "trainer.1", devices=("4", "5"))
    assert (env["CUDA_VISIBLE_DEVICES"], env["FLAGS_selected_gpus"], env["LOCAL_RANK"]) == ("4,5", "1", "1")


def test_or_sees_its_own_only():
    env = env_of("--gpus 4,5 --visible_devices process", "trainer.1", devices=("4", "5"))
    assert (env["CUDA_VISIBLE_DEVICES"], env["FLAGS_selected_gpus"], env["LOCAL_RANK"]) == ("5", "0", "1")


def test_without_the_devices_that_were_wanted_nothing_is_bound():
    env = env_of("--gpus 0,1")
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert "FLAGS_selected_gpus" not in env
    assert env["PADDLE_DISTRI_BACKEND"] == "gloo"


def test_other_kinds():
    env = env_of("--xpus 0,1", "trainer.1", devices=("0", "1"), kind="xpu")
    assert (env["XPU_VISIBLE_DEVICES"], env["FLAGS_selected_xpus"]) == ("0,1", "1")


def test_with_servers_only_what_is_asked_for_is_bound_one_each_in_turn():
    words = "--server_num 1 --trainer_num 3"
    assert "CUDA_VISIBLE_DEVICES" not in env_of(words, devices=GPUS)
    seen = [
        env_of(f"--gpus 0,1 {words}", f"trainer.{rank}", devices=("0", "1"))["CUDA_VISIBLE_DEVICES"]
        for rank in range(3)
    ]
    assert seen == ["0", "1", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in env_of(f"--gpus 0,1 {words}", "ps.0", devices=("0", "1"))


def test_with_stages_only_those_that_compute_on_it_get_one():
    words = "--gpus 0,1 --server_num 1 --trainer_num 1 --heter_worker_num 1;1 --heter_devices gpu;cpu"
    bound = {f"{each.role}.{each.rank}": each.visible for each in members_of(words, devices=("0", "1"))}
    assert bound == {"ps.0": None, "trainer.0": None, "heter.0": "0", "heter.1": None}


def test_all_members_agree_on_the_cluster():
    members = members_of("--server_num 2 --trainer_num 2")
    assert all(each.cluster is members[0].cluster for each in members)
    assert members[0].cluster.mode is Mode.PS
    assert {each.role for each in members} == {Role.SERVER, Role.TRAINER}


# ---- several machines


def cluster_of(words, *machines):
    """The members on each machine: a machine is (address, its own words, ...)."""
    offers, hosts = [], []
    settings = None
    for number, (address, own) in enumerate(machines):
        settings = resolve(read([*words.split(), *own.split(), "train.py"]), {}).settings
        hosts.append((settings, Host(address=address, hosts=(address,))))
        offers.append(offer(*hosts[-1], lambda port, base=1000 * (number + 1): port or next_port(base)))
    return [build(each, host, offers, rank) for rank, (each, host) in enumerate(hosts)]


_USED = {}


def next_port(base):
    _USED[base] = _USED.get(base, base) + 1
    return _USED[base]


def test_ranks_go_on_from_machine_to_machine():
    nodes = cluster_of(
        "--nnodes 2 --nproc_per_node 2 --master h1:7", ("h1", ""), ("h2", "--nproc_per_node 3")
    )
    assert [[each.rank for each in node] for node in nodes] == [[0, 1], [2, 3, 4]]
    assert [each.local_rank for each in nodes[1]] == [0, 1, 2]
    assert {(each.node_rank, each.cluster.nnodes, each.local_size) for each in nodes[1]} == {(1, 2, 3)}
    first, second = write(nodes[0][0]), write(nodes[1][0])
    assert first["PADDLE_TRAINER_ENDPOINTS"] == second["PADDLE_TRAINER_ENDPOINTS"]
    assert first["PADDLE_TRAINER_ENDPOINTS"].count("h2:") == 3
    assert (second["MASTER_ADDR"], second["MASTER_PORT"]) == (first["MASTER_ADDR"], first["MASTER_PORT"])
    assert second["MASTER_ADDR"] == "h1"
    assert (second["GROUP_RANK"], second["NNODES"], second["WORLD_SIZE"]) == ("1", "2", "5")


def test_servers_and_trainers_of_all_machines():
    words = "--nnodes 2 --master h1:7 --worker_num 2"
    nodes = cluster_of(words, ("h1", "--server_num 1"), ("h2", "--server_num 0"))
    assert [names(node) for node in nodes] == [["ps.0", "trainer.0", "trainer.1"], ["trainer.2", "trainer.3"]]
    env = write(nodes[1][0])
    assert env["PADDLE_PSERVERS_IP_PORT_LIST"] == nodes[0][0].endpoint
    assert env["PADDLE_GLOO_HTTP_ENDPOINT"] == write(nodes[0][0])["PADDLE_GLOO_HTTP_ENDPOINT"]
    assert env["PADDLE_GLOO_HTTP_ENDPOINT"].startswith("h1:")


def test_endpoint_lists_keep_their_order_over_machines():
    words = "--servers h2:1,h1:1 --trainers h1:2,h2:2,h1:3"
    nodes = cluster_of(words, ("h1", ""), ("h2", ""))
    assert [names(node) for node in nodes] == [["ps.1", "trainer.0", "trainer.2"], ["ps.0", "trainer.1"]]
    assert [each.endpoint for each in nodes[0]] == ["h1:1", "h1:2", "h1:3"]
    assert nodes[0][0].cluster.servers == ("h2:1", "h1:1")
    assert nodes[0][0].cluster.gloo.endpoint == "h2:6767"


def test_devices_are_those_of_the_machine():
    settings = resolve(read(["--nnodes", "2", "--master", "h1:7", "train.py"]), {}).settings
    hosts = [Host(address="h1", devices=("0", "1")), Host(address="h2", devices=("0", "1", "2"))]
    offers = [offer(settings, host, lambda port: port or next_port(7)) for host in hosts]
    there = build(settings, hosts[1], offers, 1)
    assert [(each.rank, each.visible, each.devices) for each in there] == [
        (2, "0,1,2", (0,)),
        (3, "0,1,2", (1,)),
        (4, "0,1,2", (2,)),
    ]


def test_two_machines_with_one_address_are_refused():
    """127.0.0.1 on both, and the kernel chose the same port by chance."""
    settings = resolve(read(["--nnodes", "2", "--master", "h1:7", "train.py"]), {}).settings
    host = Host(address="127.0.0.1")
    offers = [offer(settings, host, lambda port: port or 7)] * 2
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:7 is an endpoint of two processes"):
        build(settings, host, offers, 0)


@pytest.mark.parametrize(
    ("each", "flaw"),
    [
        ("--server_num 1 --trainer_num 0", "no node has a trainer"),
        ("--run_mode ps --server_num 0 --trainer_num 1", "no node has a server"),
    ],
)
def test_all_machines_together_need_servers_and_trainers(each, flaw):
    def made(words):
        settings = resolve(read([*f"--nnodes 2 {words}".split(), "train.py"]), {}).settings
        host = Host(address="10.0.0.1", devices=(), device_kind="gpu", cores=8, wanted_devices=0)
        return settings, offer(settings, host, Reserve())

    settings, half = made(each)
    _, other = made("--server_num 1 --trainer_num 1")
    with pytest.raises(UsageError, match=flaw):
        check_complete(settings, [half, half])
    check_complete(settings, [half, other])
    check_complete(made("")[0], [made("")[1]])


def test_an_offer_survives_packing():
    settings = resolve(read(["--server_num", "1", "--trainer_num", "2", "train.py"]), {}).settings
    made = offer(settings, Host(address="h1"), lambda port: port or 7)
    assert Offer.unpacked(made.packed()) == made


# ---- Where evaluators are, their ranks, and their share of the devices, by table.

SETTINGS = resolve(read(["--nnodes", "2", "--master", "h:1", "train.py"]), {}).settings


def members(node, count=2, each=False, devices=()):
    wish = RoleSettings(role=Role.EVALUATOR, count=count, each=each)
    settings = dataclasses.replace(SETTINGS, roles=(wish,))
    hosts = [Host(address=f"10.0.0.{n}", evaluator_devices=devices) for n in (1, 2)]
    offers = [offer(settings, host, lambda port: port or 5000) for host in hosts]
    found = build(settings, hosts[node], offers, node)
    ranks = written_ranks(each.rank for each in found if each.role is Role.EVALUATOR)
    assert placed(settings, offers)[node].get("evaluator", "") == ranks
    assert [each.role for each in found[:1]] == [Role.TRAINER], "trainers start first"
    return [each for each in found if each.role is Role.EVALUATOR]


@pytest.mark.parametrize(
    ("node", "each", "ranks"), [(0, False, [0, 1]), (1, False, []), (0, True, [0, 1]), (1, True, [2, 3])]
)
def test_where_they_are(node, each, ranks):
    found = members(node, each=each)
    assert [member.rank for member in found] == ranks
    assert [member.local_rank for member in found] == [0, 1][: len(ranks)]
    assert all((member.local_size, member.endpoint, member.node_rank) == (2, "", node) for member in found)


@pytest.mark.parametrize(
    ("count", "devices", "visible"),
    [(2, (), [None, None]), (2, ("4", "5"), ["4", "5"]), (1, ("4", "5"), ["4,5"]), (2, ("4",), ["4", "4"]),
     (3, ("4", "5"), ["4", "5", "4"])],
)  # fmt: skip
def test_what_they_see(count, devices, visible):
    assert [member.visible for member in members(0, count, devices=devices)] == visible


def test_nobody_asked_for_one():
    assert members(0, count=0) == []


# ---- From members to commands, environments and files.


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


def test_torchruns_role_and_virtual_local_rank():
    words = "--role w --virtual-local-rank --nproc_per_node 2 train.py"
    first, second = spec_of(words, devices=("4", "5")).containers
    names = ("LOCAL_RANK", "RANK", "CUDA_VISIBLE_DEVICES", "ROLE_NAME")
    assert [first.env[name] for name in names] == ["0", "0", "4", "w"]
    assert [second.env[name] for name in names] == ["0", "1", "5", "w"]
    assert second.env["FLEETRUN_LOCAL"] == "1/2"


def test_numa_binding_runs_a_process_on_the_cores_of_its_device():
    words = "--numa-binding node --nproc_per_node {} train.py"
    host = {"devices": ("4", "5"), "device_cores": ("0-3", "")}
    first, second = spec_of(words.format(2), **host).containers
    assert first.argv == ("taskset", "--cpu-list", "0-3", sys.executable, "-u", "train.py")
    assert second.argv == (sys.executable, "-u", "train.py")
    (both,) = spec_of(words.format(1), **host).containers
    assert both.argv[:3] == ("taskset", "--cpu-list", "0-3")


@pytest.mark.parametrize("words", ["--run-path a.txt 1", "--run-path --no-python a.txt 1"])
def test_run_path_runs_any_file_as_python(words):
    (container,) = spec_of(words).containers
    assert container.argv == (sys.executable, "-u", "a.txt", "1")


def test_what_is_written_can_be_read():
    server, *trainers = spec_of("--server_num 1 --trainer_num 2 train.py").containers
    assert identity_of(server.environment(2)).is_server
    found = [identity_of(each.environment(2)) for each in trainers]
    assert [(each.index, each.local_rank, each.restart_count) for each in found] == [(0, 0, 2), (1, 1, 2)]


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
