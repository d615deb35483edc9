"""Update rules in torch's operations: `update` of each, in place. For what the kernels compute."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from trainers.ps.tables.rules import FTRL, SGD, Adagrad, Adam, AnyRule, RMSprop, SparseAdam

KNOWN = (SGD, Adagrad, Adam, SparseAdam, RMSprop, FTRL)


def update(
    rule: AnyRule, values: Tensor, grad: Tensor, state: Sequence[Tensor], step: int, lr: float
) -> None:
    match rule:
        case SGD():
            grad = grad.add(values, alpha=rule.weight_decay)
            if rule.momentum:
                (buffer,) = state
                if step == 1:
                    buffer.copy_(grad)
                else:
                    buffer.mul_(rule.momentum).add_(grad, alpha=1 - rule.dampening)
                grad = grad.add(buffer, alpha=rule.momentum) if rule.nesterov else buffer
            values.add_(grad, alpha=-lr)
        case Adagrad():
            (total,) = state
            grad = grad.add(values, alpha=rule.weight_decay)
            total.addcmul_(grad, grad, value=1)
            rate = lr / (1 + (step - 1) * rule.lr_decay)
            values.addcdiv_(grad, total.sqrt().add_(rule.eps), value=-rate)
        case SparseAdam():
            mean, square = state
            mean.add_(grad.sub(mean).mul_(1 - rule.beta1))
            square.add_(grad.pow(2).sub_(square).mul_(1 - rule.beta2))
            scale = square.sqrt().add_(rule.eps)
            size = lr * math.sqrt(1 - rule.beta2**step) / (1 - rule.beta1**step)
            values.addcdiv_(mean, scale, value=-size)
        case Adam() | RMSprop() | FTRL():
            rule.update(values, grad, state, step, lr)
        case _:
            raise AssertionError(rule)
