"""What the fields of a strategy do to a training: two processes once, and plain torch to compare with."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.support.forking import Forker
from tests.support.strategies import (
    EQUAL,
    STEPS,
    WORLD,
    Case,
    Net,
    Values,
    batch,
    furthest,
    loss_of,
    momentum,
    train_alone,
)

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]
"""By rank, what the script's cases found."""


@pytest.fixture(scope="module")
def found(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("strategies")
    with forker.job(folder, trainers=WORLD, servers=0) as running:
        running.start_all(["-m", "tests.support.scripts.strategy_cases", str(folder)])
        running.expect_success()
        assert [process.output for process in running.processes] == ["", ""]  # no warning either
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", EQUAL)
def test_two_processes_do_what_one_does_with_all_batches(found: Found, name: str) -> None:
    case = EQUAL[name]
    ends = [each["equal"][name] for each in found]
    away = furthest(ends[0], train_alone(case))
    assert furthest(*ends) == 0
    assert away < case.near
    if case.near > 1e-6:  # half precision that cannot be told from full precision is none
        assert away > 1e-6


def test_merged_gradients_survive_the_ways_in_which_scripts_clear_them(found: Found) -> None:
    wanted = train_alone(Case())
    assert len(found[0]["habits"]) == 6
    for name, end in found[0]["habits"].items():
        assert furthest(end, wanted) < 1e-6, name


def test_a_script_that_scales_its_losses_itself(found: Found) -> None:
    away = furthest(found[0]["own_scaler"], train_alone(Case()))
    assert 1e-6 < away < 3e-3


def test_gradients_are_exchanged_at_updates_only(found: Found) -> None:
    gradients = [each["exchanged"]["merge"] for each in found]
    assert [one == other for one, other in zip(*gradients, strict=True)] == [False, False, True] * 4


def test_localsgd_averages_models_now_and_then(found: Found) -> None:
    """Two updates together (`begin_step` 3), then two alone at a time (`k_steps` 2)."""
    weights = [each["exchanged"]["local"] for each in found]
    assert [one == other for one, other in zip(*weights, strict=True)] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]
    buffers = [each["exchanged"]["buffer"] for each in found]
    assert [one == other for one, other in zip(*buffers, strict=True)][2:] == [False, True, False, True]


def localsgd_alone(updates: int) -> list[Values]:
    """Both ranks' training by hand; the last update is of the first batch."""
    models, optimizers = [], []
    for _ in range(WORLD):
        torch.manual_seed(0)
        models.append(Net())
        optimizers.append(momentum(models[-1].parameters()))
    for update in range(updates):
        for rank, model in enumerate(models):
            loss_of(model, *batch(update % STEPS, rank)).backward()
        if update < 2:
            average([param.grad for param in model.parameters()] for model in models)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if update >= 3 and update % 2:
            average([param.data for param in model.parameters()] for model in models)
    return [model.state_dict() for model in models]


def average(models: Any) -> None:
    for tensors in zip(*models, strict=True):
        mean = sum(tensors) / WORLD
        for tensor in tensors:
            tensor.copy_(mean)


def test_localsgd_and_a_checkpoint_in_the_middle(found: Found) -> None:
    wanted = localsgd_alone(STEPS)
    apart = localsgd_alone(STEPS + 1)
    for rank, each in enumerate(found):
        assert furthest(each["local"]["end"], wanted[rank]) < 1e-6
        assert furthest(each["local"]["apart"], apart[rank]) < 1e-6
    assert furthest(*(each["local"]["apart"] for each in found)) > 0
    for each in found:  # a checkpoint has the average, and the training does not notice it
        assert furthest(each["local"]["kept"], each["local"]["apart"]) == 0
        assert furthest(each["local"]["on"], each["local"]["quiet"]) == 0
    average(list(each["local"]["apart"].values()) for each in found)
    for each in found:
        assert furthest(each["local"]["loaded"], each["local"]["apart"]) < 1e-6
    # It goes on in the middle of localsgd, not with its first two updates together.
    assert furthest(*(each["local"]["after"] for each in found)) > 0
    for place in range(2):
        both = [each["local"]["others"][place] for each in found]
        average(list(here.values()) for _, here in both)
        for saved, here in both:
            assert furthest(saved, here) < 1e-6


def test_what_strategies_count_goes_on_from_a_checkpoint(found: Found) -> None:
    for each in found:
        for name, (end, after) in each["resumed"].items():
            assert furthest(end, after) == 0, name


