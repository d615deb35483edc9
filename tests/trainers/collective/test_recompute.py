"""Activations computed again: the same training, less kept."""

import copy

import pytest
import torch
from torch import nn

from trainers.collective.configs import RecomputeConfigs
from trainers.collective.modules import recompute
from trainers.errors import NotSupportedError, UsageError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 8))
            for _ in range(3)
        )

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for block in self.blocks:
            values = values + block(values)
        return values


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def kept(model: nn.Module) -> int:
    """Bytes that autograd keeps between forward and backward, parameters aside. One step."""
    torch.manual_seed(1)
    sizes = []
    params = {param.data_ptr() for param in model.parameters()}

    def pack(value: torch.Tensor) -> torch.Tensor:
        if value.data_ptr() not in params:
            sizes.append(value.numel() * value.element_size())
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = model(torch.randn(32, 6)).square().mean()
    loss.backward()
    return sum(sizes)


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def test_gradients_random_numbers_and_statistics_are_the_same_and_less_is_kept() -> None:
    plain, again = net(), net()
    recompute(again, RecomputeConfigs(checkpoints=["blocks.*"]))
    bytes_plain, bytes_again = kept(plain), kept(again)
    # 3 blocks keep their inputs only: 32 x 8 floats, of five tensors of 32 x 64 each.
    assert bytes_again < bytes_plain / 8
    assert again.state_dict().keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert grads(plain).keys() == grads(again).keys() == dict(plain.named_parameters()).keys()
    for name, value in grads(plain).items():
        assert torch.equal(grads(again)[name], value), name


def test_a_module_in_another_is_computed_again_with_it() -> None:
    nested, outer = net(), net()
    recompute(nested, RecomputeConfigs(checkpoints=["blocks.*.0", "blocks.*"]))
    recompute(outer, RecomputeConfigs(checkpoints=["blocks.*"]))
    assert kept(nested) == kept(outer)


def test_a_graph_that_is_retained_is_computed_again_for_each_backward_pass() -> None:
    plain = net()
    other = copy.deepcopy(plain)
    recompute(other, RecomputeConfigs(checkpoints=["blocks.*"]))
    for model in (plain, other):
        torch.manual_seed(1)
        loss = model(torch.ones(4, 6)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for one, same in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(same.grad, one.grad)
    for one, same in zip(plain.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(same, one)


def test_without_gradients_there_is_nothing_to_compute_again() -> None:
    model = net().eval()
    wanted = model(torch.ones(2, 6))
    recompute(model, RecomputeConfigs(checkpoints=["blocks.1"]))
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 6)), wanted)
    assert torch.equal(copy.deepcopy(model)(torch.ones(2, 6)), wanted)


def test_names_that_are_no_modules_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"'block.*', but the model has no such module; did you mean 'blocks"
    ):
        recompute(net(), RecomputeConfigs(checkpoints=["first", "block.*"]))
    with pytest.raises(UsageError, match=r"names no checkpoints.*This model has first, blocks"):
        recompute(net(), RecomputeConfigs())


def test_buffers_in_a_compiled_model_are_refused() -> None:
    with pytest.raises(NotSupportedError, match=r"strategy.compile with strategy.recompute of 'blocks.2'"):
        recompute(net(), RecomputeConfigs(checkpoints=["blocks.2"]), compiled=True)
    recompute(net(), RecomputeConfigs(checkpoints=["first"]), compiled=True)
