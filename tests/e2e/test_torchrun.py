"""Command lines of torchrun as they are typed, with `fleetrun` in place of the first word: the cases of the
test that torch has for its launcher (test/distributed/launcher/test_run.py), as far as they apply.
"""

from __future__ import annotations

import os

import pytest

from tests.support.command import Fleetrun
from tests.support.ports import free_port

CORES = len(os.sched_getaffinity(0))
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip
SCRIPT = f"""
tell(*(f"{{name}}={{os.environ[name]}}" for name in {NAMES}), *sys.argv[1:])
print("rank", os.environ["RANK"])
"""

ONE_MACHINE = [
    ("--nproc-per-node=2", {}, 2, ""),
    ("--nproc_per_node 2", {}, 2, ""),
    ("--nnodes=1", {}, 1, "LOCAL_WORLD_SIZE=1"),
    ("--standalone --nproc-per-node=2", {}, 2, ""),
    ("--standalone --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nproc-per-node=2", {}, 2, ""),
    ("--nnodes=1:1 --nproc-per-node=2 --max-restarts=2", {}, 2, "TORCHELASTIC_MAX_RESTARTS=2"),
    ("--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --rdzv-id=run --nnodes=1 --nproc-per-node=2 "
     "--monitor-interval=1 --start-method=spawn", {}, 2, "TORCHELASTIC_RUN_ID=run"),
    ("--nnodes=1 --nproc-per-node=2 --node-rank=0 --master-addr=localhost --rdzv-id=run "
     "--monitor-interval=1 --start-method=spawn", {}, 2, "TORCHELASTIC_RUN_ID=run"),
    ("--rdzv-backend static --rdzv-endpoint 127.0.0.1:0 --nproc_per_node 2", {}, 2, ""),
    ("--nnodes=1:2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 "
     "--rdzv-conf=last_call_timeout=0.1,timeout=60", {}, 2, ""),
    ("--run-path --nproc-per-node=2 --role=trainer", {}, 2, "ROLE_NAME=trainer"),
    ("--virtual-local-rank --nproc-per-node 2", NO_GPU, 2, "LOCAL_RANK=0 "),
    ("--signals-to-handle=SIGTERM,SIGUSR1 --shutdown-timeout=5 --event-log-handler null --logs-specs=x "
     "--duplicate-stdout-filters=a,b --duplicate-stderr-filters=c --local-addr=127.0.0.1", {}, 1, ""),
    ("--nproc-per-node=auto", NO_GPU, CORES, ""),
    ("--nproc-per-node=cpu", {}, CORES, ""),
    ("", {"PET_NPROC_PER_NODE": "2", "PET_NNODES": "1", "PET_RDZV_BACKEND": "c10d",
          "PET_RDZV_ENDPOINT": "localhost:0", "PET_RDZV_ID": "run", "PET_MONITOR_INTERVAL": "1",
          "PET_START_METHOD": "spawn", "PET_MAX_RESTARTS": "7"}, 2, "TORCHELASTIC_MAX_RESTARTS=7"),
    ("--nproc-per-node=2 --max-restarts 1", {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "7"}, 2,
     "TORCHELASTIC_MAX_RESTARTS=1"),
    ("", {"PET_STANDALONE": "1", "PET_NPROC_PER_NODE": "2"}, 2, ""),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("words", "env", "size", "variable"), ONE_MACHINE)
def test_a_command_line_on_one_machine(fleetrun: Fleetrun, words: str, env: dict[str, str], size, variable):
    launch = fleetrun.run(*words.split(), fleetrun.script(SCRIPT), "--lr", "1", env=env)
    assert launch.code == 0, launch
    lines = launch.told("--lr 1")
    assert len(lines) == size
    for rank in range(size):
        (line,) = launch.told(f" RANK={rank} ")
        assert f" WORLD_SIZE={size} " in line
        assert f" ROLE_RANK={rank} " in line
        assert f" LOCAL_RANK={0 if 'virtual' in words else rank} " in line
    assert all(f" {variable}" in line for line in lines), variable


