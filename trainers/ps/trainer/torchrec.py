"""Find TorchRec's collections in a model, and read the configurations of their tables.

torchrec itself is never imported. A model can only contain modules of a package that the script has imported.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from fleetrun.frozen import frozen
from trainers.errors import NotSupportedError, UsageError
from trainers.ps.tables.rules import SGD, Adagrad, AnyRule, RowWiseAdagrad, RowWiseAdam, SparseAdam
from trainers.ps.tables.spec import Initializer, InitKind, RowType

MODULES, TENSORS = "torchrec.modules.embedding_modules", "torchrec.sparse.jagged_tensor"
_KEYED, _OPTIMIZERS = "torchrec.optim.keyed", "torchrec.optim.optimizers"
ROW_WISE = "torchrec.optim.rowwise_adagrad", "RowWiseAdagrad"
_ROW_TYPES = {"FP32": RowType.FLOAT32, "FP16": RowType.FLOAT16, "BF16": RowType.BFLOAT16}
_PLAIN = "Use torchrec.EmbeddingBagCollection or EmbeddingCollection"
_REMAPS = f"{_PLAIN}, and pass raw ids: a table on device='meta' with use_virtual_table=True has any int64 id"
_REFUSED = (
    ("torchrec.distributed.model_parallel", "DistributedModelParallel", "Pass the model inside it"),
    ("torchrec.distributed.types", "ShardedModule", "Pass the model as it was before it was sharded"),
    (MODULES, "EmbeddingBagCollectionInterface", _PLAIN),
    (MODULES, "EmbeddingCollectionInterface", _PLAIN),
    ("torchrec.modules.mc_modules", "ManagedCollisionModule", _REMAPS),
    ("torchrec.modules.mc_embedding_modules", "BaseManagedCollisionEmbeddingCollection", _REMAPS),
    ("torchrec.modules.itep_modules", "GenericITEPModule", _PLAIN),
    ("torchrec.modules.pec_embedding_modules", "PECEmbeddingCollection", _PLAIN),
)
"""Modules with tables that servers cannot hold, and what to use instead."""


def defined(module: str, name: str) -> Any:
    """Return a name of torchrec, or None if the script has not imported its module."""
    return getattr(sys.modules.get(module), name, None)


def is_a(thing: object, module: str, name: str) -> bool:
    """Return True for an instance of this class of torchrec."""
    kind = defined(module, name)
    return kind is not None and isinstance(thing, kind)


def is_jagged(thing: object) -> bool:
    """Return True for a KeyedJaggedTensor."""
    return is_a(thing, TENSORS, "KeyedJaggedTensor")


def jagged_parts(features: Any) -> tuple[tuple[str, ...], torch.Tensor, torch.Tensor]:
    """Return the keys, the ids, and the lengths or else the offsets of a KeyedJaggedTensor."""
    lengths = features.lengths_or_none()
    return tuple(features.keys()), features.values(), features.offsets() if lengths is None else lengths


# ---- Collections and their tables.


@frozen(eq=False)
class CollectionTable:
    """A table of a collection, with TorchRec's configuration of it."""

    collection: str
    config: Any

    @property
    def limit(self) -> int | None:
        """The number of ids, or None if the table takes any id."""
        return None if self.config.use_virtual_table else int(self.config.num_embeddings)

    @property
    def dtype(self) -> RowType:
        """The type in which servers keep the rows."""
        return _ROW_TYPES[self.config.data_type.name]

    def init(self, name: str) -> Initializer | None:
        """Return the initial values of a row that appears when it is used, or None if `init_fn` is unknown.
        The table's name is the seed.
        """
        function: Any = self.config.init_fn
        options: Mapping[str, Any] = {}
        if isinstance(function, partial) and not function.args:
            function, options = function.func, function.keywords
        known = _INITS.get(function)
        if known is None or options.keys() - known[1].keys():
            return None
        kind, defaults = known
        values = [float(value) for value in {**defaults, **options}.values()]
        return Initializer(kind, values[0], values[-1], zlib.crc32(name.encode()))


