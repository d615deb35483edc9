"""DistributedStrategy: the wishes of a script, checked when they are written. Knows its fields and for which
kind of job each is; leaves their settings to `ps.configs` and `collective.configs`, and what they do to
`collective` and `ps`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias

from trainers.collective.configs import (
    AmpConfigs,
    GradientMergeConfigs,
    GradientScaleConfigs,
    LambConfigs,
    LarsConfigs,
    LocalSGDConfigs,
    amp_configs,
    checker,
)
from trainers.collective.settings import BUCKET_MB, CollectiveSettings
from trainers.collective.shardingconfigs import (
    CompileConfigs,
    RecomputeConfigs,
    ShardingConfigs,
    compile_configs,
    recompute_configs,
    sharding_configs,
)
from trainers.collective.unsupported import UNSUPPORTED, check_off, off_value
from trainers.errors import NotSupportedError, UsageError
from trainers.ps.configs import AsyncConfigs, PsConfigs, a_sync_configs, flag, nearest, positive, ps_configs
from trainers.ps.tableconfigs import TableConfigs, sparse_table_configs

DENSE = ("servers", "allreduce")

Configs: TypeAlias = Mapping[str, Any]


class DistributedStrategy:
    """How a job trains. An unknown field is an error that names the nearest one; one of Paddle's that has no
    effect here is one that says what to use. A field ending in `_configs` is a dict, and says how; the flag
    of the same name says whether.

    Parameter servers. `a_sync`: servers apply a push on arrival (True) or a step of all trainers at once
    (False). `a_sync_configs`: see `AsyncConfigs`; `{"k_steps": 100}` asks for geo training. `ps_configs`: see
    `PsConfigs`. `sparse_table_configs`: `{"name of the embedding's weight": {...}}`, see `TableConfigs`.
    `dense`: the dense parameters are on the servers, or trained by the optimizer in each trainer with
    gradients averaged among them ("allreduce").

    Collective. `amp`: the model computes in half precision, see `AmpConfigs`. `gradient_merge`: several steps
    to an update, see `GradientMergeConfigs`. `localsgd`: models are averaged every few updates instead of
    gradients in each, see `LocalSGDConfigs`. `gradient_scale_configs`: gradients are averaged or added up,
    see `GradientScaleConfigs`. `fp16_allreduce`: gradients travel in half precision. `lars`, `lamb`: large
    batches, see `LarsConfigs`, `LambConfigs`. `sharding`: processes divide state, gradients and parameters
    among them, see `ShardingConfigs`. `recompute`: activations are computed again instead of kept, see
    `RecomputeConfigs`. `sync_batch_norm`: batch norms have the statistics of all processes' batches.
    `compile`: torch.compile, see `CompileConfigs`. `find_unused_parameters`, `fuse_grad_size_in_MB`: passed
    to torch's DistributedDataParallel.
    """

    a_sync: bool
    a_sync_configs: Configs
    ps_configs: Configs
    sparse_table_configs: Configs
    dense: str
    amp: bool
    amp_configs: Configs
    gradient_merge: bool
    gradient_merge_configs: Configs
    localsgd: bool
    localsgd_configs: Configs
    gradient_scale_configs: Configs
    fp16_allreduce: bool
    lars: bool
    lars_configs: Configs
    lamb: bool
    lamb_configs: Configs
    sharding: bool
    sharding_configs: Configs
    recompute: bool
    recompute_configs: Configs
    sync_batch_norm: bool
    compile: bool
    compile_configs: Configs
    find_unused_parameters: bool
    fuse_grad_size_in_MB: float

    def __init__(self) -> None:
        for name, default in _DEFAULTS.items():
            setattr(self, name, default)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in UNSUPPORTED:
            check_off(name, value)
            return
        object.__setattr__(self, name, _checked(name, value))

    def __getattr__(self, name: str) -> Any:
        if name in UNSUPPORTED:
            return off_value(name)
        raise AttributeError(f"DistributedStrategy has no field {name!r}{nearest(name, _CHECKS)}")

    def __repr__(self) -> str:
        wishes = {name: getattr(self, name) for name in _DEFAULTS}
        named = [f"{name}={_shown(wish)}" for name, wish in wishes.items() if wish != _DEFAULTS[name]]
        return f"DistributedStrategy({', '.join(named)})"

    def fits(self, is_collective: bool) -> None:
        """Raises UsageError for a field that has been set and means nothing in this kind of job."""
        for name, default in _DEFAULTS.items():
            if (name in _SERVERS) is is_collective and getattr(self, name) != default:
                kinds = ("parameter servers", "collective") if is_collective else ("collective jobs", "not")
                raise UsageError(
                    f"strategy.{name} is {_shown(getattr(self, name))}, which is for {kinds[0]}, and this "
                    f"job is {kinds[1]}; leave it out, or call fleet.init(is_collective={not is_collective})"
                )

    def collective(self) -> CollectiveSettings:
        """What is asked of collective training, with the defaults filled in. Raises NotSupportedError for
        wishes that do not go together.
        """
        merge = GradientMergeConfigs(**self.gradient_merge_configs) if self.gradient_merge else None
        return CollectiveSettings(
            amp=AmpConfigs(**self.amp_configs) if self.amp else None,
            gradient_merge=merge,
            localsgd=LocalSGDConfigs(**self.localsgd_configs) if self.localsgd else None,
            sharding=ShardingConfigs(**self.sharding_configs) if self.sharding else None,
            recompute=RecomputeConfigs(**self.recompute_configs) if self.recompute else None,
            compile=CompileConfigs(**self.compile_configs) if self.compile else None,
            lars=LarsConfigs(**self.lars_configs) if self.lars else None,
            lamb=LambConfigs(**self.lamb_configs) if self.lamb else None,
            scale_strategy=GradientScaleConfigs(**self.gradient_scale_configs).scale_strategy,
            fp16_allreduce=self.fp16_allreduce,
            sync_batch_norm=self.sync_batch_norm,
            find_unused_parameters=self.find_unused_parameters,
            fuse_grad_size_in_MB=self.fuse_grad_size_in_MB,
        )

    def ps(self) -> PsConfigs:
        """`ps_configs` with the defaults filled in. Raises NotSupportedError for settings that contradict."""
        configs = PsConfigs(**self.ps_configs)
        if not self.a_sync and configs.durability == "snapshot":
            raise NotSupportedError(
                'ps_configs durability "snapshot" with a_sync False: servers that go back to snapshots of '
                'different steps cannot go on in step; use "log" or "none"'
            )
        return configs

    def asynchronous(self) -> AsyncConfigs:
        """`a_sync_configs` with the defaults filled in."""
        configs = AsyncConfigs(**self.a_sync_configs)
        if configs.k_steps and not self.a_sync:
            raise UsageError(
                f"a_sync_configs k_steps is {configs.k_steps} with a_sync False; geo training is "
                "asynchronous: set strategy.a_sync = True"
            )
        if configs.k_steps and self.dense == "allreduce":
            raise NotSupportedError(
                f'a_sync_configs k_steps is {configs.k_steps} with strategy.dense "allreduce": in geo '
                'training trainers step on their own; use dense "servers"'
            )
        return configs

    def agreed(self) -> str:
        """The settings that servers and trainers must have alike, as far as they are not the defaults."""
        configs, asynchronous = self.ps(), self.asynchronous()
        mine: dict[str, Any] = {}
        for name in ("durability", "nonfinite", "wire_dtype"):
            mine[name] = getattr(configs, name)
        mine["max_staleness"] = asynchronous.max_staleness if self.a_sync else None
        mine["geo"] = asynchronous.k_steps > 0
        usual: dict[str, Any] = {"durability": "none", "nonfinite": "refuse", "wire_dtype": "float32"}
        usual |= {"max_staleness": None, "geo": False}
        return ", ".join(f"{name} {value}" for name, value in mine.items() if value != usual[name])

    def tables(self) -> Mapping[str, TableConfigs]:
        """`sparse_table_configs` by the name of the embedding's weight."""
        return {name: TableConfigs(**configs) for name, configs in self.sparse_table_configs.items()}

    def to_yaml(self) -> str:
        """All fields, as YAML."""
        from trainers.strategyfile import dumped

        return dumped({name: getattr(self, name) for name in _DEFAULTS})

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """The strategy of such a text; a field that is not in it has its default. Raises UsageError or
        NotSupportedError, as setting the fields does.
        """
        made = cls()
        made._take(text, "the text")
        return made

    def save_to_prototxt(self, output: str | os.PathLike[str]) -> None:
        """Write all fields to a file: Paddle's name, but YAML."""
        Path(output).write_text(self.to_yaml(), encoding="utf-8")

    def load_from_prototxt(self, pb_file: str | os.PathLike[str]) -> None:
        """Set the fields that such a file has; the others stay. Nothing changes when one of them is wrong."""
        self._take(Path(pb_file).read_text(encoding="utf-8"), str(pb_file))

    def _take(self, text: str, source: str) -> None:
        from trainers.strategyfile import read

        given = read(text, source)
        for name in given.keys() & UNSUPPORTED.keys():
            check_off(name, given.pop(name))
        for name, value in {name: _checked(name, value) for name, value in given.items()}.items():
            object.__setattr__(self, name, value)


