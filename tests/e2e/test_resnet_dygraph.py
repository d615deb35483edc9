"""ResNet by data parallel training, from the commands of Paddle's quick start: the programs as they are, and
a network small enough for a test.
"""

import re
from pathlib import Path

import pytest

from tests.support.cluster import ROOT
from tests.support.command import Fleetrun, Launch
from tests.support.flowers import CLASSES, plant

EXAMPLES = ROOT / "trainers" / "examples"
BOUND = 200.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
SMALL = ("--layers=18", "--width=8", "--image_size=32", "--seed=4")
LINE = re.compile(
    r"\[Epoch (\d+), batch (\d+)\] loss: (\d+\.\d{5}), acc1: ([01]\.\d{5}), acc5: ([01]\.\d{5})"
)


def lines(launch: Launch) -> list[tuple[float, ...]]:
    """(epoch, batch, loss, acc1, acc5) of each line that trainer 0 printed; there are no others."""
    assert launch.wait(BOUND) == 0, launch
    found = [LINE.fullmatch(line) for line in launch.out.splitlines()]
    assert found, launch
    assert all(found), launch
    return [tuple(map(float, match.groups())) for match in found if match]


@pytest.mark.slow
def test_two_processes_train_a_resnet_step_by_step(fleetrun: Fleetrun):
    options = (*SMALL, "--batch_size=12", "--samples=264", "--class_dim=10", "--steps=17")
    launch = fleetrun.start("--gpus=0,1", str(EXAMPLES / "resnet_dygraph.py"), *options, env=ONE_THREAD)
    seen = lines(launch)
    # 264 pictures are 11 batches of 12 for each of two trainers.
    steps = [(0, 0), (0, 5), (0, 10), (1, 0), (1, 5)]
    assert [line[:2] for line in seen] == steps
    assert seen[-1][2] < seen[0][2] / 2, launch
    assert seen[-1][3] > seen[0][3], launch
    assert seen[-1][4] == 1.0, launch
    others = fleetrun.log("trainer.1")
    assert len(LINE.findall(others)) == len(steps)
    assert LINE.findall(others)[0][2] != f"{seen[0][2]:.5f}"  # other pictures


@pytest.mark.slow
def test_data_parallel_reads_flowers_by_processes_of_its_own(fleetrun: Fleetrun, tmp_path: Path):
    flowers = plant(tmp_path / "flowers")
    options = (*SMALL, f"--data={flowers}", "--batch_size=6", f"--class_dim={CLASSES}", "--epochs=5")
    words = ("--nproc_per_node=2", "-m", "trainers.examples.data_parallel")
    seen = lines(fleetrun.start(*words, *options, env=ONE_THREAD))
    # 40 pictures are 3 batches of 6 for each of two trainers.
    assert [line[:2] for line in seen] == [(epoch, 0) for epoch in range(5)]
    assert seen[-1][2] < seen[0][2] / 2
    assert seen[-1][3] > seen[0][3]
