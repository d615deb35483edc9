"""Update rules: how a gradient changes values, in place on float32 tensors, by torch.optim's formulas.

`update` works element by element, so a slice of a parameter or a selection of rows gets the same result as
the whole. The order of operations is that of torch's single-tensor implementations
(torch/optim/{sgd,adagrad,adam}.py and torch/optim/_functional.py), so that results agree bit for bit on
most inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import ClassVar

import torch

State = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Fixed:
    """Values that are not trained."""

    code: ClassVar[int] = 0
    states: ClassVar[int] = 0
    initial_state: ClassVar[float] = 0.0

    def update(self, values: torch.Tensor, grad: torch.Tensor, state: State, step: int, lr: float) -> None:
        raise AssertionError("a push to a table that is not trained should have been refused")


@dataclass(frozen=True, slots=True)
class SGD:
    """torch.optim.SGD. On rows without momentum and weight decay, as torch does for sparse gradients."""

    code: ClassVar[int] = 1
    initial_state: ClassVar[float] = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: float = 0.0

    @property
    def states(self) -> int:
        return 1 if self.momentum else 0

    def update(self, values: torch.Tensor, grad: torch.Tensor, state: State, step: int, lr: float) -> None:
        if self.weight_decay:
            grad = grad.add(values, alpha=self.weight_decay)
        if self.momentum:
            (buffer,) = state
            if step == 1:
                buffer.copy_(grad)
            else:
                buffer.mul_(self.momentum).add_(grad, alpha=1 - self.dampening)
            grad = grad.add(buffer, alpha=self.momentum) if self.nesterov else buffer
        values.add_(grad, alpha=-lr)


@dataclass(frozen=True, slots=True)
class Adagrad:
    """torch.optim.Adagrad; on rows the same formula for the touched rows, as torch does for sparse
    gradients.
    """

    code: ClassVar[int] = 2
    states: ClassVar[int] = 1
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    @property
    def initial_state(self) -> float:
        return self.initial_accumulator_value

    def update(self, values: torch.Tensor, grad: torch.Tensor, state: State, step: int, lr: float) -> None:
        (total,) = state
        if self.weight_decay:
            grad = grad.add(values, alpha=self.weight_decay)
        total.addcmul_(grad, grad, value=1)
        values.addcdiv_(grad, total.sqrt().add_(self.eps), value=-lr / (1 + (step - 1) * self.lr_decay))


@dataclass(frozen=True, slots=True)
class Adam:
    """torch.optim.Adam, without amsgrad."""

    code: ClassVar[int] = 3
    states: ClassVar[int] = 2
    initial_state: ClassVar[float] = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def update(self, values: torch.Tensor, grad: torch.Tensor, state: State, step: int, lr: float) -> None:
        mean, square = state
        if self.weight_decay:
            grad = grad.add(values, alpha=self.weight_decay)
        mean.lerp_(grad, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        correction1 = 1 - self.beta1**step
        correction2 = 1 - self.beta2**step
        scale = (square.sqrt() / math.sqrt(correction2)).add_(self.eps)
        values.addcdiv_(mean, scale, value=-lr / correction1)


@dataclass(frozen=True, slots=True)
class SparseAdam:
    """torch.optim.SparseAdam: moments of the touched rows only; the bias correction counts the table's
    updates.
    """

    code: ClassVar[int] = 4
    states: ClassVar[int] = 2
    initial_state: ClassVar[float] = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def update(self, values: torch.Tensor, grad: torch.Tensor, state: State, step: int, lr: float) -> None:
        mean, square = state
        mean.add_(grad.sub(mean).mul_(1 - self.beta1))
        square.add_(grad.pow(2).sub_(square).mul_(1 - self.beta2))
        scale = square.sqrt().add_(self.eps)
        step_size = lr * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        values.addcdiv_(mean, scale, value=-step_size)


@dataclass(frozen=True, slots=True)
class FTRL:
    """FTRL-proximal (McMahan et al. 2013, "Ad click prediction: a view from the trenches", algorithm 1):
    sparse weights by l1. State: n, the sum of squared gradients, and z, the linear term.

        n' = n + g^2;  sigma = (n'^p - n^p) / lr;  z += g - sigma * w,  where p = -lr_power
        w = 0 if |z| <= l1, else -(z - sign(z) * l1) / ((beta + n'^p) / lr + 2 * l2)

    With lr_power -0.5, p is the paper's square root. As in Paddle's `ftrl` and TensorFlow's, l2 counts
    twice; the paper's lambda_2 is 2 * l2.
    """

    code: ClassVar[int] = 5
    states: ClassVar[int] = 2
    initial_state: ClassVar[float] = 0.0
    l1: float = 0.0
    l2: float = 0.0
    lr_power: float = -0.5
    beta: float = 0.0

    def update(self, values: torch.Tensor, grad: torch.Tensor, state: State, step: int, lr: float) -> None:
        squares, linear = state
        before = squares.pow(-self.lr_power)
        squares.addcmul_(grad, grad)
        after = squares.pow(-self.lr_power)
        linear.add_(grad - (after - before) / lr * values)
        scale = (after + self.beta) / lr + 2 * self.l2
        moved = (linear.sign() * self.l1 - linear) / scale
        values.copy_(torch.where(linear.abs() <= self.l1, 0.0, moved))


AnyRule = Fixed | SGD | Adagrad | Adam | SparseAdam | FTRL
"""`states` is the number of state tensors, each as large as the values and full of `initial_state` at first.
`update` changes values and state in place; `step` counts the updates of the whole table, this one included.
"""

RULES: dict[int, type[AnyRule]] = {rule.code: rule for rule in (Fixed, SGD, Adagrad, Adam, SparseAdam, FTRL)}


def options_of(rule: AnyRule) -> tuple[float, ...]:
    """The rule's options in the order of its fields, for the wire."""
    return tuple(map(float, astuple(rule)))
