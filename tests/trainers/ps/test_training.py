"""Parameter-server training by real processes, against one process of plain torch."""

from pathlib import Path

import pytest
import torch

from tests.support.forking import Forker
from tests.support.training import CASES, LAZY, STEPS, TwoTables, furthest, loss_of, train_alone

TRAINERS = 2
FEW = 20
"""Steps, where it matters how values travel and not how long they do: two rounds of all batches."""


def run_cases(
    forker: Forker,
    folder: Path,
    servers: int,
    mode: str,
    names: list[str],
    trainers: int = TRAINERS,
    steps: int = FEW,
) -> None:
    with forker.job(folder, trainers=trainers, servers=servers) as running:
        running.start_all(["-m", "tests.support.scripts.ps_cases", str(folder), mode, str(steps), *names])
        running.expect_success()


def expect_alone(folder: Path, names: list[str], trainers: int = TRAINERS, steps: int = FEW) -> None:
    """Every trainer ended with the model of one process that had all batches."""
    for name in names:
        wanted = train_alone(CASES[name], trainers, steps).state_dict()
        for rank in range(trainers):
            result = torch.load(folder / f"{name}.{rank}.pt")
            assert furthest(result["after"], wanted) < 1e-5, (name, rank)
            assert furthest(result["during"], wanted) < 1e-5, (name, rank)
            served, own = result["evaluated"]
            assert served == pytest.approx(own, abs=1e-6)


@torch.no_grad()
def loss_of_all(model: TwoTables) -> float:
    """The mean over all batches of all trainers."""
    return sum(loss_of(model, step, TRAINERS, None).item() for step in range(FEW)) / FEW


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "steps"), [(3, FEW), (1, STEPS), (3, STEPS)])
def test_sync_training_is_that_of_one_process_with_all_batches(
    forker: Forker, tmp_path: Path, servers: int, steps: int
) -> None:
    run_cases(forker, tmp_path, servers, "sync", list(CASES), steps=steps)
    expect_alone(tmp_path, list(CASES), steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync_prefetch", "sync_allreduce", "sync_by_name"])
def test_where_values_are_and_when_they_are_fetched_changes_nothing(
    forker: Forker, tmp_path: Path, mode: str
) -> None:
    run_cases(forker, tmp_path, 2, mode, ["momentum", "adam"])
    expect_alone(tmp_path, ["momentum", "adam"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["in_order", "in_order_prefetch", "in_order_allreduce", "geo", "geo_prefetch"]
)
def test_one_trainer_alone_is_one_process(forker: Forker, tmp_path: Path, mode: str) -> None:
    """Async without overlap waits for each push; geo trains here, and gets back what it sent."""
    run_cases(forker, tmp_path, 2, mode, ["sgd", "adagrad", "adam", *LAZY], trainers=1)
    expect_alone(tmp_path, ["sgd", "adagrad", "adam", *LAZY], trainers=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize(
    "mode",
    ["async", "async_prefetch", "bounded_prefetch", "receive_prefetch", "async_allreduce", "geo"],
)
def test_trainers_out_of_step_learn_and_end_with_one_model(
    forker: Forker, tmp_path: Path, mode: str, name: str
) -> None:
    run_cases(forker, tmp_path, 2, mode, [name])
    first, second = (torch.load(tmp_path / f"{name}.{rank}.pt") for rank in range(TRAINERS))
    assert furthest(first["after"], second["after"]) == 0
    torch.manual_seed(0)
    model = TwoTables()
    untrained = loss_of_all(model)
    model.load_state_dict(first["after"])
    assert loss_of_all(model) < 0.999 * untrained