def _checked(name: str, value: Any) -> Any:
    if name not in _CHECKS:
        raise UsageError(f"DistributedStrategy has no field {name!r}{nearest(name, _CHECKS)}")
    return _CHECKS[name](name, value)


def _shown(value: Any) -> str:
    return repr(dict(value) if isinstance(value, Mapping) else value)


def _dense(name: str, value: Any) -> str:
    if value not in DENSE:
        raise UsageError(f"strategy.{name} is {value!r}; it must be one of {', '.join(DENSE)}")
    return str(value)


def _flag(name: str, value: Any) -> bool:
    return flag(f"strategy.{name}", value)


_SERVERS = ("a_sync", "a_sync_configs", "ps_configs", "sparse_table_configs", "dense")
"""What only a job with parameter servers heeds; all the rest is for collective ones."""

_DEFAULTS: dict[str, Any] = {
    "a_sync": False,
    "a_sync_configs": {},
    "ps_configs": {},
    "sparse_table_configs": {},
    "dense": "servers",
    "amp": False,
    "amp_configs": {},
    "gradient_merge": False,
    "gradient_merge_configs": {},
    "localsgd": False,
    "localsgd_configs": {},
    "gradient_scale_configs": {},
    "fp16_allreduce": False,
    "lars": False,
    "lars_configs": {},
    "lamb": False,
    "lamb_configs": {},
    "sharding": False,
    "sharding_configs": {},
    "recompute": False,
    "recompute_configs": {},
    "sync_batch_norm": False,
    "compile": False,
    "compile_configs": {},
    "find_unused_parameters": False,
    "fuse_grad_size_in_MB": BUCKET_MB,
}

_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    name: _flag for name, default in _DEFAULTS.items() if isinstance(default, bool)
}
_CHECKS |= {
    "a_sync_configs": a_sync_configs,
    "ps_configs": ps_configs,
    "sparse_table_configs": sparse_table_configs,
    "dense": _dense,
    "amp_configs": amp_configs,
    "gradient_merge_configs": checker(GradientMergeConfigs),
    "localsgd_configs": checker(LocalSGDConfigs),
    "gradient_scale_configs": checker(GradientScaleConfigs),
    "lars_configs": checker(LarsConfigs),
    "lamb_configs": checker(LambConfigs),
    "sharding_configs": sharding_configs,
    "recompute_configs": recompute_configs,
    "compile_configs": compile_configs,
    "fuse_grad_size_in_MB": lambda name, value: positive(f"strategy.{name}", value),
}
