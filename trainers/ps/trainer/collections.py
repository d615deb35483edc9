"""Call TorchRec's collections whose tables are on servers.

A call looks up all features of a group of tables with one kernel, and computes one output with one node of
autograd. Everything unusual (hooks on a table, a frozen table, another weight) goes through TorchRec's own
forward, which calls the served modules of the tables one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.nn import Module

from trainers.errors import UsageError
from trainers.kernels.compiled import Floats
from trainers.ps.kernels.bags import find_bounds, pool_bags, scatter_bags, weigh_bags
from trainers.ps.kernels.batch import array_of
from trainers.ps.trainer.embedding import ServedEmbedding, embedded, outside_graphs
from trainers.ps.trainer.gradient import Collected
from trainers.ps.trainer.group import Call, RemoteTable, TableGroup
from trainers.ps.trainer.jagged import Features, Jagged, JaggedBatch, as_keys
from trainers.ps.trainer.modules import weight_of
from trainers.ps.trainer.torchrec import MODULES, TENSORS, defined, is_a, jagged_parts, tables_of
from trainers.ps.trainer.weight import once, without_overrides

_NO_WEIGHTS = np.empty(0, np.float32)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Pool(torch.autograd.Function):
    """The bags of all features, (bags, width), with a batch of each group. `inputs` are the anchor of each
    batch, and the weights of its tables.
    """

    @staticmethod
    def forward(
        ctx: Any, batches: Sequence[JaggedBatch], width: int, weights: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.batches = batches
        return _pooled(batches, width, weights)

    @staticmethod
    @once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weights,) = ctx.saved_tensors
        grad, of_weights = array_of(grads[0].resolve_neg()), None
        if ctx.needs_input_grad[2]:
            of_weights = torch.zeros_like(weights, memory_format=torch.contiguous_format)
        found: list[Tensor | None] = []
        for each in ctx.batches:
            if of_weights is not None:
                rows, bounds = each.rows, each.jagged.bounds
                weigh_bags(grad, rows, each.place, each.moved, each.of, bounds, of_weights.numpy())
            found += _collected(each, grad, _values(weights))
        return None, None, of_weights, *found


def _pooled(batches: Sequence[JaggedBatch], width: int, weights: Tensor | None) -> Tensor:
    out = torch.empty(batches[0].jagged.bags, width)
    for each in batches:
        bounds = each.jagged.bounds
        pool_bags(each.rows, each.place, each.moved, each.of, bounds, _values(weights), out.numpy())
    return out


def _collected(batch: JaggedBatch, grad: Floats, weights: Floats) -> list[Tensor | None]:
    """Collect the gradient of a batch. Return for the anchor and for each table the gradient that autograd
    must get.
    """
    collected, weighed = batch.features.group.collected, len(batch.features.weights)

    def add(calls: Sequence[Call] | None, to: Collected) -> None:
        of = batch.of if calls is None else batch.of[[batch.every.index(call) for call in calls]]
        scatter_bags(grad, batch.place, batch.pushed[0], of, batch.jagged.bounds, weights, to.added())

    if collected.accumulates:
        add(None, collected.of(batch, None))
        return [None] * (1 + weighed)
    some, own = collected.accumulating([(call, None) for call in batch.every])
    if some:
        calls = [call for call, _ in some]
        add(calls, collected.of(batch, calls))
    tables: dict[int, list[Call]] = {}
    for call, _ in own:
        tables.setdefault(call.table, []).append(call)
    found = {table: batch.returned(calls, partial(add, calls)) for table, calls in tables.items()}
    return [None, *(found.get(table) for table in batch.features.weights)]


def _values(weights: Tensor | None) -> Floats:
    return _NO_WEIGHTS if weights is None else array_of(weights.resolve_neg())


class ServedCollection:
    """A collection that is served from construction until `end`. `servings` are its tables by their modules,
    and `called` receives its calls.
    """

    def __init__(
        self,
        module: Any,
        servings: Mapping[int, tuple[ServedEmbedding, RemoteTable]],
        called: Callable[[Module, Any], None] | None,
    ) -> None:
        self._module, self._called = module, called
        self._pools = is_a(module, MODULES, "EmbeddingBagCollection")
        tables = [servings[id(each)] for _, each in tables_of(module)]
        self._servings = [serving for serving, _ in tables]
        self._weights = [weight_of(table.sparse.module) for _, table in tables]
        modules: list[Any] = [each for _, each in tables_of(module)]
        self._parameters = [each._parameters for each in modules]
        self._hooks = [each.__dict__[name] for each in modules for name in _HOOKS]
        self._given = [serving.given for serving in self._servings]
        self._together = not any(table.sparse.spec.rows.statistics for _, table in tables)
        self.features = self._features([table for _, table in tables])
        names = (
            module._embedding_names
            if self._pools
            else [each for some in module.embedding_names_by_table() for each in some]
        )
        self._names: list[str] = names
        self._own = partial(type(module).forward, module)
        module.__dict__["forward"] = outside_graphs(self._forward)

    def _features(self, tables: Sequence[RemoteTable]) -> list[Features]:
        found: dict[TableGroup, list[tuple[int, str, int, int, int]]] = {}
        self._width = number = 0
        for table, (config, _) in zip(tables, tables_of(self._module), strict=True):
            mean = self._pools and config.pooling.name == "MEAN"
            for name in config.feature_names:
                found.setdefault(table.group, []).append((table.place, name, self._width, mean, number))
                number += 1
                self._width += config.embedding_dim
        features = []
        self._order: list[int] = []
        for group, some in found.items():
            some.sort(key=lambda each: each[0])
            places, names, columns, means, numbers = zip(*some, strict=True)
            features.append(Features(group, names, places, [columns, means]))
            self._order += numbers
        return features

    def end(self) -> None:
        """Make the module call its tables again."""
        del self._module.__dict__["forward"]

    def jagged(self, features: Any) -> Jagged:
        """Return the ids of a KeyedJaggedTensor. Raises UsageError or TypeError."""
        keys, ids, given = jagged_parts(features)
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"The KeyedJaggedTensor has ids in {ids.dtype}; ids must be int64 or int32")
        lengths = given is features.lengths_or_none()
        bags = features.stride()
        bounds = np.empty(len(given) + lengths, np.int64)
        good = len(bounds) == len(keys) * bags + 1 and find_bounds(as_keys(given), lengths, bounds)
        if not good or bounds[-1] != len(ids):
            raise UsageError(
                f"A KeyedJaggedTensor of {len(keys)} keys and stride {bags} has {len(ids)} values and wrong "
                f"{'lengths' if lengths else 'offsets'}, {list(given.shape)}. There must be one length, not "
                "negative, for each key and example, and their sum must be the number of values."
            )
        return Jagged(keys, bags, ids, given, bounds)

    def _forward(self, features: Any) -> Any:
        if is_a(features, "torch.fx", "Proxy"):  # a pipeline looks through the model
            name = features.tracer.path_of_module(self._module)
            return features.tracer.create_proxy("call_module", name, (features,), {})
        features = defined(MODULES, "maybe_td_to_kjt")(features, None)
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            raise UsageError(
                "A KeyedJaggedTensor with stride_per_key_per_rank or inverse_indices (variable batch sizes) "
                "was given to a collection on parameter servers. Pass one with equally many examples for "
                "each key."
            )
        training = torch.is_grad_enabled()
        if not self._is_plain(training):
            return self._own(features)
        if self._called is not None and (training or not self._module.training):
            self._called(self._module, features)
        weights = self._weights_of(features)
        batches = self._batches(features, insert=training)
        with without_overrides():
            if not self._pools:
                rows = [each for batch in batches for each in self._rows(batch, training)]
                return self._jagged_tensors(features, rows)
            if training:
                inputs = [
                    each for batch in batches for each in (batch.anchor, *batch.features.weights.values())
                ]
                out: Tensor = _Pool.apply(batches, self._width, weights, *inputs)  # type: ignore[no-untyped-call]  # torch's
            else:
                out = _pooled(batches, self._width, weights)
        return defined(TENSORS, "KeyedTensor")(
            keys=self._names,
            length_per_key=self._module._lengths_per_embedding,
            values=out.to(features.device()),
        )

    def _weights_of(self, features: Any) -> Tensor | None:
        if not (self._pools and self._module.is_weighted()):
            return None
        weights: Tensor = features.weights().to("cpu", torch.float32)
        if weights.shape != features.values().shape:
            raise UsageError(
                f"A KeyedJaggedTensor has weights {list(weights.shape)} for values "
                f"{list(features.values().shape)}. There must be one weight for each value."
            )
        return weights

    def _is_plain(self, training: bool) -> bool:
        """Return True if all tables can be computed together."""
        if not self._together or torch._C._get_tracing_state() is not None or peek_interpreter_stack():
            return False
        if any(self._given):
            for serving in self._servings:
                serving.check_given()
        now = [each.get("weight") for each in self._parameters]
        if any(self._hooks) or not all(map(operator.is_, now, self._weights)):
            return False
        if not training:
            return True
        with without_overrides():
            return all(each.requires_grad for each in self._weights) and not any(
                each.group.collected.returning for each in self.features
            )

    def _batches(self, features: Any, *, insert: bool) -> list[JaggedBatch]:
        parts, jagged, found, new = jagged_parts(features), None, [], []
        for each in self.features:
            each.trains = insert
            batch = each.take(*parts)
            if batch is None:
                jagged = jagged or self.jagged(features)
                batch = each.batch(jagged)
                batch.check_ids()
                new.append(batch)
            found.append(batch)
        send_together(new)
        return found

    def _rows(self, batch: JaggedBatch, training: bool) -> list[Tensor]:
        return embedded(batch, batch.every) if training else batch.gather(batch.every)

    def _jagged_tensors(self, features: Any, rows: Sequence[Tensor]) -> dict[str, Any]:
        number, make = features.index_per_key(), defined(TENSORS, "JaggedTensor")
        lengths = features.lengths().view(len(features.keys()), features.stride()).unbind()
        ids = features.values().split(features.length_per_key()) if self._module.need_indices() else None
        names = [name for each in self.features for name in each.names]
        found = {}
        for place, name, each in zip(self._order, names, rows, strict=True):
            weights = None if ids is None else ids[number[name]]
            values = each.float().to(features.device())
            found[place] = make(values=values, lengths=lengths[number[name]], weights=weights)
        return {name: found[place] for place, name in enumerate(self._names)}


def send_together(batches: Sequence[JaggedBatch]) -> None:
    """Request the rows of these batches, in one message if possible."""
    groups = [each.features.group for each in batches]
    if groups and groups[0].together:
        groups[0].send([each.request for each in batches])
        return
    for group, each in zip(groups, batches, strict=True):
        group.send([each.request])
