"""Define DistributedStrategy, a script's training options, with checks and YAML.

This module has the fields and the kind of job for each. `ps.configs` and `collective.configs` have their
settings. Errors for fields of Paddle's strategy without effect here name the alternative. Paddle 1.x's
DistributeTranspilerConfig is converted into an ordinary strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from fleetrun.aliases import Document, Fields
from fleetrun.frozen import frozen
from trainers.checks import flag, nearest, one_of, positive
from trainers.collective.configs import (
    BUCKET_MB,
    AmpConfigs,
    CollectiveSettings,
    CompileConfigs,
    GradientMergeConfigs,
    GradientScaleConfigs,
    LambConfigs,
    LarsConfigs,
    LocalSGDConfigs,
    RecomputeConfigs,
    ShardingConfigs,
    checker,
)
from trainers.errors import NotSupportedError, UsageError
from trainers.ps.configs import (
    SPLIT_METHODS,
    AsyncConfigs,
    PsConfigs,
    TableConfigs,
    a_sync_configs,
    ps_configs,
    sparse_table_configs,
)
from trainers.ps.tables.rules import RULES
from trainers.ps.tables.spec import Entry, EntryKind, Initializer, InitKind
from trainers.storage.folder import Where

# ---- Fields of Paddle's DistributedStrategy (2.6, `distributed_strategy.proto`) without effect here


@frozen
class Unsupported:
    """A field of Paddle's DistributedStrategy (2.6) without effect here.

    `off` is the value that requests nothing, usually Paddle's default, or None if there is no such value.
    """

    instead: str
    off: object = None


_TENSOR = "use torch.distributed.tensor.parallel in the model"
_CUDNN = "use torch.backends.cudnn in the script"
_BUCKETS = "gradients are reduced in groups of strategy.fuse_grad_size_in_MB"

_INSTEAD: Mapping[str, Fields] = {
    "use torch.distributed.pipelining in the model": {"pipeline": False, "pipeline_configs": None},
    _TENSOR: {"tensor_parallel": False, "tensor_parallel_configs": None},
    f"all processes train data parallel; use strategy.sharding, or {_TENSOR[4:]}": {
        "hybrid_configs": None
    },
    "all processes train data parallel; use strategy.sharding": {"hybrid_parallel_order": None},
    "use strategy.fp16_allreduce, or torch's PowerSGD hook on the model": {
        "dgc": False, "dgc_configs": None,
    },
    "use strategy.localsgd with localsgd_configs k_steps": {
        "adaptive_localsgd": False, "adaptive_localsgd_configs": None,
    },
    "use torch.sparse.semi_structured": {"asp": False},
    "use torchao's quantization": {"qat": False, "qat_configs": None},
    "use the optimizer that you want": {"adam_d2sum": False},
    "use fleetrun --nnodes=LEAST:MOST and fleet.save_checkpoint": {"elastic": False},
    "no strategy is chosen automatically; set the fields that you want": {
        "auto": False, "semi_auto": False, "auto_search": False,
    },
    "use strategy.compile": {
        "build_strategy": None, "execution_strategy": None, "without_graph_optimization": True,
    },
    f"{_CUDNN}: torch.backends.cudnn.benchmark = True": {"cudnn_exhaustive_search": False},
    _CUDNN: {"cudnn_batchnorm_spatial_persistent": False, "conv_workspace_size_limit": 512},
    "NCCL decides this; set its NCCL_* environment variables for fleetrun": {
        "nccl_comm_num": 1, "sync_nccl_allreduce": True, "use_hierarchical_allreduce": False,
        "hierarchical_allreduce_inter_nranks": 1, "heter_ccl_mode": False,
        "calc_comm_same_stream": False,
    },
    f"{_BUCKETS}; make the groups small": {"fuse_all_reduce_ops": True},
    _BUCKETS: {
        "fuse_grad_size_in_num": 8, "fuse_grad_size_in_TFLOPS": 50, "last_comm_group_size_MB": 1,
    },
    "strategy.gradient_merge adds gradients on their own device": {"fuse_grad_merge": False},
    "use fleet.init(is_collective=False), strategy.ps_configs and strategy.sparse_table_configs": {
        "trainer_desc_configs": None, "downpour_table_param": None,
    },
    "pass URLs that fsspec supports to fleet.save_persistables": {"fs_client_param": None},
    "federated training is not supported": {
        "is_fl_ps_mode": False, "with_coordinator": False, "is_with_coordinator": False,
    },
    "each process reads its own part; use trainers.data's samplers": {"split_data": True},
    "use fleet.init(is_collective=True or False)": {"mode": None},
}  # fmt: skip
"""The alternative, and its fields, each with its `off`."""

UNSUPPORTED: Mapping[str, Unsupported] = {
    name: Unsupported(instead, off) for instead, names in _INSTEAD.items() for name, off in names.items()
}


def check_off(name: str, value: object) -> None:
    """Raise NotSupportedError unless the value requests nothing."""
    field = UNSUPPORTED[name]
    if field.off is None or type(value) is not type(field.off) or value != field.off:
        raise NotSupportedError(f"NotSupported: strategy.{name} = {value!r}; {field.instead}")


# ---- The strategy

DENSE = ("servers", "allreduce")

Configs = Fields
_NONE: Configs = MappingProxyType({})


class DistributedStrategy:
    """The options of a training.

    An unknown field raises an error that names the nearest one. A field of Paddle without effect here raises
    an error that names the alternative. A field ending in `_configs` is a dict of settings. The flag with the
    same name turns the feature on or off, and must be set too.

    Parameter servers:

    - `a_sync` makes servers apply a push on arrival (True), or a step of all trainers together (False).
    - `a_sync_configs` has the keys of `AsyncConfigs`. `{"k_steps": 100}` selects geo training.
    - `ps_configs` has the keys of `PsConfigs`.
    - `sparse_table_configs` is `{"name of the embedding's weight": {...}}` with the keys of `TableConfigs`.
    - `dense` keeps dense parameters on the servers, or ("allreduce") trains them in each trainer with
      averaged gradients.

    Both kinds of job:

    - `amp` makes the model compute in half precision (`AmpConfigs`).

    Collective jobs:

    - `gradient_merge` combines several steps into one update (`GradientMergeConfigs`).
    - `localsgd` averages models every few updates, instead of gradients in each (`LocalSGDConfigs`).
    - `gradient_scale_configs` selects the average or the sum of gradients (`GradientScaleConfigs`).
    - `fp16_allreduce` sends gradients in half precision.
    - `lars` and `lamb` are for large batches (`LarsConfigs`, `LambConfigs`).
    - `sharding` divides state, gradients and parameters among processes (`ShardingConfigs`).
    - `recompute` recomputes activations instead of keeping them (`RecomputeConfigs`).
    - `sync_batch_norm` computes batch norms over the batches of all processes.
    - `compile` uses torch.compile (`CompileConfigs`).
    - `find_unused_parameters` and `fuse_grad_size_in_MB` are passed to torch's DistributedDataParallel.
    """

    a_sync: bool = False
    a_sync_configs: Configs = _NONE
    ps_configs: Configs = _NONE
    sparse_table_configs: Configs = _NONE
    dense: str = "servers"
    amp: bool = False
    amp_configs: Configs = _NONE
    gradient_merge: bool = False
    gradient_merge_configs: Configs = _NONE
    localsgd: bool = False
    localsgd_configs: Configs = _NONE
    gradient_scale_configs: Configs = _NONE
    fp16_allreduce: bool = False
    lars: bool = False
    lars_configs: Configs = _NONE
    lamb: bool = False
    lamb_configs: Configs = _NONE
    sharding: bool = False
    sharding_configs: Configs = _NONE
    recompute: bool = False
    recompute_configs: Configs = _NONE
    sync_batch_norm: bool = False
    compile: bool = False
    compile_configs: Configs = _NONE
    find_unused_parameters: bool = False
    fuse_grad_size_in_MB: float = BUCKET_MB

    def __setattr__(self, name: str, value: object) -> None:
        if name in UNSUPPORTED:
            check_off(name, value)
            return
        object.__setattr__(self, name, _checked(name, value))

    def __getattr__(self, name: str) -> Any:
        if name in UNSUPPORTED:
            field = UNSUPPORTED[name]
            if field.off is None:
                raise NotSupportedError(f"NotSupported: strategy.{name}; {field.instead}")
            return field.off
        raise AttributeError(f"DistributedStrategy has no field {name!r}{nearest(name, _CHECKS)}")

    def __repr__(self) -> str:
        fields = {name: getattr(self, name) for name in _DEFAULTS}
        named = [f"{name}={_shown(value)}" for name, value in fields.items() if value != _DEFAULTS[name]]
        return f"DistributedStrategy({', '.join(named)})"

    def fits(self, is_collective: bool) -> None:
        """Raise UsageError for a field that has been set and has no meaning in this kind of job.

        Also raise it for the `..._configs` of a feature that is turned neither on nor off.
        """
        for name in ("a_sync", *_CHOICES):
            if getattr(self, f"{name}_configs") and name not in vars(self):
                raise UsageError(
                    f"strategy.{name}_configs is set, but strategy.{name} is not. Set strategy.{name} = "
                    "True to use the settings, or False to ignore them."
                )
        for name, default in _DEFAULTS.items():
            if name in _BOTH or (name in _SERVERS) is not is_collective:
                continue
            if getattr(self, name) != default:
                kinds = ("parameter servers", "collective") if is_collective else ("collective jobs", "not")
                raise UsageError(
                    f"strategy.{name} is {_shown(getattr(self, name))}, which is for {kinds[0]}, but this "
                    f"job is {kinds[1]}. Remove the field, or call "
                    f"fleet.init(is_collective={not is_collective})."
                )

    def half_precision(self) -> AmpConfigs | None:
        """Return `amp_configs` with defaults filled in, or None without `amp`."""
        return AmpConfigs(**self.amp_configs) if self.amp else None

    def collective(self) -> CollectiveSettings:
        """Return the settings of collective training with defaults filled in.

        Raises NotSupportedError for options that exclude each other.
        """
        chosen = {
            name: make(**getattr(self, f"{name}_configs"))
            for name, make in _CHOICES.items()
            if getattr(self, name)
        }
        plain = {name: getattr(self, name) for name in _PLAIN}
        scale_strategy = GradientScaleConfigs(**self.gradient_scale_configs).scale_strategy
        return CollectiveSettings(**chosen, **plain, scale_strategy=scale_strategy)

    def ps(self) -> PsConfigs:
        """Return `ps_configs` with defaults filled in. Raises NotSupportedError for contradictory
        settings.
        """
        configs = PsConfigs(**self.ps_configs)
        if not self.a_sync and configs.durability == "snapshot":
            raise NotSupportedError(
                'ps_configs durability "snapshot" does not work with a_sync False, because servers that '
                'restore snapshots of different steps cannot continue in step. Use "log" or "none".'
            )
        if self.a_sync and configs.read_ahead and not AsyncConfigs(**self.a_sync_configs).overlap:
            raise NotSupportedError(
                "ps_configs read_ahead is True, but a_sync_configs overlap is False, which prevents reading "
                "ahead. Remove one of them."
            )
        return configs

    def asynchronous(self) -> AsyncConfigs:
        """Return `a_sync_configs` with defaults filled in.

        Raises UsageError or NotSupportedError for contradictory settings.
        """
        configs = AsyncConfigs(**self.a_sync_configs)
        if configs.k_steps and not self.a_sync:
            raise UsageError(
                f"a_sync_configs k_steps is {configs.k_steps} with a_sync False, but geo training is "
                "asynchronous. Set strategy.a_sync = True."
            )
        if configs.k_steps and self.dense == "allreduce":
            raise NotSupportedError(
                f'a_sync_configs k_steps is {configs.k_steps} with strategy.dense "allreduce", but in geo '
                'training each trainer steps on its own. Use dense "servers".'
            )
        return configs

    def agreed(self) -> str:
        """Return the settings that must be equal on servers and trainers and that differ from their
        defaults.
        """
        configs, asynchronous = self.ps(), self.asynchronous()
        found: tuple[tuple[str, object, object], ...] = (
            ("durability", configs.durability, "none"),
            ("nonfinite", configs.nonfinite, "refuse"),
            ("wire_dtype", configs.wire_dtype, "float32"),
            ("max_staleness", asynchronous.max_staleness if self.a_sync else None, None),
            ("geo", asynchronous.k_steps > 0, False),
        )
        return ", ".join(f"{name} {value}" for name, value, usual in found if value != usual)

    def tables(self) -> Mapping[str, TableConfigs]:
        """Return `sparse_table_configs` by the name of the embedding's weight."""
        return {name: TableConfigs(**configs) for name, configs in self.sparse_table_configs.items()}

    def to_yaml(self) -> str:
        """Return all fields as YAML."""
        import yaml

        plain = {name: _to_plain(getattr(self, name)) for name in _DEFAULTS}
        return str(yaml.safe_dump(plain, sort_keys=False, default_flow_style=None))

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Return the strategy of a YAML text. Missing fields have their defaults.

        Raises UsageError or NotSupportedError for invalid fields.
        """
        made = cls()
        made._take(text, "the text")
        return made

    def save_to_prototxt(self, output: Where) -> None:
        """Write all fields to a file as YAML, under Paddle's name."""
        Path(output).write_text(self.to_yaml(), encoding="utf-8")

    def load_from_prototxt(self, pb_file: Where) -> None:
        """Set the fields in such a file, and keep the others. If one is invalid, no field changes."""
        self._take(Path(pb_file).read_text(encoding="utf-8"), str(pb_file))

    def _take(self, text: str, source: str) -> None:

        given = from_yaml_text(text, source)
        for name in given.keys() & UNSUPPORTED.keys():
            check_off(name, given.pop(name))
        for name, value in {name: _checked(name, value) for name, value in given.items()}.items():
            object.__setattr__(self, name, value)


