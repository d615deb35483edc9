import pytest
import torch

from trainers.errors import NotSupportedError
from trainers.ps.trainer.layout import check_supported, rule_for


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2, 2))


class MySgd(torch.optim.SGD):
    pass


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, MySgd])
def test_an_optimizer_without_a_rule_is_named(kind: type[torch.optim.Optimizer]) -> None:
    optimizer = kind([parameter()], lr=0.1)  # type: ignore[call-arg]
    with pytest.raises(NotSupportedError, match=kind.__name__):
        check_supported(optimizer)
    with pytest.raises(NotSupportedError, match="SGD, Adagrad, Adam or SparseAdam"):
        rule_for(optimizer, optimizer.param_groups[0], sparse=False, name="w")


@pytest.mark.parametrize(
    ("optimizer", "sparse", "words"),
    [
        (
            torch.optim.SGD([parameter()], lr=0.1, momentum=0.9),
            True,
            "momentum=0.9 on the sparse embedding 'w'",
        ),
        (torch.optim.SGD([parameter()], lr=0.1, weight_decay=0.1), True, "weight_decay"),
        (torch.optim.Adagrad([parameter()], weight_decay=0.1), True, "weight_decay"),
        (torch.optim.Adam([parameter()], weight_decay=0.1), True, "weight_decay"),
        (torch.optim.SparseAdam([parameter()]), False, "dense"),
        (torch.optim.Adam([parameter()], amsgrad=True), False, "amsgrad"),
        (torch.optim.SGD([parameter()], lr=0.1, maximize=True), False, "maximize"),
    ],
)
def test_an_option_that_servers_cannot_follow_is_named(
    optimizer: torch.optim.Optimizer, sparse: bool, words: str
) -> None:
    with pytest.raises(NotSupportedError, match=words):
        rule_for(optimizer, optimizer.param_groups[0], sparse=sparse, name="w")
