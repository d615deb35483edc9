"""Bags of ids, against torch's own."""

import io

import pytest
import torch

from trainers.serving.program import Bags, program_of


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


class Scored(torch.nn.Module):
    def __init__(self, mode: str, last: bool) -> None:
        super().__init__()
        self.bags = torch.nn.EmbeddingBag(6, 3, mode=mode, include_last_offset=last, padding_idx=2)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(ids, offsets).sum(1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_a_program_takes_any_number_of_ids_and_of_bags(mode: str, last: bool) -> None:
    model = Scored(mode, last).eval()
    program = program_of(model, (torch.arange(5), torch.tensor([0, 2, 5])))
    assert [each["shape"] for each in program.inputs] == [[None], [None]]
    module = torch.export.load(io.BytesIO(program.file)).module()
    weights = tuple(program.weights.values())
    for ids, offsets in (
        (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])),
        (torch.tensor([5, 2, 3, 2, 2, 0, 1]), torch.tensor([0, 0, 2, 3, 5, 7])),
        (torch.tensor([4]), torch.tensor([0, 0, 0, 1])),
    ):
        with torch.no_grad():
            assert torch.allclose(module(weights, (ids, offsets)), model(ids, offsets), atol=1e-6)
    for wrong in ([1, 2, 3], [0, 3, 1], [0, 2, 9]):
        with pytest.raises(RuntimeError, match="offsets must start with 0"):
            module(weights, (torch.arange(3), torch.tensor(wrong)))
    early = torch.arange(3), torch.tensor([0, 1, 2])
    if last and mode != "sum":
        with pytest.raises(RuntimeError, match="or at their end"):
            module(weights, early)
    else:
        with torch.no_grad():
            assert torch.allclose(module(weights, early), model(*early), atol=1e-6)