def _checked(name: str, value: object) -> object:
    if name not in _CHECKS:
        raise UsageError(f"DistributedStrategy has no field {name!r}{nearest(name, _CHECKS)}")
    return _CHECKS[name](name, value)


def _shown(value: object) -> str:
    return repr(dict(value) if isinstance(value, Mapping) else value)


def _flag(name: str, value: object) -> bool:
    return flag(f"strategy.{name}", value)


_SERVERS = ("a_sync", "a_sync_configs", "ps_configs", "sparse_table_configs", "dense")
"""Fields that only jobs with parameter servers use."""
_BOTH = ("amp", "amp_configs")
"""Fields for both kinds of job. The rest is for collective jobs only."""

_DEFAULTS = {name: getattr(DistributedStrategy, name) for name in DistributedStrategy.__annotations__}

_CHOICES: dict[str, type[Any]] = {
    "amp": AmpConfigs,
    "gradient_merge": GradientMergeConfigs,
    "localsgd": LocalSGDConfigs,
    "lars": LarsConfigs,
    "lamb": LambConfigs,
    "sharding": ShardingConfigs,
    "recompute": RecomputeConfigs,
    "compile": CompileConfigs,
}
"""Flags of collective training, and the classes of their `_configs`."""
_PLAIN = ("fp16_allreduce", "sync_batch_norm", "find_unused_parameters", "fuse_grad_size_in_MB")
"""Fields of collective training without `_configs`."""

