import torch

from trainers.ps.server.pushes import Gradient, StepPushes


def dense(*values: float, lr: float = 0.1) -> Gradient:
    return Gradient(0, torch.tensor(values, dtype=torch.float32), None, lr)


def sparse(keys: list[int], rows: list[list[float]]) -> Gradient:
    return Gradient(1, torch.tensor(rows, dtype=torch.float32), torch.tensor(keys), 0.1)


def test_the_average_is_over_trainers() -> None:
    step = StepPushes()
    step.add(1, [dense(3, 5, lr=9), sparse([2, 7], [[2], [4]])])
    step.add(0, [dense(1, 1, lr=0.5), sparse([1, 7], [[6], [8]])])
    of_dense, of_sparse = step.average()
    assert of_dense.values.tolist() == [2, 3]
    assert of_dense.lr == 0.5  # the lowest rank's
    assert of_sparse.keys is not None
    rows = dict(zip(of_sparse.keys.tolist(), of_sparse.values[:, 0].tolist(), strict=True))
    assert rows == {1: 3, 2: 1, 7: 6}


def test_a_trainer_without_a_gradient_counts_as_zero() -> None:
    step = StepPushes()
    step.add(0, [dense(4)])
    step.add(1, [])
    (mean,) = step.average()
    assert mean.values.tolist() == [2]


def test_the_order_of_arrival_does_not_change_a_bit() -> None:
    pushes = {rank: [dense(*torch.randn(100).tolist())] for rank in range(5)}
    results = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        step = StepPushes()
        for rank in order:
            step.add(rank, pushes[rank])
        results.append(step.average()[0].values)
    assert torch.equal(*results)


def test_statistics_are_added_up_and_not_averaged() -> None:
    step = StepPushes()
    keys, shows = torch.tensor([5, 6]), torch.tensor([[2.0, 1.0], [1.0, 0.0]])
    for rank in (0, 1):
        step.add(rank, [Gradient(1, torch.ones(2, 1), keys, 0.1, shows)])
    (mean,) = step.average()
    assert mean.stats is not None
    assert mean.values.tolist() == [[1], [1]]
    assert mean.stats.tolist() == [[4, 2], [2, 0]]


def test_written_values_of_a_higher_rank_come_before_the_gradients_of_a_lower_one() -> None:
    step = StepPushes()
    step.add(1, [dense(7)._replace(written=True), dense(3)])
    step.add(0, [dense(1)])
    written, mean = step.average()
    assert (written.written, written.values.tolist()) == (True, [7])
    assert (mean.written, mean.values.tolist()) == (False, [2])
