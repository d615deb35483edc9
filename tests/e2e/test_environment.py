"""What a script finds in its environment: enough for scripts of either world, nothing of an outer job, and no
secret of it on disk or screen.
"""

import json
import re
import sys
import uuid

import pytest

from tests.support.command import Fleetrun
from tests.support.traces import state_of, wait_until

TWO = ("--nproc_per_node", "2")
REDUCE = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
print(f"sum {value.item():g} of {dist.get_world_size()}")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.quick
def test_an_unmodified_script_for_torchrun(fleetrun: Fleetrun):
    (fleetrun.folder / "torchrun_style.py").write_text(REDUCE)
    launch = fleetrun.run(*TWO, "--follow", "all", "torchrun_style.py")
    assert launch.code == 0, launch
    assert "trainer.0 | sum 3 of 2\n" in launch.out
    assert "trainer.1 | sum 3 of 2\n" in launch.out


def test_a_script_that_reads_paddles_variables(fleetrun: Fleetrun):
    (fleetrun.folder / "paddle_style.py").write_text("""
import os, socket
rank, number = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
endpoints = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")
assert os.environ["PADDLE_CURRENT_ENDPOINT"] == endpoints[rank] and len(endpoints) == number
host, port = endpoints[0].split(":")
if rank == 0:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((host, int(port)))
    server.listen()
    told = sorted(server.accept()[0].makefile().read() for _ in range(number - 1))
    print("heard of", *told)
else:
    while True:
        try:
            with socket.create_connection((host, int(port))) as peer:
                peer.sendall(b"%d" % rank)
            break
        except ConnectionRefusedError:
            continue
""")
    launch = fleetrun.run("--nproc_per_node", "3", "paddle_style.py")
    assert launch.code == 0, launch
    assert launch.out == "heard of 1 2\n"


def test_the_users_own_variables_reach_the_script(fleetrun: Fleetrun):
    script = fleetrun.script(
        "tell(*(os.environ.get(name) for name in ('MINE', 'NCCL_DEBUG', 'OMP_NUM_THREADS')))"
    )
    env = {"MINE": "as it was", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "7"}
    assert fleetrun.run(script, env=env).told("trainer") == ["trainer.0 as it was INFO 7"]


def test_a_launch_inside_a_trainer_is_a_job_of_its_own(fleetrun: Fleetrun):
    fleetrun.script("""
import json
import re
tell("inner", json.dumps({name: os.environ.get(name) for name in
    ("RANK", "WORLD_SIZE", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_JOB_ID")}))
print("inner", RANK)
meet(3)
""", "inner.py")  # fmt: skip
    script = fleetrun.script("""
tell("outer", os.environ["PADDLE_TRAINER_ENDPOINTS"])
if RANK == 1:
    words = ["--log_dir", "inner_log", "--nproc_per_node", "3", "inner.py"]
    sys.exit(subprocess.run([sys.executable, "-m", "fleetrun", *words]).returncode)
""")
    launch = fleetrun.run(
        "--job_id", "outer", *TWO, "--max_restart", "0", script, env={"PYTHONUNBUFFERED": "1"}
    )
    assert launch.code == 0, launch
    outer = set(launch.told("outer")[0].split()[2].split(","))
    inner = [json.loads(line.partition(" inner ")[2]) for line in launch.told(" inner ")]
    assert sorted(each["RANK"] for each in inner) == ["0", "1", "2"]
    for each in inner:
        assert (each["WORLD_SIZE"], each["PADDLE_TRAINERS_NUM"], each["PADDLE_JOB_ID"]) == (
            "3",
            "3",
            "default",
        )
        assert not outer & set(each["PADDLE_TRAINER_ENDPOINTS"].split(","))
    said = fleetrun.log("trainer.1")
    assert "PADDLE_JOB_ID" in said
    assert re.search(r"PADDLE_JOB_ID, PADDLE_LOG_DIR", said)
    assert "inner 0\n" in said