_CHECKS: dict[str, Callable[[str, object], object]] = {
    name: _flag for name, default in _DEFAULTS.items() if isinstance(default, bool)
}
_CHECKS |= {f"{name}_configs": checker(make) for name, make in _CHOICES.items()}
_CHECKS |= {
    "a_sync_configs": a_sync_configs,
    "ps_configs": ps_configs,
    "sparse_table_configs": sparse_table_configs,
    "dense": lambda name, value: one_of(f"strategy.{name}", value, DENSE),
    "gradient_scale_configs": checker(GradientScaleConfigs),
    "fuse_grad_size_in_MB": lambda name, value: positive(f"strategy.{name}", value),
}


# ---- A strategy as YAML and back

_YAML_OBJECTS: Document = {rule.__name__: rule for rule in RULES.values()}
_YAML_OBJECTS |= {"Initializer": Initializer, "Entry": Entry}
_YAML_KINDS: dict[str, type[InitKind] | type[EntryKind]] = {"Initializer": InitKind, "Entry": EntryKind}


def from_yaml_text(text: str, source: str) -> Document:
    """Return the values from `DistributedStrategy.to_yaml`, unchecked. Raises UsageError for other YAML."""
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{source} is not YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError(f"{source} is {type(found).__name__}; it must be a mapping of a strategy's fields")
    return {name: _from_plain(value, source) for name, value in found.items()}


