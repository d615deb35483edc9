"""Sharding: its settings, and the units of a model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainers.collective.configs import CompileConfigs, RecomputeConfigs, ShardingConfigs, checker
from trainers.collective.modules import check_compiler, matching_modules, outermost_modules
from trainers.collective.sharding import check_divisible, check_unit, shard, units
from trainers.errors import FleetError, NotSupportedError, UsageError

# ---- Which modules FSDP2 fetches as one.


class Tied(nn.Module):
    """Words in and words out by the same matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 8)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(8, 40), nn.Linear(40, 8)) for _ in range(2))
        self.out = nn.Linear(8, 100, bias=False)
        self.out.weight = self.words.weight


def linear(inputs: int, outputs: int) -> int:
    """Bytes"""
    return 4 * (inputs + 1) * outputs


@pytest.mark.parametrize(
    ("least", "names"),
    [
        (linear(40, 8) + 1, ["body.0.0", "body.1.0"]),  # the smaller halves are the model's own
        (linear(8, 40) + 1, ["body.0", "body.1"]),
        (linear(40, 8), ["body.0.0", "body.0.1", "body.1.0", "body.1.1"]),
        (linear(8, 40) + linear(40, 8) + 1, []),  # a list is never called; tied words belong to both
    ],
)
def test_a_unit_has_a_size_of_its_own(least: int, names: list[str]) -> None:
    assert units(Tied(), least) == names


def test_layers_that_use_what_is_inside_stay_whole() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    assert units(nn.Sequential(layer, nn.MultiheadAttention(8, 2)), 4) == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("body", "is a ModuleList and never called. Name its members, as `body.*`"),
        ("words", "shares parameters with other modules"),
        ("norm", "has no parameters"),
    ],
)
def test_a_module_that_cannot_be_a_unit_is_refused(name: str, why: str) -> None:
    model = Tied()
    model.norm = nn.LayerNorm(8, elementwise_affine=False)
    with pytest.raises(UsageError, match=f"segment_anchors names '{name}', which {why}".replace("*", r"\*")):
        check_unit(model, name)
    check_unit(model, "body.0")


# ---- What is refused when it is written.

Check = Callable[[str, Any], Mapping[str, Any]]

sharding_configs, recompute_configs, compile_configs = map(
    checker, (ShardingConfigs, RecomputeConfigs, CompileConfigs)
)


@pytest.mark.parametrize(
    ("check", "value", "error", "says"),
    [
        (sharding_configs, {"stage": 4}, UsageError, "stage is 4; it must be 1, 2 or 3"),
        (sharding_configs, {"stage": True}, UsageError, "stage is True"),
        (sharding_configs, {"stages": 3}, UsageError, "did you mean 'stage'"),
        (sharding_configs, {"segment_broadcast_MB": 0}, UsageError, "must be a number above 0"),
        (sharding_configs, {"segment_anchors": ["a"]}, UsageError, "segment_anchors need stage 2 or 3"),
        (
            sharding_configs,
            {"stage": 3, "segment_anchors": "a"},
            UsageError,
            "'a'; it must be a list of names",
        ),
        (sharding_configs, {"sharding_degree": 8}, NotSupportedError, "NotSupported: .*all processes"),
        (sharding_configs, {"optimize_offload": True}, NotSupportedError, "stays on the device"),
        (recompute_configs, {"checkpoints": [1]}, UsageError, "contains 1;"),
        (recompute_configs, {"enable_offload": True}, NotSupportedError, "activations stay"),
        (recompute_configs, ["a"], UsageError, "must be a dict"),
        (compile_configs, {"backend": None}, UsageError, "backend is None"),
        (compile_configs, {"dynamic": 1}, UsageError, "dynamic is 1; it must be True or False"),
        (compile_configs, {"modes": "x"}, UsageError, "did you mean 'mode'"),
    ],
)
def test_a_setting_that_cannot_be_is_named(
    check: Check, value: Any, error: type[FleetError], says: str
) -> None:
    with pytest.raises(error, match=says):
        check("some_configs", value)


def test_settings_that_can_be() -> None:
    sharding_configs("sharding_configs", {"stage": 3, "segment_anchors": ["a"], "segment_broadcast_MB": 1})
    compile_configs("compile_configs", {"backend": "eager", "mode": None, "dynamic": False})
    assert recompute_configs("recompute_configs", {"checkpoints": ("a",)}) == {"checkpoints": ("a",)}


def test_a_star_is_one_step_of_a_name() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU())), "b0": nn.ReLU()})
    assert matching_modules(model, ["a.*"], "x") == ["a.0", "a.1"]
    assert matching_modules(model, ["b?", "a.1.*"], "x") == ["a.1.0", "b0"]
    assert outermost_modules(["a.1.0", "a.0", "a.1"]) == ["a.0", "a.1"]


def test_an_optimizer_that_looks_at_all_gradients_is_not_divided() -> None:
    params = [nn.Parameter(torch.zeros(2))]
    check_divisible(torch.optim.Adam(params))
    with pytest.raises(NotSupportedError, match=r"LBFGS needs all of them\. Use another optimizer"):
        check_divisible(torch.optim.LBFGS(params))
    clipping = torch.optim.Adam(params)
    clipping.defaults["max_grad_norm"] = 1.0
    with pytest.raises(
        NotSupportedError, match=r"max_grad_norm of Adam .*Use torch.nn.utils.clip_grad_norm_"
    ):
        check_divisible(clipping)


def test_a_compiler_that_is_not_here_is_named_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check_compiler("aot_eager", "strategy.compile")
    with pytest.raises(NotSupportedError, match=r"NotSupported: strategy.compile needs a C\+\+ compiler"):
        check_compiler("inductor", "strategy.compile")


class Scaled(torch.nn.Module):
    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.scale = torch.nn.Parameter(scale)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("scale", [torch.ones(()), torch.ones(2, 3).t()])
def test_a_parameter_that_cannot_be_divided_is_named(stage: int, scale: torch.Tensor) -> None:
    with pytest.raises(
        NotSupportedError, match=rf"NotSupported: sharding stage {stage} cannot divide parameter 'scale'"
    ):
        shard(Scaled(scale), ShardingConfigs(stage=stage))
