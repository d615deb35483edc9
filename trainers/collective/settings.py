"""What a strategy asks of collective training, as one frozen value. Knows which wishes go together; leaves
what they do to the files that are named after them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from trainers.collective.configs import (
    AmpConfigs,
    GradientMergeConfigs,
    LambConfigs,
    LarsConfigs,
    LocalSGDConfigs,
)
from trainers.collective.shardingconfigs import CompileConfigs, RecomputeConfigs, ShardingConfigs
from trainers.errors import NotSupportedError

BUCKET_MB = 25.0
"""torch's own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSettings:
    """None, False: not asked for. Raises NotSupportedError for wishes that do not go together, both named."""

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
                    f"NotSupported: strategy.{wanted[one]} together with strategy.{wanted[other]}: {why}; "
                    "drop one of the two"
                )

    @property
    def sharded(self) -> bool:
        """Whether processes hold parts of gradients or parameters: there is no DataParallel then."""
        return self.sharding is not None and self.sharding.stage > 1

    @property
    def float16(self) -> bool:
        """Whether losses are scaled."""
        return self.amp is not None and self.amp.dtype == "float16"

    @property
    def merged_steps(self) -> int:
        """Backward passes to an update."""
        return 1 if self.gradient_merge is None else self.gradient_merge.k_steps

    @property
    def paced(self) -> bool:
        """Whether the model must know where between two updates the job is."""
        return self.merged_steps > 1 or self.localsgd is not None

    def divisor(self, world: int) -> float:
        """By what the sum of all gradients of an update is divided."""
        processes = world if self.scale_strategy == "avg" else 1
        merges = self.gradient_merge is not None and self.gradient_merge.avg
        return float(processes * (self.merged_steps if merges else 1))

    def changed(self, other: CollectiveSettings) -> list[str]:
        """The fields, of those that a wrapped model depends on, in which the two differ."""
        return [
            _FIELDS.get(field.name, field.name)
            for field in fields(self)
            if field.name not in ("lars", "lamb") and getattr(self, field.name) != getattr(other, field.name)
        ]

    def _wanted(self) -> dict[str, str]:
        """What is asked for, by the names in `_APART`, and how a message calls it."""
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
    ("localsgd", "gradient_merge", "with localsgd processes already exchange every k_steps only"),
    ("localsgd", "sharding", "no process has the whole model to train on its own"),
    ("localsgd", "fp16_allreduce", "localsgd exchanges parameters, not gradients"),
    ("localsgd", "scale", "with localsgd gradients stay in their process"),
    ("lars", "lamb", "only one of them can replace the optimizer"),
    ("lars", "stages", "a rate by the norm of a weight wants the whole weight"),
    ("lamb", "stages", "a rate by the norm of a weight wants the whole weight"),
    ("fp16_allreduce", "stages", "FSDP sends gradients in the type that they have"),
    ("find_unused_parameters", "stages", "FSDP treats parameters that are not used by itself"),
    ("buckets", "stages", "FSDP sends by units of the model, see sharding_configs segment_broadcast_MB"),
)
"""Wishes that do not go together, and why."""
