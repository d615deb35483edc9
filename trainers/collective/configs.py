"""Settings of collective strategies, checked when they are made. Knows names, types and ranges, as Paddle
has them; leaves what they do to `stepping`, `scaling`, `pacing`, `reducing` and `largebatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from trainers.errors import NotSupportedError, UsageError
from trainers.ps.configs import flag, keys, positive, whole

AMP_DTYPES = ("bfloat16", "float16")
SCALES = ("avg", "sum", "customized")


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpConfigs:
    """The keys of `strategy.amp_configs`. `dtype`: what the model computes in, "bfloat16" or "float16".

    The rest is for float16, whose small gradients would be 0: the loss is multiplied by a scale, at first
    `init_loss_scaling`, and gradients are divided by it. With `use_dynamic_loss_scaling` it is multiplied by
    `decr_ratio` after `decr_every_n_nan_or_inf` steps in a row with gradients that are not finite (such steps
    update nothing), and by `incr_ratio` after `incr_every_n_steps` good ones.
    """

    dtype: str = "bfloat16"
    init_loss_scaling: float = 32768.0
    use_dynamic_loss_scaling: bool = True
    incr_every_n_steps: int = 1000
    decr_every_n_nan_or_inf: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.dtype not in AMP_DTYPES:
            raise UsageError(
                f"amp_configs dtype is {self.dtype!r}; it must be one of {', '.join(AMP_DTYPES)}"
            )
        positive("amp_configs init_loss_scaling", self.init_loss_scaling)
        flag("amp_configs use_dynamic_loss_scaling", self.use_dynamic_loss_scaling)
        for name in ("incr_every_n_steps", "decr_every_n_nan_or_inf"):
            whole(f"amp_configs {name}", getattr(self, name), 1)
        if positive("amp_configs incr_ratio", self.incr_ratio) <= 1:
            raise UsageError(f"amp_configs incr_ratio is {self.incr_ratio!r}; it must be above 1")
        if positive("amp_configs decr_ratio", self.decr_ratio) >= 1:
            raise UsageError(f"amp_configs decr_ratio is {self.decr_ratio!r}; it must be between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMergeConfigs:
    """The keys of `strategy.gradient_merge_configs`: one update every `k_steps` steps, with the sum of their
    gradients, or with its average (`avg`).
    """

    k_steps: int = 1
    avg: bool = True

    def __post_init__(self) -> None:
        whole("gradient_merge_configs k_steps", self.k_steps, 1)
        flag("gradient_merge_configs avg", self.avg)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGDConfigs:
    """The keys of `strategy.localsgd_configs`: from the `begin_step`-th update on (the first one is 1) each
    process updates its model on its own, and every `k_steps` updates models are averaged.
    """

    k_steps: int = 1
    begin_step: int = 1

    def __post_init__(self) -> None:
        whole("localsgd_configs k_steps", self.k_steps, 1)
        whole("localsgd_configs begin_step", self.begin_step, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientScaleConfigs:
    """The keys of `strategy.gradient_scale_configs`. `scale_strategy`: an update has the average of the
    processes' gradients ("avg"), their sum ("sum"), or their sum and the script has scaled its loss itself
    ("customized"): then `minimize(loss)` calls no backward.
    """

    scale_strategy: str = "avg"

    def __post_init__(self) -> None:
        if self.scale_strategy not in SCALES:
            raise UsageError(
                f"gradient_scale_configs scale_strategy is {self.scale_strategy!r}; it must be one of "
                f"{', '.join(SCALES)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LarsConfigs:
    """The keys of `strategy.lars_configs`; You et al. 2017, https://arxiv.org/abs/1708.03888.

    The rate of each weight of two or more dimensions is multiplied by `lars_coeff * |w| / (|gradient| +
    lars_weight_decay * |w|)`. Biases and scales, which have one dimension, are updated by plain momentum.
    `exclude_from_weight_decay`: parts of names of weights that are not decayed.
    """

    lars_coeff: float = 0.001
    lars_weight_decay: float = 0.0005
    exclude_from_weight_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        positive("lars_configs lars_coeff", self.lars_coeff)
        _share("lars_configs lars_weight_decay", self.lars_weight_decay)
        _set_names(self, "lars_configs")


@dataclass(frozen=True, slots=True, kw_only=True)
class LambConfigs:
    """The keys of `strategy.lamb_configs`; You et al. 2019, https://arxiv.org/abs/1904.00962.

    `lamb_weight_decay`: the share of a weight that is added to its update before both are normed.
    `exclude_from_weight_decay`: parts of names of weights that are not decayed.
    """

    lamb_weight_decay: float = 0.01
    exclude_from_weight_decay: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _share("lamb_configs lamb_weight_decay", self.lamb_weight_decay)
        _set_names(self, "lamb_configs")


_TORCHS_LISTS = "torch has its own lists of operations; use torch.autocast(..., enabled=False) in the model"
_PURE = "weights stay in float32; for a model that is in half precision as a whole call model.to(dtype)"
_PADDLES: Mapping[str, Mapping[str, str]] = {
    "amp_configs": {
        "custom_white_list": _TORCHS_LISTS,
        "custom_black_list": _TORCHS_LISTS,
        "custom_black_varnames": _TORCHS_LISTS,
        "use_pure_fp16": _PURE,
        "use_pure_bf16": _PURE,
        "use_fp16_guard": "use torch.autocast(..., enabled=False) in the model",
        "use_optimizer_fp16": "optimizer state is in the type of its parameters",
    },
    "gradient_scale_configs": {"scale_gradient": "gradients are scaled as they are added up"},
    "lars_configs": {"epsilon": "a division by zero is avoided without"},
}

AnyConfigs: TypeAlias = (
    type[AmpConfigs]
    | type[GradientMergeConfigs]
    | type[LocalSGDConfigs]
    | type[GradientScaleConfigs]
    | type[LarsConfigs]
    | type[LambConfigs]
)


def checker(make: AnyConfigs) -> Callable[[str, Any], Mapping[str, Any]]:
    """The check of the strategy's field with these keys: the mapping, read-only. It raises UsageError or
    NotSupportedError.
    """

    def check(name: str, value: Any) -> Mapping[str, Any]:
        refused = _PADDLES.get(name, {})
        if isinstance(value, Mapping):
            for key in value.keys() & refused.keys():
                raise NotSupportedError(
                    f"NotSupported: strategy.{name} {key} has no meaning here: {refused[key]}; leave it out"
                )
        configs = keys(name, value, [field.name for field in fields(make)])
        make(**configs)
        return configs

    return check


def amp_configs(name: str, value: Any) -> Mapping[str, Any]:
    """As the others; and keys that only float16 heeds are refused without it."""
    configs = checker(AmpConfigs)(name, value)
    scaling = configs.keys() - {"dtype"}
    if scaling and configs.get("dtype") != "float16":
        raise UsageError(
            f"strategy.{name} {min(scaling)} is about loss scaling, which bfloat16 needs none of; add "
            '"dtype": "float16", or leave it out'
        )
    return configs


def _share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UsageError(f"{name} is {value!r}; it must be a number from 0 to 1")


def _set_names(configs: LarsConfigs | LambConfigs, where: str) -> None:
    value = configs.exclude_from_weight_decay
    if isinstance(value, str) or not isinstance(value, (list, tuple)) or not all(map(_is_name, value)):
        raise UsageError(
            f"{where} exclude_from_weight_decay is {value!r}; it must be a list of parts of names"
        )
    object.__setattr__(configs, "exclude_from_weight_decay", tuple(value))


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
