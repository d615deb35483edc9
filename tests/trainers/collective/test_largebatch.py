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


def test_an_optimizer_that_has_made_steps_is_not_replaced() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Adam([weight])
    weight.sum().backward()
    optimizer.step()
    with pytest.raises(FleetError, match="has made steps; give it a new one"):
        large_batch.lamb(optimizer, LambConfigs(), {})
