"""Bags of ids, against torch's own."""

import pytest
import torch

from trainers.serving.program import Bags


@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_is_torchs_bag(mode: str, padding: int | None) -> None:
    torch.manual_seed(0)
    bag = torch.nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding)
    mine = Bags(bag)
    ids = torch.tensor([[0, 2, 2], [2, 2, 2], [5, 1, 5], [3, 4, 2]])
    flat, offsets = ids.reshape(-1), torch.tensor([0, 1, 1, 7])
    with torch.no_grad():
        assert torch.allclose(mine(ids), bag(ids))
        assert torch.allclose(mine(flat, offsets), bag(flat, offsets))
        if mode == "sum":
            weights = torch.rand(4, 3)
            assert torch.allclose(mine(ids, None, weights), bag(ids, None, weights))
            flat_weights = weights.reshape(-1)
            assert torch.allclose(mine(flat, offsets, flat_weights), bag(flat, offsets, flat_weights))


def test_offsets_may_have_their_end() -> None:
    bag = torch.nn.EmbeddingBag(6, 3, mode="sum", include_last_offset=True)
    ids, offsets = torch.arange(5), torch.tensor([0, 2, 5])
    assert torch.equal(Bags(bag)(ids, offsets), bag(ids, offsets))
