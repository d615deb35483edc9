"""The optimizer in fleet's clothes: groups are shared with the one it wraps, whenever they come."""

import torch

from trainers.optimizer import DistributedOptimizer


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2, 3))


def test_a_later_group_is_trained_at_its_own_rate():
    first, second = weight(), weight()
    inner = torch.optim.SGD([first], lr=1.0)
    optimizer = DistributedOptimizer(inner)
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    optimizer.minimize((first + second).sum())
    assert first.tolist() == [[0.0] * 3] * 2
    assert second.tolist() == [[0.5] * 3] * 2
    assert [group["lr"] for group in inner.param_groups] == [1.0, 0.5]


def test_a_group_that_comes_after_a_load_is_there_once():
    inner = torch.optim.SGD([weight()], lr=1.0)
    optimizer = DistributedOptimizer(inner)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [weight()]})
    assert len(inner.param_groups) == len(optimizer.param_groups) == 2
    assert inner.param_groups[1] is optimizer.param_groups[1]


def test_a_load_into_the_one_inside_shows_outside():
    inner = torch.optim.SGD([weight()], lr=1.0)
    middle = DistributedOptimizer(inner)
    outer = DistributedOptimizer(middle)
    inner.load_state_dict(inner.state_dict())
    outer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == middle.param_groups[0]["lr"] == 0.5
