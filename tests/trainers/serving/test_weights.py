"""A model's whole state, and its optimizer's: what is kept, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainers.errors import NotSupportedError
from trainers.serving.weights import load_state, save_state
from trainers.storage.errors import LoadError


class Mixed(torch.nn.Module):
    """Of many types, tied, on no contiguous memory, of no dimension and of no element."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.narrow = torch.nn.Parameter(torch.randn(2, width).bfloat16())
        self.turned = torch.nn.Parameter(torch.randn(4, 5).t())
        self.one = torch.nn.Linear(2, 2)
        self.two = torch.nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7, dtype=torch.int16))
        self.register_buffer("single", torch.randn(1, 3)[:, 1])
        self.register_buffer("none", torch.empty(0, 3, dtype=torch.float64))
        self.register_buffer("wave", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("passing", torch.ones(1), persistent=False)


def trained(model: torch.nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": list(model.parameters()), "lr": 0.1, "betas": (0.8, 0.9)}]
    optimizer = torch.optim.Adam(groups, amsgrad=True)
    for _ in range(2):
        sum(parameter.float().square().sum() for parameter in model.parameters()).backward()
        optimizer.step()
    return optimizer


def test_everything_comes_back(tmp_path: Path) -> None:
    model, other = Mixed(), Mixed()
    optimizer, fresh = trained(model), torch.optim.Adam(other.parameters(), lr=5.0, amsgrad=True)
    save_state(tmp_path, model, optimizer, first=True)
    load_state(tmp_path, other, fresh)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert fresh.param_groups[0]["betas"] == (0.8, 0.9)
    for index, entry in optimizer.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(fresh.state_dict()["state"][index][key], value)
    (weights,) = tmp_path.glob("state-weights-*.safetensors")
    read = load_file(weights)
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())


def test_who_is_not_the_first_writes_nothing(tmp_path: Path) -> None:
    save_state(tmp_path, Mixed(), None, first=False)
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    save_state(tmp_path, Mixed(), None, first=True)
    for other, words in (
        (Mixed(width=4), r"narrow is \[2, 3\] in the saved model and \[2, 4\] in this model"),
        (torch.nn.Linear(2, 2), "bias is missing in the saved model; count is missing in this model"),
    ):
        before = {name: value.clone() for name, value in other.state_dict().items()}
        with pytest.raises(LoadError, match=words):
            load_state(tmp_path, other, None)
        assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    model = Mixed()
    with pytest.raises(LoadError, match="was saved without optimizer"):
        load_state(tmp_path, model, trained(model))


def test_what_no_file_of_this_format_holds(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    model.register_buffer("wide", torch.ones(1, dtype=torch.complex128))
    with pytest.raises(NotSupportedError, match=r"wide is torch\.complex128"):
        save_state(tmp_path, model, None, first=True)
    assert not list(tmp_path.iterdir())