def _to_plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        inside = {field.name: _to_plain(getattr(value, field.name)) for field in fields(value)}
        return {f"!{type(value).__name__}": inside}
    if isinstance(value, Mapping):
        return {key: _to_plain(each) for key, each in value.items()}
    return [_to_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _from_plain(value: object, source: str) -> object:
    if isinstance(value, list):
        return [_from_plain(each, source) for each in value]
    if not isinstance(value, dict):
        return value
    names = list(value)
    if len(names) == 1 and isinstance(names[0], str) and names[0].startswith("!"):
        name, given = names[0][1:], value[names[0]]
        make = _YAML_OBJECTS.get(name)
        if make is None or not isinstance(given, dict):
            raise UsageError(
                f"{source} has {name} {given!r}; it must be one of {', '.join(sorted(_YAML_OBJECTS))}"
            )
        known = {field.name for field in fields(make)}
        if given.keys() != known:
            raise UsageError(f"{source} has {name} with {sorted(given)}; its fields are {sorted(known)}")
        values = dict(given)
        if name in _YAML_KINDS:
            kinds = {kind.name: kind for kind in _YAML_KINDS[name]}
            if values["kind"] not in kinds:
                raise UsageError(
                    f"{source} has {name} of kind {values['kind']!r}; it must be one of {', '.join(kinds)}"
                )
            values["kind"] = kinds[values["kind"]]
        return make(**values)
    return {key: _from_plain(each, source) for key, each in value.items()}


# ---- Paddle 1.x: the config for `fleet.distributed_optimizer`

_WHOSE = "DistributeTranspilerConfig"
_TRANSPILER_FIELDS = ("slice_var_up", "split_method", "sync_mode")
_TRANSPILER_INSTEAD = {
    "min_block_size": "parameters over 8192 elements are sliced, whole rows at a time",
    "geo_sgd_mode": 'use strategy.a_sync_configs = {"k_steps": n} in a fleet.DistributedStrategy',
    "geo_sgd_need_push_nums": 'use strategy.a_sync_configs = {"k_steps": n} in a fleet.DistributedStrategy',
    "half_async": "sync_mode False is asynchronous",
    "completely_not_async": "sync_mode True is synchronous",
    "runtime_split_send_recv": "servers have no programs to split",
    "enable_dc_asgd": 'use strategy.a_sync_configs = {"max_staleness": n} to limit how far a step may lag',
    "wait_port": "trainers always wait for their servers",
    "print_log": "use fleetrun --log_level debug to see more",
    "mode": "use fleet.init(is_collective=True) for training without servers",
    "collective_mode": "use fleet.init(is_collective=True) for training without servers",
    "nccl_comm_num": "torch.distributed decides this",
    "use_hierarchical_allreduce": "torch.distributed decides this",
    "hierarchical_allreduce_inter_nranks": "torch.distributed decides this",
}


class DistributeTranspilerConfig:
    """The options of a training with parameter servers, with Paddle 1.x's names.

    `sync_mode` makes a step of all workers together equal one large batch (True), or lets servers apply
    pushes on arrival (False). `split_method` assigns dense parameters and slices to servers in turn
    ("RoundRobin"), or by a hash of the name ("HashName"). `slice_var_up` slices dense parameters with more
    than 8192 elements over the servers. Any other field raises an error that names the alternative.
    """

    sync_mode: bool = True
    split_method: str = "RoundRobin"
    slice_var_up: bool = True

    def __setattr__(self, name: str, value: object) -> None:
        if name in _TRANSPILER_INSTEAD:
            raise NotSupportedError(f"NotSupported: {_WHOSE}.{name}; {_TRANSPILER_INSTEAD[name]}")
        if name not in _TRANSPILER_FIELDS:
            raise UsageError(f"{_WHOSE} has no field {name!r}{nearest(name, _TRANSPILER_FIELDS)}")
        if name != "split_method":
            flag(f"{_WHOSE}.{name}", value)
        else:
            one_of(f"{_WHOSE}.{name}", value, SPLIT_METHODS)
        object.__setattr__(self, name, value)


def strategy_of(given: DistributedStrategy | DistributeTranspilerConfig) -> DistributedStrategy:
    """Return the equivalent DistributedStrategy, or the given one. Raises UsageError for other objects."""
    if isinstance(given, DistributedStrategy):
        return given
    if not isinstance(given, DistributeTranspilerConfig):
        raise UsageError(
            f"The strategy is {given!r}. Pass a fleet.DistributedStrategy or a {_WHOSE} object (call the "
            "class to create one)."
        )
    strategy = DistributedStrategy()
    strategy.a_sync = not given.sync_mode
    strategy.ps_configs = {"split_method": given.split_method, "slice_var_up": given.slice_var_up}
    return strategy
