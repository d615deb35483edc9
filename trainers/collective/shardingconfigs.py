"""Settings of `sharding`, `recompute` and `compile`, checked when they are made. Knows names, types and
ranges; leaves what they do to `sharding`, `recompute` and `compiling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trainers.errors import NotSupportedError, UsageError
from trainers.ps.configs import flag, keys, positive

STAGES = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingConfigs:
    """The keys of `strategy.sharding_configs`, as Paddle names them.

    `stage`: what is divided among the processes: 1 the optimizer's state, 2 gradients too, 3 parameters too.
    Stages 2 and 3 fetch and free parameters by units of the model: blocks of at least `segment_broadcast_MB`,
    or the modules that `segment_anchors` names (`"layer1"`, `"blocks.*"`: a star is one step of a name).
    """

    stage: int = 1
    segment_broadcast_MB: float = 32.0
    segment_anchors: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in STAGES:
            raise UsageError(f"sharding_configs stage is {self.stage!r}; it must be 1, 2 or 3")
        positive("sharding_configs segment_broadcast_MB", self.segment_broadcast_MB)
        object.__setattr__(
            self, "segment_anchors", _names("sharding_configs segment_anchors", self.segment_anchors)
        )
        if self.segment_anchors and self.stage == 1:
            raise UsageError(
                "sharding_configs segment_anchors with stage 1: only stages 2 and 3 have units; "
                "leave it out, or set the stage"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfigs:
    """The keys of `strategy.recompute_configs`. `checkpoints`: the modules whose activations are computed
    again in the backward pass, by name or pattern (`"layer1"`, `"blocks.*"`: a star is one step of a name).
    """

    checkpoints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "checkpoints", _names("recompute_configs checkpoints", self.checkpoints))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfigs:
    """The keys of `strategy.compile_configs`: the arguments of torch.compile of the same names."""

    backend: str = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = False

    def __post_init__(self) -> None:
        for name in ("backend", "mode"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (value is None and name == "mode"):
                raise UsageError(f"compile_configs {name} is {value!r}; it must be a name of torch.compile's")
        if self.dynamic is not None:
            flag("compile_configs dynamic", self.dynamic)
        flag("compile_configs fullgraph", self.fullgraph)


_PADDLES = {
    "sharding_segment_strategy": "segment_anchors decides when it is given, else segment_broadcast_MB",
    "sharding_degree": "all processes of the job share",
    "dp_degree": "all processes of the job share",
    "mp_degree": "use torch.distributed.tensor.parallel",
    "pp_degree": "use torch.distributed.pipelining",
    "hybrid_dp": "all processes of the job share",
    "gradient_merge_acc_step": "use strategy.gradient_merge",
    "optimize_offload": "state stays on the device of its parameters",
    "offload": "state stays on the device of its parameters",
    "enable_offload": "activations stay on their device",
    "checkpoint_shape": "activations stay on their device",
}


def sharding_configs(name: str, value: Any) -> Mapping[str, Any]:
    """The mapping, read-only and checked; raises UsageError or NotSupportedError."""
    return _checked(name, value, ShardingConfigs)


def recompute_configs(name: str, value: Any) -> Mapping[str, Any]:
    """The mapping, read-only and checked; raises UsageError or NotSupportedError."""
    return _checked(name, value, RecomputeConfigs)


def compile_configs(name: str, value: Any) -> Mapping[str, Any]:
    """The mapping, read-only and checked; raises UsageError."""
    return _checked(name, value, CompileConfigs)


def _checked(
    name: str, value: Any, kind: type[ShardingConfigs] | type[RecomputeConfigs] | type[CompileConfigs]
) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        for key in value.keys() & _PADDLES.keys():
            raise NotSupportedError(
                f"NotSupported: strategy.{name} {key} has no meaning here ({_PADDLES[key]}); leave it out"
            )
    configs = keys(name, value, [field.name for field in fields(kind)])
    kind(**configs)
    return configs


def _names(what: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise UsageError(f"{what} is {value!r}; it must be a list of names of modules")
    for name in value:
        if not isinstance(name, str) or not name:
            raise UsageError(f"{what} has {name!r} in it; it must be a list of names of modules")
    return tuple(value)
