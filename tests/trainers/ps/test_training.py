"""Parameter-server training by real processes, against one process of plain torch."""

from pathlib import Path

import pytest
import torch

from tests.support.cluster import job
from tests.support.training import CASES, furthest, train_alone

TRAINERS = 2


def run_cases(folder: Path, servers: int, mode: str, names: list[str]) -> None:
    with job(folder, trainers=TRAINERS, servers=servers) as running:
        running.start_all(["-m", "tests.support.scripts.ps_cases", str(folder), mode, *names])
        running.expect_success()


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
def test_sync_training_is_that_of_one_process_with_all_batches(tmp_path: Path, servers: int) -> None:
    run_cases(tmp_path, servers, "sync", list(CASES))
    for name, case in CASES.items():
        wanted = train_alone(case, TRAINERS).state_dict()
        for rank in range(TRAINERS):
            result = torch.load(tmp_path / f"{name}.{rank}.pt")
            assert furthest(result["after"], wanted) < 1e-5, (name, rank)
            assert furthest(result["during"], wanted) < 1e-5, (name, rank)
            served, own = result["evaluated"]
            assert served == pytest.approx(own, abs=1e-6)


@pytest.mark.slow
def test_async_training_learns_and_ends_with_one_model(tmp_path: Path) -> None:
    names = ["sgd", "adagrad", "adam"]
    run_cases(tmp_path, 2, "async", names)
    for name in names:
        first, second = (torch.load(tmp_path / f"{name}.{rank}.pt") for rank in range(TRAINERS))
        assert furthest(first["after"], second["after"]) == 0
        assert furthest(first["after"], first["during"]) == 0
        for result in (first, second):
            assert sum(result["losses"][-10:]) < 0.9 * sum(result["losses"][:10])
