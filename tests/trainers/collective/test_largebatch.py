"""What LARS and LAMB cannot replace."""

from typing import Any

import pytest
import torch

from trainers.collective import large_batch
from trainers.collective.configs import LambConfigs, LarsConfigs
from trainers.errors import FleetError

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Adam, {}, "replaces torch.optim.SGD with momentum, and was given Adam;"),
        (SGD, {}, "was given SGD without momentum"),
        (SGD, {"momentum": 0.9, "weight_decay": 0.1}, "0.0005, and the optimizer has 0.1 of its own"),
        (SGD, {"momentum": 0.9}, "makes new groups of parameters, and a scheduler has the former ones"),
    ],
)
def test_what_lars_refuses(kind: Any, options: dict[str, Any], words: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = kind([weight], lr=0.1, **options)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    configs = LarsConfigs(exclude_from_weight_decay=("weight",))
    with pytest.raises(FleetError, match=words):
        large_batch.lars(optimizer, configs, {weight: "weight"})


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (SGD, {"momentum": 0.9}, "replaces torch.optim.Adam or AdamW, and was given SGD;"),
        (Adam, {"amsgrad": True}, "NotSupported: strategy.lamb with amsgrad=True"),
        (AdamW, {"weight_decay": 0.1}, "0.01, and the optimizer has 0.1 of its own"),
        (AdamW, {}, r"of shape \(2, 2\) has none: make the optimizer of model.named_parameters"),
    ],
)
def test_what_lamb_refuses(kind: Any, options: dict[str, Any], words: str) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1, **options)
    with pytest.raises(FleetError, match=words):
        large_batch.lamb(optimizer, LambConfigs(exclude_from_weight_decay=("bias",)), {})


def test_lamb_is_algorithm_2_after_many_steps_of_weights_that_decay() -> None:
    torch.manual_seed(0)
    weight, zeros = torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.zeros(3))
    optimizer = large_batch.lamb(
        Adam([weight, zeros], lr=0.01, betas=(0.8, 0.99), eps=1e-6), LambConfigs(lamb_weight_decay=0.1), {}
    )
    values = [weight.detach().double().clone(), zeros.detach().double().clone()]
    moments = [[torch.zeros_like(value), torch.zeros_like(value)] for value in values]
    for step in range(1, 201):
        grads = [torch.randn_like(weight), torch.randn_like(zeros)]
        weight.grad, zeros.grad = (grad.clone() for grad in grads)
        optimizer.step()
        for value, moment, grad in zip(values, moments, grads, strict=True):
            moment[0] = 0.8 * moment[0] + 0.2 * grad
            moment[1] = 0.99 * moment[1] + 0.01 * grad**2
            scaled = (moment[1] / (1 - 0.99**step)).sqrt() + 1e-6
            update = moment[0] / (1 - 0.8**step) / scaled + 0.1 * value
            ratio = value.norm() / update.norm() if value.norm() > 0 else 1.0
            value -= 0.01 * ratio * update
        if step in (1, 200):
            for param, value in zip((weight, zeros), values, strict=True):
                assert torch.allclose(param.detach().double(), value, atol=1e-5)


def test_lamb_that_maximizes_goes_the_other_way() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    for weight, grad, maximize in zip(weights, (1.0, -1.0), (False, True), strict=True):
        weight.grad = torch.full((2,), grad)
        large_batch.lamb(Adam([weight], lr=0.01, maximize=maximize), LambConfigs(), {}).step()
    assert torch.equal(*weights)
    assert bool((weights[0] < 1).all())


def test_an_optimizer_that_has_made_steps_is_not_replaced() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Adam([weight])
    weight.sum().backward()
    optimizer.step()
    with pytest.raises(FleetError, match="has made steps; give it a new one"):
        large_batch.lamb(optimizer, LambConfigs(), {})