_INITS: Mapping[Callable[..., object], tuple[InitKind, dict[str, float]]] = {
    torch.nn.init.uniform_: (InitKind.UNIFORM, {"a": 0.0, "b": 1.0}),
    torch.nn.init.normal_: (InitKind.NORMAL, {"mean": 0.0, "std": 1.0}),
    torch.nn.init.constant_: (InitKind.UNIFORM, {"val": 0.0}),
    torch.nn.init.zeros_: (InitKind.UNIFORM, {"val": 0.0}),
    torch.nn.init.ones_: (InitKind.UNIFORM, {"val": 1.0}),
}
"""The initializers that servers know, with their options."""


def find_collections(model: Module) -> list[tuple[str, Module]]:
    """Return the collections of a model by name. Raises NotSupportedError for a module of TorchRec whose
    tables servers cannot hold.
    """
    if MODULES not in sys.modules:
        return []
    found = []
    for name, module in model.named_modules():
        if is_collection(module):
            found.append((name, module))
            continue
        for where, refused, instead in _REFUSED:
            if is_a(module, where, refused):
                raise NotSupportedError(
                    f"Module {name!r} is a {type(module).__module__}.{type(module).__qualname__}, which "
                    f"cannot be on parameter servers. {instead}."
                )
    return found


def is_collection(module: Module) -> bool:
    """Return True for a collection whose forward is TorchRec's own."""
    names = ("EmbeddingBagCollection", "EmbeddingCollection")
    mine = [defined(MODULES, name) for name in names if is_a(module, MODULES, name)]
    return any(type(module).forward is kind.forward for kind in mine)


def tables_of(collection: Any) -> list[tuple[Any, Module]]:
    """Return the configuration and the module of each table."""
    if is_a(collection, MODULES, "EmbeddingBagCollection"):
        return list(zip(collection.embedding_bag_configs(), collection.embedding_bags.values(), strict=True))
    return list(zip(collection.embedding_configs(), collection.embeddings.values(), strict=True))


def collection_tables(model: Module) -> dict[Module, CollectionTable]:
    """Return the tables of all collections by their modules. Raises NotSupportedError."""
    found: dict[Module, CollectionTable] = {}
    for name, collection in find_collections(model):
        for config, module in tables_of(collection):
            _check(name, collection, config)
            found.setdefault(module, CollectionTable(name, config))
    return found


def _check(name: str, collection: Any, config: Any) -> None:
    where = f"Table {config.name!r} of {type(collection).__name__} {name!r} has"
    if config.data_type.name not in _ROW_TYPES:
        raise NotSupportedError(
            f"{where} data_type {config.data_type.name}; servers support FP32, FP16 and BF16."
        )
    policy = config.virtual_table_eviction_policy
    if policy is not None and type(policy).__name__ != "NoEvictionPolicy":
        raise NotSupportedError(
            f"{where} virtual_table_eviction_policy {type(policy).__name__}. Remove it, and set max_rows, "
            "evict or ttl_s of the table in strategy.sparse_table_configs."
        )
    pooling = getattr(config, "pooling", None)
    if pooling is not None and pooling.name == "MEAN" and collection.is_weighted():
        raise NotSupportedError(
            f"{where} pooling MEAN, and the collection is weighted, which torch does not support either. Use "
            "PoolingType.SUM, or is_weighted=False."
        )


# ---- Optimizers.


def unwrapped(optimizer: Optimizer) -> list[Optimizer]:
    """Return torch's optimizers inside TorchRec's KeyedOptimizerWrapper and CombinedOptimizer, or the
    optimizer itself. Raises NotSupportedError for TorchRec's other wrappers.
    """
    inner: Any = optimizer
    if is_a(optimizer, _KEYED, "CombinedOptimizer"):
        return [each for _, keyed in inner.optimizers for each in unwrapped(keyed)]
    if is_a(optimizer, _KEYED, "KeyedOptimizerWrapper"):
        return [inner._optimizer]
    if is_a(optimizer, _KEYED, "KeyedOptimizer"):
        raise NotSupportedError(
            f"{type(optimizer).__name__} is not supported on parameter servers. Pass the optimizer inside "
            "it. Use a scheduler of torch.optim.lr_scheduler for a warm-up, and torch.nn.utils to clip "
            "dense gradients before step()."
        )
    return [optimizer]


