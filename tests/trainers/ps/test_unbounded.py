"""Tables whose ids have no end, by real processes."""

from pathlib import Path

import pytest
import torch

from tests.support.forking import Forker
from trainers.ps import read_values

TABLES = ["ids.weight", "rare.weight", "far.weight"]


def trained(
    forker: Forker, folder: Path, servers: int, wire_dtype: str = "float32"
) -> dict[str, dict[int, torch.Tensor]]:
    """The rows of every table by key."""
    folder.mkdir()
    with forker.job(folder, trainers=2, servers=servers) as running:
        command = ["-m", "tests.support.scripts.ps_unbounded", str(folder / "saved"), wire_dtype]
        running.start_all(command)
        running.expect_success()
    saved = read_values(folder / "saved").sparse
    return {name: dict(zip(saved[name].keys.tolist(), saved[name].values, strict=True)) for name in saved}


def furthest(left: dict[int, torch.Tensor], right: dict[int, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[key] - right[key]).abs().max()) for key in left)


@pytest.fixture(scope="module")
def alone(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, torch.Tensor]]:
    """The rows of one server, as they are."""
    return trained(forker, tmp_path_factory.mktemp("alone") / "1", 1)


@pytest.mark.slow
def test_rows_do_not_depend_on_the_number_of_servers(
    forker: Forker, tmp_path: Path, alone: dict[str, dict[int, torch.Tensor]]
) -> None:
    three = trained(forker, tmp_path / "3", 3)
    for name in TABLES:
        assert furthest(alone[name], three[name]) < 1e-6
    seen = {key * (step + 1) for step in range(3) for key in range(-6, 7)}
    # Training makes a row: evaluation makes none, and padding_idx has none, however often it is looked up.
    assert set(alone["ids.weight"]) == seen - {0}
    assert set(alone["far.weight"]) == {key * 2**40 for key in seen}
    assert set(alone["rare.weight"]) <= seen - {0}


@pytest.mark.slow
@pytest.mark.parametrize("wire_dtype", ["float16", "bfloat16"])
def test_short_rows_on_the_wire_train_nearly_the_same(
    forker: Forker, tmp_path: Path, alone: dict[str, dict[int, torch.Tensor]], wire_dtype: str
) -> None:
    short = trained(forker, tmp_path / "short", 1, wire_dtype)
    difference = furthest(alone["ids.weight"], short["ids.weight"])
    assert 0 < difference < 0.1