def test_no_rank_updates_when_one_has_gradients_that_are_not_finite(found: Found) -> None:
    for each in found:
        # Two steps to an update; the first update is skipped, with both of its steps.
        assert each["overflow"]["merged"] == [False, False, False, True, False, True]
        assert each["overflow"]["after"] == 4.0  # the scale goes into a checkpoint
        assert each["overflow"]["alone"] == [(True, 8.0), (False, 4.0), (False, 2.0), (True, 2.0)]
        # decr_every_n_nan_or_inf is 2: the second in a row lowers the scale.
        assert each["overflow"]["minimize"] == [
            (True, 8.0), (False, 8.0), (False, 4.0), (True, 4.0), (False, 4.0), (True, 4.0)
        ]  # fmt: skip


def test_the_model_computes_in_half_precision_and_gives_full(found: Found) -> None:
    assert found[0]["half"] == {
        "seen": ["torch.bfloat16"] * 2,
        "outputs": ["torch.float32"] * 2,
        "left": False,
    }


def lars(model: Net, grads: list[torch.Tensor], momenta: list[torch.Tensor], decay: dict[str, float]) -> None:
    """You et al. 2017, with the rate 0.1 and the momentum of `momentum`."""
    for (name, weight), grad, moment in zip(model.named_parameters(), grads, momenta, strict=True):
        if weight.dim() > 1:
            away = decay[name] * weight
            grad = (grad + away) * (0.001 * weight.norm() / (grad.norm() + away.norm()))
        moment.mul_(0.9).add_(grad)
        weight.sub_(0.1 * moment)


def lamb(
    model: Net, grads: list[torch.Tensor], moments: list[torch.Tensor], decay: dict[str, float], step: int
) -> None:
    """You et al. 2019, Algorithm 2, with the rate 0.01."""
    halves = (moments[: len(grads)], moments[len(grads) :])
    for (name, weight), grad, first, second in zip(model.named_parameters(), grads, *halves, strict=True):
        first.mul_(0.9).add_(0.1 * grad)
        second.mul_(0.999).add_(0.001 * grad**2)
        corrected = first / (1 - 0.9**step), second / (1 - 0.999**step)
        update = corrected[0] / (corrected[1].sqrt() + 1e-8) + decay[name] * weight
        weight.sub_(0.01 * weight.norm() / update.norm() * update)


@pytest.mark.parametrize(
    ("case", "update", "decays", "excluded"),
    [
        ("lars", lars, 0.0005, "last"),
        ("lars stage 1", lars, 0.0005, "none"),
        ("lamb", lamb, 0.01, "last"),
    ],
)
def test_large_batches(found: Found, case: str, update: Any, decays: float, excluded: str) -> None:
    torch.manual_seed(0)
    model = Net()
    decay = {name: 0.0 if excluded in name else decays for name, _ in model.named_parameters()}
    moments = [torch.zeros_like(param) for _ in range(2) for param in model.parameters()]
    for step in range(STEPS):
        grads = torch.autograd.grad(loss_of(model, *batch(step)), list(model.parameters()))
        with torch.no_grad():
            if update is lamb:
                lamb(model, list(grads), moments, decay, step + 1)
            else:
                update(model, list(grads), moments[: len(grads)], decay)
    assert furthest(found[0]["large_batch"][case], model.state_dict()) < 1e-6


ERRORS = {
    "late": "a strategy whose amp differs .* Pass the strategy to fleet.init",
    "wrapped": "given a model that is already wrapped for data parallel training",
    "minimize": r"fleet\.minimize\(\) was called before fleet\.distributed_optimizer",
    "no optimizer": "count the steps of the optimizer that fleet.distributed_optimizer",
    "twice": r"distributed_model\(\) was called twice, but strategy.gradient_merge",
    "no parameters": r"was given a Softmax without parameters",
    "inner step": r"SGD\.step\(\) was called on the optimizer that was passed to",
    "cleared": "merged over 1 steps are missing",
    "closure": r"NotSupported: step\(closure\)",
    "unscaled step": r'dtype is "float16", .* step\(\) was called without scaling',
    "unscaled minimize": r'dtype is "float16", .* loss\.backward\(\) was called without scaling',
    "not installed": r"strategy\.lars needs pytorch_optimizer, .* Install fleetrun\[optimizers\]",
    "customized": r'is "customized", but minimize\(loss\) was called without gradients',
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_would_train_something_else_says_so(found: Found, name: str) -> None:
    assert found[0]["errors"].keys() == ERRORS.keys()
    assert re.search(ERRORS[name], found[0]["errors"][name])
