"""Data parallel training by real processes, against one process of plain torch."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fleetrun.envs import contract
from tests.support.cluster import PATH, job
from tests.support.forking import Forker
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
    forker: Forker, tmp_path: Path, how: str, make: Callable[[TwoTables], torch.optim.Optimizer]
) -> None:
    """Those of fleet are interpreters of their own, which end as such: without a warning."""
    started = job(tmp_path, trainers=2) if how == "fleet" else forker.job(tmp_path, trainers=2, servers=0)
    with started as running:
        running.start_all([*SCRIPT, how, str(tmp_path)])
        running.expect_success()
        assert [process.output for process in running.processes] == ["", ""]
    wanted = train_alone(make)
    for rank in range(2):
        assert furthest(torch.load(tmp_path / f"{rank}.pt"), wanted) < 1e-5


@pytest.mark.slow
def test_each_backward_pass_exchanges_its_gradients(forker: Forker, tmp_path: Path) -> None:
    """Torch exchanges only those of one backward pass after a forward pass."""
    torch.manual_seed(0)
    model = TwoTables(sparse=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(STEPS):
        (2 * loss_of(model, step, 2, None) + loss_of(model, step + 1, 2, None)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with forker.job(tmp_path, trainers=2, servers=0) as running:
        running.start_all([*SCRIPT, "passes", str(tmp_path)])
        running.expect_success()
    for rank in range(2):
        assert furthest(torch.load(tmp_path / f"{rank}.pt"), model.state_dict()) < 1e-5


@pytest.mark.slow
def test_a_process_on_its_own_is_a_group_of_one(forker: Forker, tmp_path: Path) -> None:
    environ = contract.without_contract(os.environ) | {"PYTHONPATH": PATH}
    ended = forker.start([*SCRIPT, "alone"], environ, tmp_path, tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines() if ended.wait(250) == 0 else []
    assert len(lines) == 4
    assert all("is for training with parameter servers, but this job is collective" in line for line in lines)