@pytest.mark.parametrize(
    ("words", "env"),
    [
        ("--nproc-per-node=2 --no-python", {}),
        ("--standalone --nproc_per_node=2 --no_python", {}),
        ("", {"PET_NO_PYTHON": "1", "PET_NPROC_PER_NODE": "2"}),
    ],
)
def test_a_program(fleetrun: Fleetrun, words: str, env: dict[str, str]):
    program = fleetrun.folder / "program"
    program.write_text('#!/bin/sh\n: > "$1.$RANK.$WORLD_SIZE"\n')
    program.chmod(0o755)
    assert fleetrun.run(*words.split(), "./program", "out", env=env).code == 0
    assert {each.name for each in fleetrun.folder.glob("out.*")} == {"out.0.2", "out.1.2"}


@pytest.mark.parametrize(
    ("words", "env"), [("-m train", {}), ("--module train", {}), ("train", {"PET_MODULE": "1"})]
)
def test_a_module(fleetrun: Fleetrun, words: str, env: dict[str, str]):
    fleetrun.script(SCRIPT)
    launch = fleetrun.run("--nproc-per-node=2", *words.split(), "a", env=env)
    assert launch.code == 0, launch
    assert len(launch.told("WORLD_SIZE=2")) == 2


def test_a_script_of_any_name_with_run_path(fleetrun: Fleetrun):
    fleetrun.script(SCRIPT, "train.txt")
    launch = fleetrun.run("--run-path", "--no-python", str(fleetrun.folder / "train.txt"))
    assert launch.code == 0, launch
    assert len(launch.told("WORLD_SIZE=1")) == 1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("-t 3", {0, 1, 2}),
        ("--tee=3 --redirects=3", {0, 1, 2}),
        ("-r 3", set()),
        ("-r 0:3,1:3", {2}),
        ("-r 3 -t 0:3,2:3", {0, 2}),
        ("--local-ranks-filter 0,1", {0, 1}),
        ("--tee=3 --local_ranks_filter=1,7", {1}),
    ],
)
def test_what_is_shown_and_that_all_is_in_files(fleetrun: Fleetrun, words: str, shown: set[int]):
    script = fleetrun.script("print('rank', RANK)")
    launch = fleetrun.run("--nproc-per-node=3", "--log-dir=log", *words.split(), script)
    assert launch.code == 0, launch
    assert {int(line.split()[-1]) for line in launch.out.splitlines()} == shown
    assert [fleetrun.log(f"trainer.{rank}") for rank in range(3)] == [f"rank {rank}\n" for rank in range(3)]


@pytest.mark.parametrize(("restarts", "code"), [(0, 3), (1, 0)])
def test_max_restarts(fleetrun: Fleetrun, restarts: int, code: int):
    script = fleetrun.script(
        "tell('attempt', os.environ['TORCHELASTIC_RESTART_COUNT'])\nsys.exit(0 if ATTEMPT else 3)"
    )
    launch = fleetrun.run(f"--max-restarts={restarts}", script)
    assert launch.code == code
    assert len(launch.told("attempt")) == restarts + 1


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "noun"),
    [
        ("--nproc-per-node=gpu", "gpu"),
        ("--nproc-per-node=fake", "--nproc-per-node"),
        ("--nnodes=2:1", "--nnodes"),
        ("--no-python --module", "--module"),
        ("--rdzv-backend=zeus", "--rdzv-backend"),
    ],
)
def test_what_torchrun_refuses_too(fleetrun: Fleetrun, words: str, noun: str):
    launch = fleetrun.run(*words.split(), fleetrun.script(SCRIPT), env=NO_GPU)
    assert launch.code == 2
    assert noun in launch.err
    assert launch.news == []


