"""Data parallel training by real processes, against one process of plain torch."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fleetrun.envs import contract
from tests.support.cluster import PATH, job
from tests.support.training import STEPS, TwoTables, furthest, loss_of

SCRIPT = ["-m", "tests.support.scripts.collective_cases"]


def train_alone(make: Callable[[TwoTables], torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = TwoTables(sparse=False)
    optimizer = make(model)
    for step in range(STEPS):
        loss_of(model, step, 2, None).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "make"),
    [
        ("fleet", lambda model: torch.optim.Adam([*model.dense(), *model.tables()], lr=0.01)),
        ("torchrun", lambda model: torch.optim.SGD(model.parameters(), lr=0.05)),
    ],
)
def test_two_processes_train_as_one_with_all_batches(
    tmp_path: Path, how: str, make: Callable[[TwoTables], torch.optim.Optimizer]
) -> None:
    with job(tmp_path, trainers=2) as running:
        running.start_all([*SCRIPT, how, str(tmp_path)])
        running.expect_success()
        assert [process.output for process in running.processes] == ["", ""]  # no warning at the end either
    wanted = train_alone(make)
    for rank in range(2):
        assert furthest(torch.load(tmp_path / f"{rank}.pt"), wanted) < 1e-5


@pytest.mark.slow
def test_each_backward_pass_exchanges_its_gradients(tmp_path: Path) -> None:
    """Torch exchanges only those of one backward pass after a forward pass."""
    torch.manual_seed(0)
    model = TwoTables(sparse=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(STEPS):
        (2 * loss_of(model, step, 2, None) + loss_of(model, step + 1, 2, None)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with job(tmp_path, trainers=2) as running:
        running.start_all([*SCRIPT, "passes", str(tmp_path)])
        running.expect_success()
    for rank in range(2):
        assert furthest(torch.load(tmp_path / f"{rank}.pt"), model.state_dict()) < 1e-5


@pytest.mark.slow
def test_a_process_on_its_own_is_a_group_of_one() -> None:
    ended = subprocess.run(
        [sys.executable, *SCRIPT, "alone"],
        env=contract.without_contract(os.environ) | {"PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("belongs to parameter-server training, and this job is collective") == 4
