"""Programs: what they compute without the model, and which models are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.cluster import ROOT
from trainers.errors import NotSupportedError, UsageError
from trainers.export import save_program
from trainers.inference import load_inference_model
from trainers.storage.errors import LoadError
from trainers.zoo.resnet import ResNet

RECIPE = re.compile(r"```python\n(import json\n.*?)```", re.DOTALL)

pytestmark = pytest.mark.slow  # torch.export takes its time to import


class Net(torch.nn.Module):
    """Tied weights, a buffer that no state has, a constant, dropout; inputs by place and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(9, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.out = torch.nn.Linear(4, 9)
        self.out.weight = self.words.weight
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("scale", torch.rand(4), persistent=False)
        self.shift = torch.rand(9)

    def forward(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, int]:
        if ids is not None:
            x = x + self.words(ids).sum(1)
        return self.out(self.drop(self.norm(x) * self.scale)) + self.shift, x.shape[0]


def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    model(torch.randn(8, 4))
    return model


@torch.no_grad()
def same(model: torch.nn.Module, served: object, *args: torch.Tensor) -> bool:
    assert callable(served)
    model.eval()
    wanted, rows = model(*args)
    found, rows_found = served(*args)
    model.train()
    return rows == rows_found and torch.allclose(found, wanted, atol=1e-6)


def test_a_program_gives_what_the_model_gives_for_batches_of_any_size(tmp_path: Path) -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_program(tmp_path, model, {"x": torch.randn(1, 4), "ids": torch.tensor([[1, 2]])}, None, {})
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    served = load_inference_model(tmp_path)
    assert repr(served) == "InferenceModel(x: float32 [any, 4], ids: int64 [any, 2])"
    for rows in (1, 2, 5):
        x, ids = torch.randn(rows, 4), torch.randint(0, 9, (rows, 2))
        assert same(model, served, x, ids)
        assert torch.equal(served(ids=ids, x=x)[0], served(x, ids)[0])
        assert not served(x, ids)[0].requires_grad
    for wrong, words in (
        ((x,), "was given 1 inputs by position and none by name"),
        ((x.double(), ids), r"takes x: float32 \[any, 4\], but was given torch.float64 \[5, 4\]"),
        ((x[:, :3], ids), r"was given torch.float32 \[5, 3\]"),
        ((x, 5), "ids: .* was given 5"),
    ):
        with pytest.raises(UsageError, match=words):
            served(*wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="by position and other by name"):
        served(x, other=ids)


def test_the_recipe_of_the_docs_needs_torch_and_safetensors_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    save_program(tmp_path / "served", model, torch.randn(3, 4), None, {})
    found = RECIPE.search((ROOT / "docs" / "saving.md").read_text())
    assert found is not None
    assert "trainers" not in found[1]
    monkeypatch.chdir(tmp_path)
    x = torch.randn(6, 4)
    names: dict[str, object] = {"x": x}
    exec(found[1], names)
    outputs = names["outputs"]
    assert isinstance(outputs, tuple)
    assert same(model, lambda x: outputs, x)


def test_a_large_one_is_saved_anew_and_damage_is_named(tmp_path: Path) -> None:
    model = ResNet(18, class_dim=5, width=8).eval()
    pictures = torch.randn(2, 3, 32, 32)
    save_program(tmp_path, Fixed(), torch.ones(4, 1), (), {})
    save_program(tmp_path, model, pictures, None, {})
    served = load_inference_model(tmp_path)
    with torch.no_grad():
        assert torch.allclose(served(pictures), model(pictures), atol=1e-6)
    assert len(list(tmp_path.iterdir())) == 3
    (path,) = tmp_path.glob("*.pt2")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(LoadError, match=f"{path.name} is damaged"):
        load_inference_model(tmp_path)
    with pytest.raises(LoadError, match=r"no inference\.json.*It has: nothing"):
        load_inference_model(tmp_path / "elsewhere")


class Fixed(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(4, -1).sum(1)


def test_a_model_that_fixes_the_batch_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError, match="fixes the first size of input 'x' at 4"):
        save_program(tmp_path, Fixed(), torch.randn(4, 2), None, {})
    assert not list(tmp_path.iterdir())
    save_program(tmp_path, Fixed(), torch.randn(4, 2), (), {})
    served = load_inference_model(tmp_path)
    assert torch.equal(served(torch.ones(4, 2)), torch.full((4,), 2.0))
    with pytest.raises(UsageError, match=r"x: float32 \[4, 2\], but was given torch.float32 \[8, 2\]"):
        served(torch.ones(8, 2))


def test_more_sizes_may_be_free(tmp_path: Path) -> None:
    any_size = torch.export.Dim.AUTO
    model = torch.nn.Softmax(dim=-1)
    save_program(tmp_path, model, torch.randn(4, 3), ({0: any_size, 1: any_size},), {})
    served = load_inference_model(tmp_path)
    assert served(torch.ones(2, 5)).shape == (2, 5)


@pytest.mark.parametrize("example", [(), [torch.ones(1), 5], {"x": None}])
def test_examples_are_tensors(tmp_path: Path, example: object) -> None:
    with pytest.raises(UsageError, match="example_inputs"):
        save_program(tmp_path, net(), example, None, {})  # type: ignore[arg-type]
