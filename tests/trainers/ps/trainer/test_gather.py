"""The backward pass of our own against torch's."""

import pytest
import torch

from trainers.ps.trainer.embedding import gathered


@pytest.mark.parametrize("places", [[[0, 1, 0], [2, 2, 2]], [[3, 0, 1], [0, 0, 3]], [[1, 1, 1], [1, 1, 1]]])
def test_values_and_gradients_are_torchs(places: list[list[int]]) -> None:
    place = torch.tensor(places)
    ours = torch.randn(4, 5, requires_grad=True)  # row 3, or others, may not be named at all
    torchs = ours.detach().clone().requires_grad_()
    weights = torch.randn(2, 3, 5)
    (gathered(place, ours) * weights).sum().backward()
    (torch.nn.functional.embedding(place, torchs) * weights).sum().backward()
    assert torch.equal(gathered(place, ours), torchs[place])
    assert ours.grad is not None
    assert torchs.grad is not None
    assert torch.allclose(ours.grad, torchs.grad, atol=1e-6)


def test_a_gradient_that_is_no_contiguous_float32_tensor_is_taken() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    looked_up = gathered(torch.tensor([[0, 1], [1, 2]]), rows)
    looked_up.transpose(0, 1).sum().backward()  # an expanded, transposed gradient
    assert rows.grad is not None
    assert rows.grad.tolist() == [[1, 1], [2, 2], [1, 1]]


def test_an_empty_batch_has_zero_gradients() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    gathered(torch.empty(0, 4, dtype=torch.int64), rows).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[0, 0]] * 3
