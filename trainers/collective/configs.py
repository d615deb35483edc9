"""Define and check the settings of collective strategies, with Paddle's names, types and ranges.

Each `..._configs` field of the strategy has one class. `CollectiveSettings` holds all of them in one frozen
value and rejects settings that exclude each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from fleetrun.aliases import Fields, Strings
from fleetrun.frozen import frozen
from trainers.checks import accepted, flag, is_number, one_of, positive, whole
from trainers.errors import NotSupportedError, UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# ---- Settings of the optimizer and of steps

AMP_DTYPES = ("bfloat16", "float16")
SCALES = ("avg", "sum", "customized")


@frozen(kw_only=True)
class AmpConfigs:
    """The keys of `strategy.amp_configs`. `dtype` is the model's computing type, "bfloat16" or "float16".

    The other keys are for float16, whose small gradients would become 0. The loss is multiplied by a scale,
    at first `init_loss_scaling`, and gradients are divided by it. With `use_dynamic_loss_scaling`, the scale
    is multiplied by `decr_ratio` after `decr_every_n_nan_or_inf` consecutive steps with gradients that are
    not finite (these steps update nothing). It is multiplied by `incr_ratio` after `incr_every_n_steps` good
    steps.
    """

    dtype: str = "bfloat16"
    init_loss_scaling: float = 32768.0
    use_dynamic_loss_scaling: bool = True
    incr_every_n_steps: int = 1000
    decr_every_n_nan_or_inf: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5

    def __post_init__(self) -> None:
        one_of("amp_configs dtype", self.dtype, AMP_DTYPES)
        for each in fields(self)[1:]:
            if self.dtype != "float16" and getattr(self, each.name) != each.default:
                raise UsageError(
                    f"amp_configs {each.name} sets loss scaling, which bfloat16 does not need. Remove it, "
                    'or add "dtype": "float16".'
                )
        positive("amp_configs init_loss_scaling", self.init_loss_scaling)
        flag("amp_configs use_dynamic_loss_scaling", self.use_dynamic_loss_scaling)
        for name in ("incr_every_n_steps", "decr_every_n_nan_or_inf"):
            whole(f"amp_configs {name}", getattr(self, name), 1)
        if positive("amp_configs incr_ratio", self.incr_ratio) <= 1:
            raise UsageError(f"amp_configs incr_ratio is {self.incr_ratio!r}; it must be above 1")
        if positive("amp_configs decr_ratio", self.decr_ratio) >= 1:
            raise UsageError(f"amp_configs decr_ratio is {self.decr_ratio!r}; it must be between 0 and 1")


@frozen(kw_only=True)
class GradientMergeConfigs:
    """The keys of `strategy.gradient_merge_configs`.

    The optimizer updates once every `k_steps` steps, with the sum of their gradients, or their average
    (`avg`).
    """

    k_steps: int = 1
    avg: bool = True

    def __post_init__(self) -> None:
        whole("gradient_merge_configs k_steps", self.k_steps, 1)
        flag("gradient_merge_configs avg", self.avg)


@frozen(kw_only=True)
class LocalSGDConfigs:
    """The keys of `strategy.localsgd_configs`.

    From update number `begin_step` on (the first is 1), each process updates its model separately. Every
    `k_steps` updates, the models are averaged.
    """

    k_steps: int = 1
    begin_step: int = 1

    def __post_init__(self) -> None:
        whole("localsgd_configs k_steps", self.k_steps, 1)
        whole("localsgd_configs begin_step", self.begin_step, 1)


@frozen(kw_only=True)
class GradientScaleConfigs:
    """The keys of `strategy.gradient_scale_configs`.

    `scale_strategy` is "avg" for the average of the processes' gradients, or "sum" for their sum. It is
    "customized" for the sum if the script scales its loss itself. `minimize(loss)` then does not call
    backward.
    """

    scale_strategy: str = "avg"

    def __post_init__(self) -> None:
        one_of("gradient_scale_configs scale_strategy", self.scale_strategy, SCALES)


@frozen(kw_only=True)
class LarsConfigs:
    """The keys of `strategy.lars_configs`. The source is You et al. 2017, https://arxiv.org/abs/1708.03888.

    The rate of each weight with two or more dimensions is multiplied by `lars_coeff * |w| / (|gradient| +
    lars_weight_decay * |w|)`. Biases and scales, which have one dimension, use plain momentum.
    `exclude_from_weight_decay` has parts of the names of weights without decay.
    """

    lars_coeff: float = 0.001
    lars_weight_decay: float = 0.0005
    exclude_from_weight_decay: Strings = ()

    def __post_init__(self) -> None:
        positive("lars_configs lars_coeff", self.lars_coeff)
        _share("lars_configs lars_weight_decay", self.lars_weight_decay)
        _set_names(self, "exclude_from_weight_decay", "lars_configs", "parts of names")


@frozen(kw_only=True)
class LambConfigs:
    """The keys of `strategy.lamb_configs`. The source is You et al. 2019, https://arxiv.org/abs/1904.00962.

    `lamb_weight_decay` is the share of a weight that is added to its update before both norms are taken.
    `exclude_from_weight_decay` has parts of the names of weights without decay.
    """

    lamb_weight_decay: float = 0.01
    exclude_from_weight_decay: Strings = ()

    def __post_init__(self) -> None:
        _share("lamb_configs lamb_weight_decay", self.lamb_weight_decay)
        _set_names(self, "exclude_from_weight_decay", "lamb_configs", "parts of names")


_TORCHS_LISTS = "torch has its own lists of operations; use torch.autocast(..., enabled=False) in the model"
_PURE = "weights stay in float32; for a model that is in half precision as a whole call model.to(dtype)"
_ALL_SHARE = "all processes of the job share the parameters"
_STATE_STAYS = "optimizer state stays on the device of its parameters"
_ACTIVATIONS_STAY = "activations stay on their device"
_PADDLES = {
    "custom_white_list": _TORCHS_LISTS,
    "custom_black_list": _TORCHS_LISTS,
    "custom_black_varnames": _TORCHS_LISTS,
    "use_pure_fp16": _PURE,
    "use_pure_bf16": _PURE,
    "use_fp16_guard": "use torch.autocast(..., enabled=False) in the model",
    "use_optimizer_fp16": "optimizer state has the type of its parameters",
    "scale_gradient": "gradients are scaled while they are added",
    "epsilon": "no setting is needed to avoid a division by zero",
    "sharding_segment_strategy": "segment_anchors decides if you set it, else segment_broadcast_MB",
    "sharding_degree": _ALL_SHARE,
    "dp_degree": _ALL_SHARE,
    "mp_degree": "use torch.distributed.tensor.parallel",
    "pp_degree": "use torch.distributed.pipelining",
    "hybrid_dp": _ALL_SHARE,
    "gradient_merge_acc_step": "use strategy.gradient_merge",
    "optimize_offload": _STATE_STAYS,
    "offload": _STATE_STAYS,
    "enable_offload": _ACTIVATIONS_STAY,
    "checkpoint_shape": _ACTIVATIONS_STAY,
}
"""Keys of Paddle without effect here, and the alternative to each."""


def checker(make: type[DataclassInstance]) -> Callable[[str, object], Fields]:
    """Return the check of the strategy's field with these keys. It returns the mapping, read-only.

    The check raises UsageError or NotSupportedError.
    """

    def check(name: str, value: object) -> Fields:
        if isinstance(value, Mapping):
            for key in value.keys() & _PADDLES.keys():
                raise NotSupportedError(
                    f"NotSupported: strategy.{name} {key} has no effect here: {_PADDLES[key]}. Remove it."
                )
        return accepted(name, value, make)

    return check


def _share(name: str, value: object) -> None:
    if not is_number(value) or not 0 <= value < 1:
        raise UsageError(f"{name} is {value!r}; it must be a number from 0 to 1")


def _set_names(configs: object, key: str, where: str, what: str) -> None:
    """Replace the value of a key, which must be a list of names, by a tuple."""
    value = getattr(configs, key)
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise UsageError(f"{where} {key} is {value!r}; it must be a list of {what}")
    for name in value:
        if not isinstance(name, str) or not name:
            raise UsageError(f"{where} {key} contains {name!r}; it must be a list of {what}")
    object.__setattr__(configs, key, tuple(value))


# ---- Settings of `sharding`, `recompute` and `compile`

STAGES = (1, 2, 3)


@frozen(kw_only=True)
class ShardingConfigs:
    """The keys of `strategy.sharding_configs`, as Paddle names them.

    `stage` sets what is divided among the processes. 1 divides the optimizer's state, 2 also gradients, and 3
    also parameters. Stages 2 and 3 fetch and free parameters by units of the model. The units are blocks of
    at least `segment_broadcast_MB`, or the modules in `segment_anchors` (`"layer1"`, `"blocks.*"`, where a
    star is one step of a name).
    """

    stage: int = 1
    segment_broadcast_MB: float = 32.0
    segment_anchors: Strings = ()

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in STAGES:
            raise UsageError(f"sharding_configs stage is {self.stage!r}; it must be 1, 2 or 3")
        positive("sharding_configs segment_broadcast_MB", self.segment_broadcast_MB)
        _set_names(self, "segment_anchors", "sharding_configs", "names of modules")
        if self.stage == 1 and (self.segment_anchors or self.segment_broadcast_MB != 32.0):
            raise UsageError(
                "sharding_configs segment_broadcast_MB and segment_anchors need stage 2 or 3, because stage "
                '1 has no units. Remove the setting, or set "stage".'
            )


@frozen(kw_only=True)
class RecomputeConfigs:
    """The keys of `strategy.recompute_configs`.

    `checkpoints` holds the modules whose activations are recomputed in the backward pass, by name or pattern
    (`"layer1"`, `"blocks.*"`, where a star is one step of a name).
    """

    checkpoints: Strings = ()

    def __post_init__(self) -> None:
        _set_names(self, "checkpoints", "recompute_configs", "names of modules")


@frozen(kw_only=True)
class CompileConfigs:
    """The keys of `strategy.compile_configs`, which are the arguments of torch.compile with these names."""

    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False

    def __post_init__(self) -> None:
        for name in ("backend", "mode"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name == "mode"):
                raise UsageError(
                    f"compile_configs {name} is {value!r}; it must be a name that torch.compile accepts"
                )
        if self.dynamic is not None:
            flag("compile_configs dynamic", self.dynamic)
        flag("compile_configs fullgraph", self.fullgraph)


# ---- All settings of collective training, as one frozen value

BUCKET_MB = 25.0
"""torch's own default."""


