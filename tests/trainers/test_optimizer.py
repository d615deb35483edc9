"""The optimizer in fleet's clothes: groups are shared with the one it wraps, whenever they come."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainers.errors import UsageError
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


# ---- minimize, and the same loop of torch


class Pair:
    """A generator and a discriminator, each with its optimizer: `wrap` is what fleet does to one."""

    def __init__(self, wrap: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer) -> None:
        torch.manual_seed(0)
        self.maker, self.judge = (
            torch.nn.Linear(3, 3),
            torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Tanh()),
        )
        self.optimizers = [
            wrap(torch.optim.Adam(each.parameters(), lr=0.1)) for each in (self.maker, self.judge)
        ]
        self.real, self.noise = torch.randn(2, 5, 8, 3)

    def made(self, step: int) -> torch.Tensor:
        """The loss of the generator."""
        return -self.judge(self.maker(self.noise[step])).mean()

    def judged(self, step: int) -> torch.Tensor:
        """The loss of the discriminator."""
        return (self.judge(self.maker(self.noise[step]).detach()) - self.judge(self.real[step])).mean()

    def weights(self) -> torch.Tensor:
        every = [*self.maker.parameters(), *self.judge.parameters()]
        return torch.cat([each.detach().reshape(-1) for each in every])


def in_torch(optimizer: Any, *losses: torch.Tensor) -> None:
    optimizer.zero_grad()
    for loss in losses:
        loss.backward()
    optimizer.step()


def by_minimize(optimizer: Any, *losses: torch.Tensor) -> None:
    for loss in losses[:-1]:
        loss.backward()
    optimizer.minimize(losses[-1])


def after_the_models_zero_grad(optimizer: Any, *losses: torch.Tensor) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = None
    for loss in losses:
        loss.backward()
    optimizer.minimize(losses[-1])


def in_paddles_words(optimizer: Any, *losses: torch.Tensor) -> None:
    optimizer.zero_grad()
    for loss in losses:
        loss.backward()
    optimizer.minimize(losses[-1])


Minimize = Callable[..., None]


def in_turn(pair: Pair, minimize: Minimize) -> None:
    for step in range(5):
        minimize(pair.optimizers[0], pair.made(step))
        minimize(pair.optimizers[1], pair.judged(step))


def with_a_diagnostic_pass(pair: Pair, minimize: Minimize) -> None:
    for step in range(5):
        loss = pair.judged(step)
        loss.backward(retain_graph=True)
        pair.optimizers[1].zero_grad(set_to_none=step % 2 == 0)
        minimize(pair.optimizers[1], loss)


def cleared_by_the_model(pair: Pair, minimize: Minimize) -> None:
    for step in range(5):
        minimize(pair.optimizers[0], pair.made(step))
        pair.judge.zero_grad(set_to_none=step % 2 == 0)
        minimize(pair.optimizers[1], pair.judged(step))
        loss = pair.judged(step)
        loss.backward(retain_graph=True)
        pair.judge.zero_grad(set_to_none=step % 2 == 0)
        minimize(pair.optimizers[1], loss)


def against_adversaries(pair: Pair, minimize: Minimize) -> None:
    for step in range(5):
        given = pair.real[step].clone().requires_grad_()
        pair.judge(given).mean().backward(inputs=[given])
        with torch.no_grad():
            given = given + 0.1 * given.grad.sign()
        minimize(pair.optimizers[1], pair.judge(given).mean())


def accumulating(pair: Pair, minimize: Minimize) -> None:
    for step in range(4):
        minimize(pair.optimizers[1], pair.judged(step), pair.judged(step + 1))


def with_gradients_set_to_zero(pair: Pair, minimize: Minimize) -> None:
    for step in range(5):
        for optimizer in pair.optimizers:
            optimizer.zero_grad(set_to_none=False)
        minimize(pair.optimizers[1], pair.judged(step))


LOOPS = [
    in_turn,
    cleared_by_the_model,
    with_a_diagnostic_pass,
    against_adversaries,
    accumulating,
    with_gradients_set_to_zero,
]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("minimize", [by_minimize, in_paddles_words, after_the_models_zero_grad])
def test_minimize_trains_as_the_loop_of_torch(loop: Callable[[Pair, Minimize], None], minimize: Minimize):
    theirs, ours = Pair(), Pair(DistributedOptimizer)
    loop(theirs, in_torch)
    loop(ours, minimize)
    assert torch.equal(ours.weights(), theirs.weights())


@pytest.mark.parametrize("share", [lambda loss: loss, lambda loss: loss / 4 + loss.detach()])
def test_two_optimizers_of_one_loss(share: Callable[[torch.Tensor], torch.Tensor]):
    theirs, ours = Pair(), Pair(DistributedOptimizer)
    for step in range(5):
        share(theirs.made(step)).backward()
        for optimizer in theirs.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss = ours.made(step)
        if share(loss) is not loss:
            share(loss).backward()
        for optimizer in ours.optimizers:
            optimizer.minimize(loss)
    assert torch.equal(ours.weights(), theirs.weights())


def test_two_optimizers_of_a_loss_whose_gradients_are_zero():
    theirs, ours = Pair(), Pair(DistributedOptimizer)
    for factor in (1.0, 0.0, 1.0):
        (theirs.made(0) * factor).backward()
        for optimizer in theirs.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss = ours.made(0) * factor
        for optimizer in ours.optimizers:
            optimizer.minimize(loss)
    assert torch.equal(ours.weights(), theirs.weights())


def test_gradients_that_another_minimize_has_left_are_not_mixed_with_the_scripts():
    pair = Pair(DistributedOptimizer)
    pair.optimizers[0].minimize(pair.made(0))
    pair.judged(0).backward()
    with pytest.raises(UsageError, match="Call zero_grad"):
        pair.optimizers[1].minimize(pair.judged(1))
    pair.optimizers[1].zero_grad()
    pair.optimizers[1].minimize(pair.judged(1))
