import pytest
import torch

from trainers.errors import NotSupportedError
from trainers.ps.tables.rules import SGD, Adagrad, Adam, AnyRule, RMSprop, SparseAdam
from trainers.ps.trainer.layout import check_supported, rule_for


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2, 2))


class MySgd(torch.optim.SGD):
    pass


@pytest.mark.parametrize("kind", [torch.optim.Adamax, torch.optim.NAdam, MySgd])
def test_an_optimizer_without_a_rule_is_named(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([parameter()], lr=0.1)  # type: ignore[call-arg]
    with pytest.raises(NotSupportedError, match=kind.__name__):
        check_supported(optimizer)
    with pytest.raises(NotSupportedError, match="SGD, Adagrad, Adam, AdamW, RMSprop, SparseAdam"):
        rule_for(optimizer, optimizer.param_groups[0], sparse=False, name="w")


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.SparseAdam([parameter()]), "dense"),
        (torch.optim.SGD([parameter()], lr=0.1, differentiable=True), "differentiable"),
    ],
)
def test_an_option_that_servers_cannot_follow_is_named(optimizer: torch.optim.Optimizer, words: str) -> None:
    with pytest.raises(NotSupportedError, match=words):
        rule_for(optimizer, optimizer.param_groups[0], sparse=False, name="w")


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        (torch.optim.Adam([parameter()], maximize=True), SparseAdam()),
        (torch.optim.Adam([parameter()], weight_decay=0.1), Adam(weight_decay=0.1)),
        (torch.optim.Adam([parameter()], amsgrad=True), Adam(amsgrad=1.0)),
        (torch.optim.AdamW([parameter()], weight_decay=0.0), Adam(decoupled=1.0)),
        (torch.optim.RMSprop([parameter()], centered=True), RMSprop(centered=1.0)),
        (torch.optim.SGD([parameter()], lr=0.1, momentum=0.9), SGD(momentum=0.9)),
        (torch.optim.Adagrad([parameter()], weight_decay=0.1), Adagrad(weight_decay=0.1)),
    ],
)
def test_the_rule_on_rows(optimizer: torch.optim.Optimizer, rule: AnyRule) -> None:
    assert rule_for(optimizer, optimizer.param_groups[0], sparse=True, name="w") == rule
