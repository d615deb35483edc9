"""The quick starts in static style, from their commands: the same training as step by step, declared once.
On digits: tests/trainers/examples.
"""

import re

import pytest

from tests.support.cluster import ROOT
from tests.support.command import Fleetrun, Launch

EXAMPLES = ROOT / "trainers" / "examples"
BOUND = 200.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
RESNET = re.compile(r"\[Epoch (\d+), batch (\d+)\] loss: (\d+\.\d{5}), acc1: [01]\.\d{5}, acc5: [01]\.\d{5}")
CLICKS = re.compile(r"time: \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\], batch: \[(\d+)\], loss\[1\]:\[(\d\.\d+)\]")


def ended(launch: Launch) -> list[str]:
    """What trainer 0 printed, line by line."""
    assert launch.wait(BOUND) == 0, launch
    assert "LAUNCH ERROR" not in launch.err, launch
    return launch.printed


@pytest.mark.slow
def test_resnet_has_the_losses_of_resnet_step_by_step(fleetrun: Fleetrun):
    small = ("--layers=18", "--width=8", "--image_size=32", "--batch_size=4", "--samples=48", "--seed=5")
    words = ("--class_dim=10", "--lr=0.05", "--steps=8")
    launches = [
        fleetrun.start("--gpus=0,1", "--log_dir", log, *script, *small, *words, env=ONE_THREAD)
        for log, script in (
            ("static", (str(EXAMPLES / "resnet_static.py"),)),
            ("dygraph", ("-m", "trainers.examples.resnet_dygraph")),
        )
    ]
    static, dygraph = ([RESNET.fullmatch(line) for line in ended(launch)] for launch in launches)
    assert [found and found.groups()[:2] for found in static] == [("0", "0"), ("0", "5"), ("1", "0")]
    assert [found and found[0] for found in static] == [found and found[0] for found in dygraph]


@pytest.mark.slow
def test_wide_and_deep_trains_from_a_data_set(fleetrun: Fleetrun):
    script = str(EXAMPLES / "wide_and_deep_dataset.py")
    small = ("--rows=6000", "--batch_size=100", "--dim=4", "--hidden", "16", "--lr=0.02", "--sync")
    launch = fleetrun.start("--server_num=1", "--trainer_num=2", script, *small, env=ONE_THREAD)
    found = [CLICKS.fullmatch(line) for line in ended(launch)]
    assert [each and int(each[1]) for each in found] == list(range(1, 61))
    losses = [float(each[2]) for each in found if each]
    assert sum(losses[-20:]) < 0.95 * sum(losses[:20])
    made = sorted(path.name for path in (fleetrun.folder / "wide_and_deep_data").iterdir())
    assert made == ["part-0.rows-6000.seed-0", "part-1.rows-6000.seed-0"]
