"""Programs that would answer wrongly, quietly: they are refused, or computed request by request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainers.export import save_program
from trainers.inference_server.files import CacheFile
from trainers.inference_server.model import ModelVersion, ServedModel
from trainers.serving.bundle import read_bundle
from trainers.storage.errors import LoadError

pytestmark = pytest.mark.slow  # torch.export


class Function(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x) + 0 * self.calls


class Counting(Function):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


def served(folder: Path, model: torch.nn.Module, rows: int = 5) -> ServedModel:
    save_program(folder, model.eval(), torch.rand(rows, 3), None, {})
    bundle = read_bundle(folder, "inference", ("program", "weights"))
    files = {}
    for part, content in bundle.contents.items():
        path = folder / f"part-{part}"
        path.write_bytes(content.numpy().tobytes())
        files[part] = CacheFile(path=str(path), size=len(content))
    version = ModelVersion(sequence=1, version="1", about=bundle.about, values=None, **files)
    found = ServedModel(version)
    found.warm_up()
    return found


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 if x.shape[0] % 2 else x,
        lambda x: x * 2 if x.shape[0] != 7 else x,
    ],
)
def test_a_program_for_some_sizes_only_is_refused(
    tmp_path: Path, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises(LoadError, match=r"the program is right only where .*size"):
        served(tmp_path, Function(function))


def test_a_program_with_a_least_size_is_checked_for_each_request(tmp_path: Path) -> None:
    model = served(tmp_path, Function(lambda x: x * 2 if x.shape[0] > 3 else x))
    _, (alone,) = model.compute([(torch.ones(1, 3),)])
    assert isinstance(alone, BaseException)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ x.T,
        lambda x: x.softmax(0),
        lambda x: x[:1] + x,
        lambda x: x - x.mean(0),
    ],
)
def test_rows_that_depend_on_each_other_are_not_joined_with_those_of_another_request(
    tmp_path: Path, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    model = served(tmp_path, Function(function))
    assert not model.program.joins


def test_rows_that_do_not_are(tmp_path: Path) -> None:
    model = served(tmp_path, Function(lambda x: x.softmax(1)))
    assert model.program.joins
    one, other = torch.rand(2, 3), torch.rand(1, 3)
    _, results = model.compute([(one,), (other,)])
    for request, result in zip((one, other), results, strict=True):
        assert isinstance(result, dict)
        assert torch.allclose(result["output"], request.softmax(1))


def test_a_program_that_remembers_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="with each request"):
        served(tmp_path, Counting(lambda x: x))