@pytest.mark.parametrize(
    "rendezvous",
    [
        "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=run",
        "--node-rank={rank} --master-addr=127.0.0.1 --master-port={port}",
        "--rdzv-backend=static --rdzv-endpoint=127.0.0.1:{port} --node_rank {rank}",
    ],
)
def test_two_machines(fleetrun: Fleetrun, rendezvous: str):
    script = fleetrun.script(SCRIPT)
    port = free_port()
    launches = [
        fleetrun.start(
            "--nnodes=2",
            "--nproc-per-node=2",
            f"--log-dir=log{rank}",
            *rendezvous.format(port=port, rank=rank).split(),
            script,
        )
        for rank in range(2)
    ]
    assert [launch.wait() for launch in launches] == [0, 0], launches
    lines = [line for launch in launches for line in launch.told("WORLD_SIZE=4")]
    assert sorted(line.split(" RANK=")[1][0] for line in lines) == ["0", "1", "2", "3"]
    if "rank}" in rendezvous:
        assert launches[1].told(" RANK=3 ")
    if "--master-port" in rendezvous:
        assert all(f" MASTER_PORT={port} " in line for line in lines)


def test_two_pods_of_kubeflow_with_no_option(fleetrun: Fleetrun):
    script = fleetrun.script(SCRIPT)
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1"}
    pod["PET_MASTER_PORT"] = str(free_port())
    pods = [fleetrun.start(script, env={**pod, "PET_NODE_RANK": str(rank)}) for rank in range(2)]
    assert [each.wait() for each in pods] == [0, 0], pods
    assert len(pods[1].told("WORLD_SIZE=4")) == 2
    assert pods[1].told(" RANK=3 ")


CLIENTS = """
import torch, torch.distributed as dist
from torch.distributed import debug

def client():
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False)

def read(store, key):
    store.set(f"{key} {RANK}", f"of {RANK}")
    return store.get(f"{key} {1 - RANK}").decode()

def join():
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
"""


@pytest.mark.parametrize("first", [(0, 1), (0,), (1,)])
def test_clients_of_the_store_before_the_group_is_made(fleetrun: Fleetrun, first: tuple[int, ...]):
    """As under torchrun: of ranks that need no group (torchft), too, and before a second group."""
    script = fleetrun.script(f"""{CLIENTS}
early = client() if RANK in {first} else None
if len({first}) == 2:
    tell("early", read(early, "early"))
for number in range(2):
    join()
    tell("joined", read(client(), "joined"))
    dist.barrier()
    if RANK == 1 and number == 0:
        wait_for_go()
    dist.destroy_process_group()
    tell("left", number)
""")
    launch = fleetrun.start("--nproc-per-node", "2", "--max-restarts", "0", script)
    launch.until_told("trainer.0 left 0")  # or the second group of rank 1 might meet at the first one's store
    launch.go()
    assert launch.wait() == 0, launch
    assert len(launch.told("joined of")) == 4
    assert len(launch.told("early of")) == (2 if len(first) == 2 else 0)


def test_the_debug_server_of_torch_before_the_group_is_made(fleetrun: Fleetrun):
    (fleetrun.folder / "tabulate.py").write_text("tabulate = None\n")  # of its pages, which nobody reads here
    script = fleetrun.script(f"""{CLIENTS}
debug.start_debug_server(port={free_port()}, start_method="fork")
join()
tell("there", *(dist.PrefixStore("debug_server", client()).get(f"rank{{each}}") for each in range(2)))
dist.barrier()
if RANK == 0:
    debug.stop_debug_server()
dist.destroy_process_group()
""")
    launch = fleetrun.run("--nproc-per-node", "2", "--max-restarts", "0", script)
    assert launch.code == 0, launch
    assert len(launch.told("there b'http://")) == 2


def test_a_program_may_bind_the_port_of_the_store_itself(fleetrun: Fleetrun):
    """JAX's coordinator does, and rank 0 of a group that rank 0 starts; also once torch is imported."""
    script = fleetrun.script("""
import socket, torch.distributed
place = "", int(os.environ["MASTER_PORT"])
if RANK == 0:
    socket.create_server(place).close()
    tell("bound", *place)
""")
    launch = fleetrun.run("--nproc-per-node", "2", "--max-restarts", "0", script)
    assert launch.code == 0, launch
    assert launch.told("bound")