def test_the_inner_job_ends_with_the_outer_one(fleetrun: Fleetrun):
    fleetrun.script("leave_on_term()\nstay()", "inner.py")
    script = fleetrun.script("""
words = ["--log_dir", "inner_log", "--nproc_per_node", "2", "inner.py"]
subprocess.run([sys.executable, "-m", "fleetrun", *words])
""")
    launch = fleetrun.start(*TWO, script)
    launch.until_ready(4)
    launch.send(9)
    launch.wait()
    launch.gone()


def test_the_inner_job_ends_with_the_attempt_that_started_it(fleetrun: Fleetrun):
    """In ps mode, where the others go on: it is found among their processes."""
    fleetrun.script("tell('inner', os.getpid())\nignore(signal.SIGTERM)\nsignal.pause()", "inner.py")
    script = fleetrun.script("""
leave_on_term()
if WHO == "trainer.1" and ATTEMPT == 0:
    words = ["--log_dir", "inner_log", "--nproc_per_node", "2", "inner.py"]
    subprocess.Popen([sys.executable, "-m", "fleetrun", *words])
    wait_for_go()
    sys.exit(3)
stay()
""")
    launch = fleetrun.start("--server_num", "1", "--trainer_num", "2", script)
    launch.until_told(" inner ", 2)
    launch.until_ready(2)
    launch.go()
    launch.until_ready(3)
    inner = [int(line.split()[2]) for line in launch.told(" inner ")]
    wait_until(lambda: not any(map(state_of, inner)), lambda: list(map(state_of, inner)))
    launch.send(15)
    assert launch.wait() == 143


def test_endpoints_that_were_left_behind_are_not_used(fleetrun: Fleetrun):
    env = {"PADDLE_TRAINER_ENDPOINTS": "10.1.2.3:6170,10.1.2.4:6170", "PADDLE_TRAINER_ID": "1", "RANK": "5"}
    script = fleetrun.script("tell(os.environ['PADDLE_TRAINER_ENDPOINTS'], os.environ['RANK'])")
    launch = fleetrun.run(script, env=env)
    assert launch.code == 0
    (line,) = launch.told("trainer.0")
    assert line.startswith("trainer.0 127.0.0.1:")
    assert line.endswith(" 0")
    assert "PADDLE_TRAINER_ENDPOINTS" in launch.err


@pytest.mark.parametrize(
    "name",
    ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "FLEETRUN_TOKEN", "PADDLE_PASSWORD", "db_passwd"],
)
def test_secrets_are_neither_written_nor_shown(fleetrun: Fleetrun, name: str):
    sekrit = f"sekrit-{uuid.uuid4().hex}"
    env = {name: sekrit}
    script = fleetrun.script("if ATTEMPT == 0: sys.exit(3)\nraise ValueError('no')")
    launches = [
        fleetrun.run("--max_restart", "1", "--log_level", "debug", *TWO, script, env=env),
        fleetrun.run("--dry_run", *TWO, script, env=env),
        fleetrun.run("--dry_run", "--json", *TWO, script, env=env),
    ]
    for launch in launches:
        assert sekrit not in launch.out + launch.err
    files = [path for path in fleetrun.folder.rglob("*") if path.is_file()]
    assert len(files) >= 3
    for path in files:
        assert sekrit not in path.read_text(errors="replace"), path


def test_gpus_without_cuda_are_said_to_be_missing_and_the_job_runs_on_cpus(fleetrun: Fleetrun):
    script = fleetrun.script(
        "tell(os.environ.get('PADDLE_DISTRI_BACKEND'), os.environ.get('CUDA_VISIBLE_DEVICES'))"
    )
    launch = fleetrun.run("--gpus", "0,1", script, env={"CUDA_VISIBLE_DEVICES": ""})
    assert launch.code == 0
    (line,) = [line for line in launch.err.splitlines() if "WARNING" in line]
    assert "--gpus 0,1" in line
    assert "Gloo" in line
    assert len(launch.told("gloo")) == 2


def test_the_script_runs_under_the_same_python_unbuffered_and_without_stdin(fleetrun: Fleetrun):
    script = fleetrun.script("tell(sys.executable, sys.stdout.write_through, repr(sys.stdin.read()))")
    launch = fleetrun.run(script)
    assert launch.told("trainer") == [f"trainer.0 {sys.executable} True ''"]
