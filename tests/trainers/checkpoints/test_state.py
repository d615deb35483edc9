"""Who saves what. Pure."""

import pytest
import torch

from trainers.checkpoints.state import Contents, share


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_each_key_has_one_rank_and_the_load_is_even(world: int) -> None:
    sizes = {f"w{number}": number * 10 for number in range(40)}
    shares = [share(sizes, rank, world) for rank in range(world)]
    assert sorted(key for mine in shares for key in mine) == sorted(sizes)
    loads = [sum(sizes[key] for key in mine) for mine in shares]
    assert max(loads) - min(loads) <= max(sizes.values())


def test_the_order_of_keys_does_not_matter() -> None:
    sizes = {"a": 3, "b": 3, "c": 1, "d": 0}
    turned = dict(reversed(sizes.items()))
    assert share(sizes, 1, 2) == share(turned, 1, 2)


def test_no_rank_saves_or_copies_what_another_saves() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    contents = Contents(model, optimizer, {})
    first, second = (contents.tensors(rank, 2).keys() for rank in range(2))
    assert not first & second
    assert contents.keys() | {"random.0.cpu", "random.1.cpu"} == first | second
    assert "model.1.running_mean" in first
