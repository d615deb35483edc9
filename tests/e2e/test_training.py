"""The main job: real digits, from the command that the README gives, to a model that reads them."""

import re

import pytest

from tests.support.command import Fleetrun, Launch

BOUND = 200.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SEED_LINE = re.compile(
    r"^time: \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\], batch: \[\d+\], loss\[1\]:\[\d+\.\d{6}\]$", re.MULTILINE
)


def learnt(launch: Launch, at_least: float = 0.95) -> None:
    assert launch.wait(BOUND) == 0, launch
    found = re.search(r"^test accuracy: (\d\.\d+)$", launch.out, re.MULTILINE)
    assert found is not None, launch
    assert float(found[1]) >= at_least, launch
    assert SEED_LINE.search(launch.out), launch
    assert "LAUNCH ERROR" not in launch.err
    assert "Pod completed" in launch.err


@pytest.mark.slow
def test_a_server_and_two_trainers_learn_digits(fleetrun: Fleetrun):
    example = ("-m", "trainers.examples.parameter_server_trainer")
    launch = fleetrun.start("--server_num=1", "--trainer_num=2", *example, env=ONE_THREAD)
    learnt(launch, 0.9)  # how far they are apart, and so how well they learn, is up to the processors
    server = fleetrun.log("ps.0")
    assert re.search(r"running server with rank id: 0, endpoint: 127\.0\.0\.1:\d+", server), server
    assert "Traceback" not in server


@pytest.mark.slow
def test_two_trainers_learn_digits_collectively(fleetrun: Fleetrun):
    example = ("-m", "trainers.examples.collective_trainer")
    launch = fleetrun.start("--gpus", "0,1", *example, env=ONE_THREAD | {"CUDA_VISIBLE_DEVICES": ""})
    learnt(launch)
    assert "Gloo" in launch.err


@pytest.mark.slow
def test_a_server_that_its_trainers_let_go_has_not_failed(fleetrun: Fleetrun):
    """They may have much to do after stop_worker: longer than a server that just ends is given."""
    script = fleetrun.script("""
import time, torch
from trainers import fleet
fleet.init()
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    optimizer.minimize(model(torch.ones(8, 4)).sum())
    fleet.stop_worker()
    time.sleep(2.5)
    tell("evaluated")
""")
    launch = fleetrun.start("--server_num=1", "--trainer_num=1", script, env=ONE_THREAD)
    assert launch.wait(BOUND) == 0, launch
    assert launch.told("evaluated")
    assert "LAUNCH ERROR" not in launch.err, launch


@pytest.mark.slow
def test_an_exception_in_the_runtime_is_the_reports_first_failure(fleetrun: Fleetrun):
    """Rank 1 raises; rank 0 loses its peer and fails too, perhaps sooner at the end of its process."""
    script = fleetrun.script("""
import torch
from trainers import fleet
fleet.init(is_collective=True)
model = fleet.distributed_model(torch.nn.Linear(4, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(50):
    if RANK == 1 and step == 3:
        raise ValueError("第 3 批 is bad")
    optimizer.minimize(model(torch.ones(8, 4)).sum())
""")
    launch = fleetrun.start("--max_restart=0", "--nproc_per_node=2", script, env=ONE_THREAD)
    # 134: torch may abort in the last moments of a process whose peer is gone (seen under load).
    assert launch.wait(BOUND) in (1, 134), launch
    assert "First failure: trainer 1" in launch.err, launch
    assert "ValueError: 第 3 批 is bad" in launch.err
