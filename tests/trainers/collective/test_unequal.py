"""Trainers with unequal numbers of batches make the same number of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forking import Forker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("unequal")
    with forker.job(folder, trainers=2, servers=0) as running:
        running.start_all(["-m", "tests.support.scripts.unequal_cases", str(folder)])
        running.expect_success()
        outputs = [process.output.splitlines() for process in running.processes]
    return [torch.load(folder / f"{rank}.pt") | {"lines": outputs[rank]} for rank in range(2)]


def test_a_pass_ends_for_all_with_the_first_that_has_no_more(found: list[dict[str, Any]]) -> None:
    for each in found:
        counts = {name: each[name] for name in ("fleet", "turned", "equal", "empty", "executor")}
        assert counts == {"fleet": 3, "turned": 3, "equal": 4, "empty": 0, "executor": 2}
    assert torch.equal(found[0]["weight"], found[1]["weight"])


def test_those_with_more_say_that_they_leave_some_out(found: list[dict[str, Any]]) -> None:
    lines = [[line for line in each["lines"] if "skips" in line] for each in found]
    assert [len(each) for each in lines] == [1, 2]
    assert "another trainer has only 3 batches" in lines[1][0]


def test_a_trainer_without_any_batch_is_an_error_on_all(found: list[dict[str, Any]]) -> None:
    assert [each["none"].partition(",")[0] for each in found] == [
        "Trainer 0 has no batch",
        "Trainer 1 has a batch",
    ]


def test_an_evaluation_has_all_batches(found: list[dict[str, Any]]) -> None:
    assert [each["tested"] for each in found] == [2, 5]
    assert [each["inferred"] for each in found] == [1, 2]
    assert found[1]["alone"] == 2


def test_an_evaluation_of_a_sharded_model_ends_for_all(forker: Forker, tmp_path: Path) -> None:
    with forker.job(tmp_path, trainers=2, servers=0) as running:
        running.start_all(["-m", "tests.support.scripts.unequal_cases", "sharded"])
        running.expect_success()
        lines = [process.output.splitlines() for process in running.processes]
    assert all("batches 2" in each for each in lines)
    assert any("another trainer has only 2 batches" in line for line in lines[1])
