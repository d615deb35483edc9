"""Ranks evaluate one model: with the buffers of rank 0, as torch's DistributedDataParallel does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.forking import Forker
from tests.support.strategies import WORLD, furthest

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("evaluation")
    with forker.job(folder, trainers=WORLD, servers=0) as running:
        running.start_all(["-m", "tests.support.scripts.evaluation_cases", str(folder)])
        running.expect_success()
        assert [process.output for process in running.processes] == ["", ""]
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", ["plain", "merged", "stage 1", "stage 2", "stage 3"])
def test_all_ranks_evaluate_the_same_model(found: Found, name: str) -> None:
    one, other = (each["alike"][name] for each in found)
    assert torch.equal(one, other)
    assert not torch.equal(one[0], one[1])


def test_it_is_the_model_that_torch_evaluates(found: Found) -> None:
    for each in found:
        case = each["as_torch"]
        assert torch.equal(case["found"], case["expected"])
        assert furthest(case["fleet"], case["torch"]) == 0


def test_an_evaluation_changes_nothing_in_the_training(found: Found) -> None:
    case = found[0]["as_torch"]
    assert furthest(case["fleet"], case["quiet"]) == 0


def test_one_rank_alone_may_evaluate_whichever(found: Found) -> None:
    assert [len(each["one_alone"]["found"]) for each in found] == [1, 1]
    assert torch.equal(found[1]["one_alone"]["found"][0], found[1]["as_torch"]["expected"][-1])
    trained = [
        {name: value for name, value in each["one_alone"]["end"].items() if "running" not in name}
        for each in found
    ]
    assert furthest(*trained) == 0


def test_the_module_inside_and_a_copy_are_evaluated_alike(found: Found) -> None:
    one, other = (each["other_ways"] for each in found)
    assert torch.equal(one["twin"], other["twin"])
    assert torch.equal(one["inside"], other["inside"])


def test_buffers_that_the_script_has_set_stay(found: Found) -> None:
    assert all(bool((each["other_ways"]["var"] == 2.0).all()) for each in found)
    assert [each["other_ways"]["taken"] for each in found] == [False, True]


def test_a_model_of_its_own_is_evaluated_with_its_own_buffers(found: Found) -> None:
    assert [each["local"]["kept"] for each in found] == [True, True]
    assert not torch.equal(found[0]["local"]["mean"], found[1]["local"]["mean"])
