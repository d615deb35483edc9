"""What strategies do to a model, by two real ranks, against one process with the batches of both."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forking import Forker
from tests.support.scripts import shaping_cases as cases
from tests.support.training import furthest
from trainers.checkpoints import checkpoint

ALL = sum(param.numel() for param in cases.Blocks(0).parameters())
SHARDED = ["1 adam", "1 momentum", "2 adam", "3 adam", "3 momentum"]
CLIP = {"adam": None, "momentum": 0.1}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shaping")


@pytest.fixture(scope="module")
def ranks(forker: Forker, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """What the two ranks have seen."""
    for make, clip in CLIP.items():
        model = cases.Blocks(0)
        optimizer = cases.OPTIMIZERS[make](cases.trainable(model))
        cases.train(model, optimizer, None, range(cases.SAVED), clip)
        checkpoint.save(folder / f"alone {make}", cases.SAVED, model, optimizer)
    with forker.job(folder, trainers=2, servers=0) as running:
        running.start_all(["-m", "tests.support.scripts.shaping_cases", str(folder)])
        running.expect_success()
        assert [process.output for process in running.processes] == ["", ""]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", SHARDED)
def test_sharded_training_is_that_of_one_process(ranks: list[dict[str, Any]], case: str) -> None:
    assert ranks[0][case]["apart"] < 1e-5
    assert ranks[1][case]["apart"] is None, "rank 0 alone gets the whole state"
    assert all(rank[case]["same"] for rank in ranks), (
        "after an evaluation, too, parameters are the optimizer's"
    )


@pytest.mark.parametrize("case", SHARDED)
def test_a_rank_holds_its_part_only(ranks: list[dict[str, Any]], case: str) -> None:
    stage, make = case.split()
    for which in ("state", "loaded state"):
        states = [rank[case][which] for rank in ranks]
        assert sum(states) == (ALL - 1) * (2 if make == "adam" else 1)  # nobody trains the scale
        assert max(states) < 0.55 * sum(states)
    params = [rank[case]["params"] for rank in ranks]
    between = [rank[case]["params between forward and backward"] for rank in ranks]
    if stage == "1":
        assert params == between == [ALL, ALL]
    else:
        assert sum(params) == ALL
        assert max(params) < 0.55 * ALL
    if stage == "2":
        assert between == [ALL, ALL]
    if stage == "3":
        assert max(between) < 0.6 * ALL, "only what is in no unit stays whole"


@pytest.mark.parametrize("case", SHARDED)
def test_two_ranks_go_on_where_one_has_saved(ranks: list[dict[str, Any]], case: str) -> None:
    assert ranks[0][case]["resumed"] < 1e-5


@pytest.mark.parametrize("case", SHARDED)
@pytest.mark.usefixtures("ranks")
def test_one_process_goes_on_where_two_ranks_have_saved(folder: Path, case: str) -> None:
    make = case.split()[1]
    model = cases.Blocks(1)
    optimizer = cases.OPTIMIZERS[make](cases.trainable(model))
    assert checkpoint.load(folder / case, model, optimizer) == cases.SAVED
    cases.train(model, optimizer, None, range(cases.SAVED, cases.STEPS), CLIP[make])
    wanted, _ = cases.alone(cases.Blocks, make, CLIP[make])
    assert furthest(model.state_dict(), wanted.state_dict()) < 1e-5


def test_synchronized_batch_norm_sees_the_batches_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["batch norm"]["apart"] > 1e-3
    assert ranks[0]["sync"]["apart"] < 1e-5


def test_what_is_computed_again_counts_once(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["sync, recompute"]["apart"] < 1e-5
    assert ranks[0]["recompute, 3"]["apart"] < 1e-5
