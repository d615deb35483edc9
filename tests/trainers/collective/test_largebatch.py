"""What LARS and LAMB cannot replace."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_optimizer
import torch

from trainers.checkpoints import checkpoint
from trainers.checkpoints.manifest import CheckpointError
from trainers.collective import large_batch
from trainers.collective.configs import LambConfigs, LarsConfigs
from trainers.errors import FleetError

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Adam, {}, "replaces torch.optim.SGD with momentum, but was given Adam."),
        (SGD, {}, "was given SGD without momentum"),
        (SGD, {"momentum": 0.9, "weight_decay": 0.1}, "0.0005 in .*_configs, and 0.1 in the optimizer"),
        (SGD, {"momentum": 0.9}, "creates new parameter groups, but a scheduler already uses the old ones"),
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
        (SGD, {"momentum": 0.9}, "replaces torch.optim.Adam or AdamW, but was given SGD."),
        (Adam, {"amsgrad": True}, "NotSupported: strategy.lamb with amsgrad=True"),
        (AdamW, {"weight_decay": 0.1}, "0.01 in .*_configs, and 0.1 in the optimizer"),
        (AdamW, {}, r"of shape \(2, 2\) has none. Create the optimizer from model.named_parameters"),
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
    with pytest.raises(FleetError, match=r"has made steps\. Pass a new optimizer"):
        large_batch.lamb(optimizer, LambConfigs(), {})


def former_lamb(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """As fleet made it until it had bias correction of both moments: it counts steps in the group."""
    groups: Any = Adam(params, lr=0.0).param_groups
    for key in ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"):
        groups[0].pop(key)
    groups[0]["weight_decay"] = 0.1
    return pytorch_optimizer.Lamb(groups, weight_decouple=False, adam_debias=True)


def test_lamb_goes_on_from_a_checkpoint_of_the_former_lamb(tmp_path: Path) -> None:
    """With a rate of 0 both have the same moments after the same gradients."""
    models = [torch.nn.Linear(3, 2) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    former, own, loaded = (list(model.parameters()) for model in models)
    configs = LambConfigs(lamb_weight_decay=0.1)
    before, lamb = former_lamb(former), large_batch.lamb(Adam(own, lr=0.0), configs, {})
    generator = torch.Generator().manual_seed(1)
    for optimizer, params in ((before, former), (lamb, own)):
        generator.manual_seed(1)
        for _ in range(5):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
    checkpoint.save(tmp_path, 5, models[0], before)
    after = large_batch.lamb(Adam(loaded), configs, {})
    assert checkpoint.load(tmp_path, models[2], after) == 5
    for optimizer, params in ((lamb, own), (after, loaded)):
        optimizer.param_groups[0]["lr"] = 0.1
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    for one, other, first in zip(own, loaded, former, strict=True):
        assert torch.allclose(one, other, rtol=1e-5)
        assert not torch.allclose(one, first, rtol=1e-3)


def test_a_state_of_another_kind_of_optimizer_is_refused_and_does_not_stay(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    model(torch.ones(3)).sum().backward()
    momentum = SGD(model.parameters(), momentum=0.9)
    momentum.step()
    checkpoint.save(tmp_path, 1, model, momentum)
    lamb = large_batch.lamb(Adam(model.parameters()), LambConfigs(), {})
    with pytest.raises(CheckpointError, match=r"another kind of optimizer: its state has no 'step'\. Create"):
        checkpoint.load(tmp_path, model, lamb)
    lamb.step()
