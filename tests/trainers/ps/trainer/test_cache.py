import torch

from trainers.ps.tables.rules import Adagrad
from trainers.ps.tables.spec import RowOptions
from trainers.ps.trainer.local import Cache


def cache() -> Cache:
    kept = Cache("t", 2, Adagrad(), RowOptions())
    kept.add(torch.tensor([4, 9]), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    return kept


def test_rows_that_are_not_here_are_named() -> None:
    rows, missing = cache().known(torch.tensor([9, 5, 4, -1]))
    assert missing.tolist() == [1, 3]
    assert rows[[0, 2]].tolist() == [[2, 2], [1, 1]]


def test_changes_are_those_since_the_last_exchange() -> None:
    kept = cache()
    keys = torch.tensor([4])
    kept.train(keys, torch.ones(1, 2), 0.5)
    kept.train(keys, torch.ones(1, 2), 0.5)
    changed, by = kept.changes()
    assert changed.tolist() == [4]
    after = kept.known(keys)[0]
    assert torch.allclose(by, after - 1.0)
    assert bool((by < -0.5).all())
    changed, _ = kept.changes()
    assert changed.tolist() == []


def test_new_values_leave_the_optimizer_state_alone() -> None:
    """A second step of Adagrad is smaller than the first, wherever the values come from."""
    kept, keys = cache(), torch.tensor([9])
    kept.train(keys, torch.ones(1, 2), 1.0)
    kept.changes()
    kept.revise(keys, torch.zeros(1, 2))
    kept.train(keys, torch.ones(1, 2), 1.0)
    assert torch.allclose(kept.known(keys)[0], torch.full((1, 2), -(0.5**0.5)))
    assert torch.allclose(kept.changes()[1], torch.full((1, 2), -(0.5**0.5)))