@frozen(kw_only=True)
class CollectiveSettings:
    """All settings of collective training. None and False mean "not set".

    Raises NotSupportedError with both names for settings that exclude each other.
    """

    amp: AmpConfigs | None = None
    gradient_merge: GradientMergeConfigs | None = None
    localsgd: LocalSGDConfigs | None = None
    sharding: ShardingConfigs | None = None
    recompute: RecomputeConfigs | None = None
    compile: CompileConfigs | None = None
    lars: LarsConfigs | None = None
    lamb: LambConfigs | None = None
    scale_strategy: str = "avg"
    fp16_allreduce: bool = False
    sync_batch_norm: bool = False
    find_unused_parameters: bool = False
    fuse_grad_size_in_MB: float = BUCKET_MB

    def __post_init__(self) -> None:
        wanted = self._wanted()
        for one, other, why in _APART:
            if one in wanted and other in wanted:
                raise NotSupportedError(
                    f"NotSupported: strategy.{wanted[one]} together with strategy.{wanted[other]}, because "
                    f"{why}. Remove one of the two."
                )

    @property
    def sharded(self) -> bool:
        """True if processes hold parts of gradients or parameters, and the model is therefore not a
        DataParallel.
        """
        return self.sharding is not None and self.sharding.stage > 1

    @property
    def float16(self) -> bool:
        """True if losses are scaled."""
        return self.amp is not None and self.amp.dtype == "float16"

    @property
    def merged_steps(self) -> int:
        """Backward passes per update."""
        return 1 if self.gradient_merge is None else self.gradient_merge.k_steps

    @property
    def paced(self) -> bool:
        """True if the model depends on the position between two updates."""
        return self.merged_steps > 1 or self.localsgd is not None

    def divisor(self, world: int) -> float:
        """Return the divisor for the sum of all gradients of an update."""
        processes = world if self.scale_strategy == "avg" else 1
        merges = self.gradient_merge is not None and self.gradient_merge.avg
        return float(processes * (self.merged_steps if merges else 1))

    def changed(self, other: CollectiveSettings) -> list[str]:
        """Return the fields that a wrapped model depends on and that differ between the two settings."""
        return [
            _FIELDS.get(field.name, field.name)
            for field in fields(self)
            if field.name not in ("lars", "lamb") and getattr(self, field.name) != getattr(other, field.name)
        ]

    def _wanted(self) -> dict[str, str]:
        """Return the requested settings by their names in `_APART`, with their names in messages."""
        asked = {name: name for name in ("localsgd", "lars", "lamb") if getattr(self, name) is not None}
        asked |= {name: name for name in ("fp16_allreduce", "find_unused_parameters") if getattr(self, name)}
        if self.merged_steps > 1:
            asked["gradient_merge"] = "gradient_merge"
        if self.scale_strategy != "avg":
            asked["scale"] = f"gradient_scale_configs {self.scale_strategy!r}"
        if self.fuse_grad_size_in_MB != BUCKET_MB:
            asked["buckets"] = "fuse_grad_size_in_MB"
        if self.sharding is not None:
            asked["sharding"] = "sharding"
        if self.sharded and self.sharding is not None:
            asked["stages"] = f"sharding stage {self.sharding.stage}"
        return asked


_FIELDS = {"scale_strategy": "gradient_scale_configs"}

_APART = (
    ("localsgd", "gradient_merge", "localsgd already exchanges only every k_steps"),
    ("localsgd", "sharding", "no process has the whole model for training alone"),
    ("localsgd", "fp16_allreduce", "localsgd exchanges parameters, not gradients"),
    ("localsgd", "scale", "gradients stay in their process with localsgd"),
    ("lars", "lamb", "only one of them can replace the optimizer"),
    ("lars", "stages", "a rate from the norm of a weight needs the whole weight"),
    ("lamb", "stages", "a rate from the norm of a weight needs the whole weight"),
    ("fp16_allreduce", "stages", "FSDP sends gradients in their own type"),
    ("find_unused_parameters", "stages", "FSDP handles unused parameters itself"),
    ("buckets", "stages", "FSDP sends by units of the model (see sharding_configs segment_broadcast_MB)"),
)
"""Settings that exclude each other, and why."""
