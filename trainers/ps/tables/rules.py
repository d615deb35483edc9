"""Update rules change values by a gradient, in place on float32 tensors, by torch.optim's formulas.

`update` works element by element, so a slice of a parameter or a selection of rows gets the same result as
the whole. The order of operations is the same as in torch's single-tensor implementations
(torch/optim/{sgd,adagrad,adam}.py and torch/optim/_functional.py). Results therefore agree bit for bit on
most inputs.

On rows, all rules are lazy. A step changes only the values and the state of the rows of its gradient, also
with weight decay. `step` counts the updates of the whole table (as torch.optim.SparseAdam and FBGEMM do).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, fields
from typing import ClassVar

import torch
from torch import Tensor

from fleetrun.frozen import frozen

State = Sequence[Tensor]
_LARGEST = torch.finfo(torch.float32).max


class _Rule:
    """The base of all rules. `row_states` is the number of states with one number per row, for sparse tables
    only.
    """

    __slots__ = ()
    row_states: ClassVar[int] = 0

    @property
    def initial_state(self) -> float:
        """The first value of all numbers of the state."""
        return getattr(self, "initial_accumulator_value", 0.0)


@frozen
class Fixed(_Rule):
    """The rule of values that are not trained."""

    code: ClassVar[int] = 0
    states: ClassVar[int] = 0


@frozen
class SGD(_Rule):
    """The rule of torch.optim.SGD."""

    code: ClassVar[int] = 1
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: float = 0.0

    @property
    def states(self) -> int:
        return 1 if self.momentum else 0

    def update(self, values: Tensor, grad: Tensor, state: State, step: int, lr: float) -> None:
        """Update without momentum and weight decay. One operation of torch starts faster than a kernel."""
        values.add_(grad, alpha=-lr)


@frozen
class Adagrad(_Rule):
    """The rule of torch.optim.Adagrad. On rows, the same formula applies to the touched rows, as in torch for
    sparse gradients.
    """

    code: ClassVar[int] = 2
    states: ClassVar[int] = 1
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10


@frozen
class Adam(_Rule):
    """The rule of torch.optim.Adam, or of torch.optim.AdamW with `decoupled`."""

    code: ClassVar[int] = 3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: float = 0.0
    amsgrad: float = 0.0

    @property
    def states(self) -> int:
        return 3 if self.amsgrad else 2

    def update(self, values: Tensor, grad: Tensor, state: State, step: int, lr: float) -> None:
        mean, square, *largest = state
        if self.weight_decay and self.decoupled:
            values.mul_(1 - lr * self.weight_decay)
        elif self.weight_decay:
            grad = grad.add(values, alpha=self.weight_decay)
        mean.lerp_(grad, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        for maximum in largest:
            square = torch.maximum(maximum, square, out=maximum)
        correction1 = 1 - self.beta1**step
        correction2 = 1 - self.beta2**step
        scale = (square.sqrt() / math.sqrt(correction2)).add_(self.eps)
        values.addcdiv_(mean, scale, value=-lr / correction1)


@frozen
class SparseAdam(_Rule):
    """The rule of torch.optim.SparseAdam. Only the touched rows change their moments. The bias correction
    counts the table's updates.
    """

    code: ClassVar[int] = 4
    states: ClassVar[int] = 2
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@frozen
class RMSprop(_Rule):
    """The rule of torch.optim.RMSprop.

    The state is the mean square, the mean if `centered`, and the buffer with momentum.
    """

    code: ClassVar[int] = 6
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: float = 0.0

    @property
    def states(self) -> int:
        return 1 + bool(self.centered) + bool(self.momentum)

    def update(self, values: Tensor, grad: Tensor, state: State, step: int, lr: float) -> None:
        square, *others = state
        if self.weight_decay:
            grad = grad.add(values, alpha=self.weight_decay)
        square.mul_(self.alpha).addcmul_(grad, grad, value=1 - self.alpha)
        if self.centered:
            mean = others[0].lerp_(grad, 1 - self.alpha)
            square = square.addcmul(mean, mean, value=-1)
        scale = square.sqrt().add_(self.eps)
        if self.momentum:
            values.add_(others[-1].mul_(self.momentum).addcdiv_(grad, scale), alpha=-lr)
        else:
            values.addcdiv_(grad, scale, value=-lr)


@frozen
class RowWiseAdagrad(_Rule):
    """Adagrad with one sum for each row, of the mean square of its gradient. This is FBGEMM's
    EXACT_ROWWISE_ADAGRAD (`rowwise_adagrad` in fbgemm_gpu/codegen/genscript/optimizers.py) and TorchRec's
    RowWiseAdagrad.

        G' = G + mean(g^2);  w' = w - lr / (sqrt(G') + eps) * g

    Weight decay adds weight_decay * w to g or, if `decoupled`, multiplies w by 1 - lr * weight_decay.
    """

    code: ClassVar[int] = 7
    states: ClassVar[int] = 0
    row_states: ClassVar[int] = 1
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    decoupled: float = 0.0


@frozen
class RowWiseAdam(_Rule):
    """Adam with one second moment for each row, of the mean square of its gradient. This is FBGEMM's
    PARTIAL_ROWWISE_ADAM, with `decoupled` weight decay.

        m' = b1 m + (1 - b1) g;  v' = b2 v + (1 - b2) mean(g^2)
        w' = w - lr * (m' / (1 - b1^t)) / (sqrt(v' / (1 - b2^t)) + eps)

    Weight decay works as in RowWiseAdagrad.
    """

    code: ClassVar[int] = 8
    states: ClassVar[int] = 1
    row_states: ClassVar[int] = 1
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: float = 0.0


@frozen
class FTRL(_Rule):
    """FTRL-proximal with sparse weights by l1 (McMahan et al. 2013, "Ad click prediction: a view from the
    trenches", algorithm 1). The state is n, the sum of squared gradients, and z, the linear term.

        n' = n + g^2;  sigma = (n'^p - n^p) / lr;  z += g - sigma * w,  where p = -lr_power
        w = 0 if |z| <= l1, else -(z - sign(z) * l1) / ((beta + n'^p) / lr + 2 * l2)

    A step at lr 0 changes nothing. A first gradient whose square is 0 in float32 does not change w, because
    the formula has no value there. With lr_power -0.5, p is the paper's square root. As in Paddle's `ftrl`
    and in TensorFlow, l2 counts twice, so the paper's lambda_2 is 2 * l2.
    """

    code: ClassVar[int] = 5
    states: ClassVar[int] = 2
    l1: float = 0.0
    l2: float = 0.0
    lr_power: float = -0.5
    beta: float = 0.0

    def update(self, values: Tensor, grad: Tensor, state: State, step: int, lr: float) -> None:
        if not (lr := ftrl_lr(lr)):
            return
        squares, linear = state
        before = squares.pow(-self.lr_power)
        squares.addcmul_(grad, grad)
        after = squares.pow(-self.lr_power)
        linear.add_(grad - (after - before) / lr * values)
        scale = (after + self.beta) / lr + 2 * self.l2
        moved = torch.where(scale > 0, (linear.sign() * self.l1 - linear) / scale, values)
        values.copy_(torch.where(linear.abs() <= self.l1, 0.0, moved))


def ftrl_lr(lr: float) -> float:
    """Return the learning rate, or 0 if it is so small that a division by it could overflow in float32."""
    return lr if lr > 1e-30 else 0.0


AnyRule = Fixed | SGD | Adagrad | Adam | SparseAdam | FTRL | RMSprop | RowWiseAdagrad | RowWiseAdam
"""Any update rule. `states` is the number of state tensors that are as large as the values.

`update` changes values and state of a dense block in place if `dense.block_kernel_of` has no kernel. `step`
counts the updates of the whole table, including this one.
"""

RULES: dict[int, type[AnyRule]] = {
    rule.code: rule
    for rule in (Fixed, SGD, Adagrad, Adam, SparseAdam, FTRL, RMSprop, RowWiseAdagrad, RowWiseAdam)
}
ON_ROWS = "SGD, Adagrad, RowWiseAdagrad, SparseAdam, Adam, RowWiseAdam, RMSprop or FTRL"
"""The names of the rules that a sparse table may have."""


def state_widths(rule: AnyRule, dim: int) -> tuple[int, ...]:
    """Return how many numbers each state of a row has."""
    return (dim,) * rule.states + (1,) * rule.row_states


def options_of(rule: AnyRule) -> tuple[float, ...]:
    """Return the rule's options in the order of its fields, for the wire."""
    return tuple(map(float, astuple(rule)))


_MOST = {"beta1": 1 - 2**-53, "beta2": 1 - 2**-53, "alpha": 1.0, "lr_power": 0.0}
_ANY_SIGN = frozenset({"dampening", "lr_power"})


def wrong_option(rule: AnyRule) -> str:
    """Return the name and value of an option with which the rule would divide by zero or give NaN, or "".

    These are the limits of torch.optim, and further limits that torch does not check.
    """
    for each in fields(rule):
        value = getattr(rule, each.name)
        least = -_LARGEST if each.name in _ANY_SIGN else 0.0
        if not least <= value <= _MOST.get(each.name, _LARGEST):
            return f"{each.name} {value}"
    return ""


def same_state(one: AnyRule, other: AnyRule) -> bool:
    """Return True if the state of one rule has the same meaning for the other."""
    return _meaning(one) == _meaning(other)


def _meaning(rule: AnyRule) -> tuple[object, ...]:
    kind = Adam if isinstance(rule, SparseAdam) else type(rule)  # both keep the two moments
    return kind, rule.states, isinstance(rule, RMSprop) and bool(rule.centered)
