"""Several optimizers of one model: what is pushed is what each had when it stepped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainers.errors import UsageError
from trainers.ps.optimizer import JoinedSteps


class Model:
    """A parameter for each of two optimizers; `pushed` has (gradient, rate) of both at each push."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        self.inner = [torch.optim.SGD([each], lr=1.0) for each in self.parameters]
        self.rows = [SimpleNamespace(state=0) for _ in self.inner]
        self.optimizers: Any = [
            SimpleNamespace(
                inner=each, param_groups=each.param_groups, groups=[SimpleNamespace(collected=rows)]
            )
            for each, rows in zip(self.inner, self.rows, strict=True)
        ]
        self.pushed: list[tuple[list[float] | None, float]] = []
        self.steps = JoinedSteps(self.optimizers, self._push, self.parameters)

    def _push(self, overflow: bool) -> None:
        for each, inner in zip(self.parameters, self.inner, strict=True):
            self.pushed.append(
                (None if each.grad is None else each.grad.tolist(), inner.param_groups[0]["lr"])
            )

    def backward(self, number: int, value: float) -> None:
        (self.parameters[number] * value).sum().backward()  # type: ignore[no-untyped-call]

    def step(self, number: int) -> None:
        self.steps.step(self.optimizers[number])


def test_a_scheduler_between_the_steps_counts_from_the_next_one() -> None:
    model = Model()
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.1) for each in model.inner]
    for number in range(2):
        model.backward(number, 2.0)
    for number in range(2):
        model.step(number)
        model.inner[number]._opt_called = True  # type: ignore[attr-defined]  # no warning of the scheduler's
        schedulers[number].step()
    assert model.pushed == [([2.0, 2.0], 1.0), ([2.0, 2.0], 1.0)]
    assert [each.param_groups[0]["lr"] for each in model.inner] == [0.1, 0.1]


def test_gradients_after_a_step_are_for_the_next_one() -> None:
    model = Model()
    model.backward(1, 2.0)
    model.step(0)
    model.backward(0, 5.0)
    model.step(1)
    assert model.pushed == [(None, 1.0), ([2.0, 2.0], 1.0)]
    assert model.parameters[0].grad is not None
    assert model.parameters[0].grad.tolist() == [5.0, 5.0]


def test_rows_that_get_gradients_after_the_step_are_refused() -> None:
    model = Model()
    model.rows[0].state = 1
    model.step(0)
    model.rows[0].state = 2
    with pytest.raises(UsageError, match=r"Rows of SGD .* before the first step"):
        model.step(1)
    assert model.pushed == []


def test_values_that_change_between_the_steps_are_refused() -> None:
    """Torch would change them after the update of the first optimizer."""
    model = Model()
    for number in range(2):
        model.backward(number, 2.0)
    model.step(0)
    model.parameters[0].data.clamp_(max=-1.0)
    with pytest.raises(UsageError, match="changed a parameter after the step"):
        model.step(1)
    assert model.pushed == []
    model.step(0)
    model.parameters[1].data.fill_(1.0)  # torch too writes before the update
    model.step(1)
    assert len(model.pushed) == 2