_ADAM = ("betas", "beta1", "beta2", "eps")
_PLACEHOLDERS: Mapping[str, tuple[AnyRule, tuple[str, ...]]] = {
    "SGD": (SGD(), ()),
    "Adagrad": (Adagrad(eps=1e-8), ("eps",)),
    "Adam": (SparseAdam(), _ADAM),
    "PartialRowWiseAdam": (RowWiseAdam(decoupled=1.0), (*_ADAM, "weight_decay")),
}
"""The optimizers of TorchRec that only name an algorithm of FBGEMM, with its defaults, and the options that
servers know.
"""


def row_wise_rule(
    optimizer: Optimizer, group: Mapping[str, Any], name: str, *, sparse: bool
) -> AnyRule | None:
    """Return the rule of TorchRec's RowWiseAdagrad, or None for another optimizer. Raises NotSupportedError
    for a dense parameter.
    """
    if not is_a(optimizer, *ROW_WISE):
        return None
    if not sparse:
        raise NotSupportedError(
            f"RowWiseAdagrad cannot train {name!r}, which is dense. Use torch.optim.Adagrad for it."
        )
    names = ("lr_decay", "weight_decay", "initial_accumulator_value", "eps")
    return RowWiseAdagrad(**{name: float(group[name]) for name in names})


def placeholder_rule(kind: type, options: Mapping[str, Any], name: str) -> tuple[AnyRule, float] | None:
    """Return the rule and the learning rate of one of TorchRec's placeholders with the defaults of FBGEMM, or
    None for another class. Raises NotSupportedError for an algorithm or an option that servers lack.
    """
    if kind.__module__ != _OPTIMIZERS:
        return None
    if kind.__name__ not in _PLACEHOLDERS:
        raise NotSupportedError(
            f"{kind.__name__} of {name!r} is not supported on parameter servers. Use one of torchrec.optim: "
            f"{', '.join(_PLACEHOLDERS)}, RowWiseAdagrad."
        )
    rule, names = _PLACEHOLDERS[kind.__name__]
    names = ("lr", "learning_rate", *names)
    if unknown := sorted(options.keys() - {*names}):
        raise NotSupportedError(
            f"{kind.__name__} of {name!r} has {unknown[0]}={options[unknown[0]]!r}, which servers do not "
            f"support. Use {', '.join(names)}."
        )
    found: dict[str, Any] = dict(options)
    lr = float(found.pop("lr", found.pop("learning_rate", 0.01)))
    found.update(zip(("beta1", "beta2"), found.pop("betas", ()), strict=False))
    found = {key: float(value) for key, value in found.items()}
    return replace(rule, **found), lr


def in_backward(name: str, parameter: torch.nn.Parameter) -> tuple[Optimizer, type, Mapping[str, Any]] | None:
    """Return the optimizer of apply_optimizer_in_backward with its class and options, or None. Raises
    UsageError if there are several.
    """
    found: Any = getattr(parameter, "_in_backward_optimizers", [])
    if len(found) > 1:
        raise UsageError(
            f"apply_optimizer_in_backward was called {len(found)} times for {name!r}. Call it once for each "
            "parameter."
        )
    if not found:
        return None
    also: Any = parameter
    return found[0], also._optimizer_classes[0], also._optimizer_kwargs[0]


def remove_backward_hooks(parameter: torch.nn.Parameter) -> None:
    """Remove the hooks of apply_optimizer_in_backward, which would step in this process."""
    handles = defined("torch.distributed.optim.apply_optimizer_in_backward", "param_to_optim_hook_handle_map")
    for handle in () if handles is None else handles.pop(parameter, ()):
        handle.remove()
